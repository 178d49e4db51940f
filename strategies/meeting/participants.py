"""The participants of a run: the site behind each node, because node ids are random.

A bad hello costs the run only its own node: the node is named and left out, and the run continues
if 'run.min-sites' allows. What is checked is in ``checks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from flwr.serverapp import Grid

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import HELLO
from fedsilo.core.one_line import by_reason, site_reason
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.site_facts import FeatureStatistics, SiteFacts
from fedsilo.core.tasks import TASKS
from fedsilo.models.maths.standardisation import pooled_statistics
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.strategies.meeting.checks import (
    TOGETHER_CHECKS,
    find_difference,
    find_shared_data,
    shape_of,
)
from fedsilo.strategies.meeting.hello import NodeAnswer, ask_nodes, read_hello
from fedsilo.strategies.meeting.terms import Terms, split_sites
from fedsilo.strategies.meeting.waiting import refuse_many, wait_for_nodes

Hello = NodeAnswer[SiteFacts]


@dataclass(frozen=True)
class Participants:
    """The sites that take part in a run, and the nodes that were refused.

    Attributes:
        facts: each site's hello, its description of itself and its data.
        nodes: the id of each site's node, by which Flower addresses the site.
        traffic: for each site, the bytes of the question sent to it and of its hello.
        refused: the reasons why other nodes cannot take part, one line each.
        asked: the ids of nodes that are not asked again.
        terms: the operator's terms for sites, and the sites that the run names.
    """

    facts: Mapping[str, SiteFacts]
    nodes: Mapping[str, int]
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    asked: frozenset[int] = frozenset()
    terms: Terms = field(default_factory=Terms)

    def sites(self) -> list[str]:
        """Return the names of the sites, sorted."""
        return sorted(self.facts)

    def are_simulated(self) -> bool:
        """Tell whether all sites are simulated, in one process or on one machine."""
        return all(facts.simulated for facts in self.facts.values())

    def agreed_samples(self) -> dict[str, int]:
        """Return each site's number of training samples in the file 'run.site-weights'.

        The hospitals and the operator have agreed on these numbers, which replace the reported ones
        as weights. The mapping is empty if the run has no such file. It has only sites that take
        part.
        """
        weights = self.terms.weights
        if not weights:
            return {}
        return {site: weights.samples[site] for site in self.sites()}

    def leaves(self) -> list[str]:
        """Return a sentence about the sums over a table's features that sites send before round 1.

        It is the only element of the list. The list is empty if no site sends such sums.
        """
        if self.standardisation() is None:
            return []
        first = self.facts[self.sites()[0]]
        what = "each feature of the table"
        if TASKS[first.task].numeric:
            what = "each feature of a table and the outcome"
        return [
            f"at the start: for {what} the number of values, their sum and the "
            "sum of their squares over the site's training rows (its exact mean and variance, and "
            "of a category the exact count); mean and standard deviation pooled from them go to "
            "all sites"
        ]

    def shape(self) -> NetworkShape:
        """Return the input shape and the number of outputs that all sites share."""
        return shape_of(self.facts[self.sites()[0]])

    def standardisation(self) -> FeatureStatistics | None:
        """Pool the sites' feature sums into the mean and standard deviation of each feature.

        The variance is divided by the number of values. Sites without sums are skipped. If no site
        sent sums, the result is None. The statistics are computed at each call.
        """
        pooled = []
        for site in self.sites():  # sorted, because sums of floats depend on the order
            sums = self.facts[site].sums
            if sums is not None:
                pooled.append(sums)
        if not pooled:
            return None
        return pooled_statistics(pooled)


def meet_sites(
    grid: Grid, settings: CommonSettings, silos: int | None = None, terms: Terms | None = None
) -> Participants:
    """Ask the connected nodes who they are, and return the sites that can take part.

    ``hear_sites`` does this, and explains the arguments, the result and its errors. In addition,
    too few sites can be an error here. They are one only if a node was refused, or if a site in
    'server.sites' is missing. Otherwise any number of sites is returned.

    Raises:
        SiteError: fewer sites than ``needed_sites`` can take part, and a node was refused or a
            named site is missing. The text has the reasons for the refusals or, without refusals,
            the missing names.
    """
    met = hear_sites(grid, settings, silos, terms)
    needed = needed_sites(met, settings)
    if met.refused and len(met.facts) < needed:
        raise SiteError(
            f"a site cannot take part: {'; '.join(grouped_refusals(met.refused))} -- "
            f"{len(met.facts)} of {len(met.asked)} can, but {needed} are needed ('run.min-sites')"
        )
    missing = sorted(set(met.terms.sites) - met.facts.keys())
    if missing and len(met.facts) < needed:
        raise SiteError(
            f"no connected SuperNode is site {', '.join(missing)} ('server.sites'): correct the "
            "name, or start that SuperNode"
        )
    return met


def grouped_refusals(refused: Iterable[str]) -> list[str]:
    """Join refusals with the same reason into one line that names all their sites.

    A refusal has the form ``<site>: <reason>``. The joined line has the names of the sites, and
    then the colon and the reason. A refusal without ": " stays unchanged. The lines are in the
    order of the sorted refusals.
    """
    pairs = []
    for refusal in sorted(refused):
        site, colon, reason = refusal.partition(": ")
        if colon:
            pairs.append((site, colon + reason))
        else:  # a refusal without a site
            pairs.append(("", refusal))
    return [sites + reason for reason, sites in by_reason(pairs).items()]


def needed_sites(met: Participants, settings: CommonSettings) -> int:
    """Return the number of sites that must be able to take part for a run to begin.

    It is 'run.min-sites'. If that is 0, it is the number of sites in 'server.sites'. If that
    setting is empty too, it is the number of asked nodes (``met.asked``). In a deployment, further
    nodes of the same site are not in ``met.asked``.
    """
    return settings.min_sites or len(met.terms.sites) or len(met.asked)


def hear_sites(
    grid: Grid, settings: CommonSettings, silos: int | None = None, terms: Terms | None = None
) -> Participants:
    """Ask the connected nodes to describe themselves, and return the sites that can take part.

    A node that cannot take part, alone or with the other nodes, is left out. ``refused`` of the
    result has the reason. The result may have no sites. If 'server.sites' names sites, any other
    site is left out without a reason. With a registry, the nodes of other sites are not asked.

    The function first waits for enough nodes (``wait_for_nodes``).

    Args:
        grid: connects the server with the nodes.
        settings: the run's settings.
        silos: the largest possible number of nodes, without those that repeat a site. None means
            any number.
        terms: the operator's conditions, such as registered site names. None means no conditions.

    Raises:
        SiteError: too few or too many nodes are connected.
        SettingError: 'server.sites' is not valid, or names a site that is not registered.
    """
    terms = replace(terms or Terms(), sites=split_sites(settings.sites))
    nodes = wait_for_nodes(grid, settings, terms=terms)
    read = partial(read_hello, needs_counts=settings.trust != SUMS)
    hellos, refused = ask_nodes(grid, nodes, HELLO, read, settings.away_timeout)
    simulated = all(hello.content.simulated for hello in hellos)
    hellos = _admit(hellos, refused, terms, simulated)
    duplicates = _find_duplicates(hellos, simulated)
    refuse_many(len(nodes) - len(duplicates), silos)
    refused += dict.fromkeys(duplicates.values())
    hellos = [hello for hello in hellos if hello.node not in duplicates]
    hellos = _drop_unlike(hellos, settings, refused)
    # A duplicate at a real hospital may take its site's place later, so it is asked again
    asked = frozenset(nodes)
    if not simulated:
        asked -= duplicates.keys()
    facts: dict[str, SiteFacts] = {}
    node_of: dict[str, int] = {}
    traffic: dict[str, tuple[int, int]] = {}
    for hello in sorted(hellos, key=lambda hello: hello.content.site):
        site = hello.content.site
        facts[site], node_of[site], traffic[site] = hello.content, hello.node, hello.traffic
    return Participants(facts, node_of, traffic, tuple(refused), asked, terms)


def _admit(hellos: list[Hello], refused: list[str], terms: Terms, simulated: bool) -> list[Hello]:
    """Select the descriptions of sites (hellos) that meet the conditions in ``terms``.

    A site that 'server.sites' does not name is left out without a reason. Several nodes of the same
    site may be selected.

    Args:
        hellos: the readable hellos.
        refused: the reason against each other hello is appended to this list.
        terms: the registered names, the agreed numbers of samples, and the method's own condition.
        simulated: whether all sites of the run are simulated. Then registered names are not
            checked.
    """
    admitted = []
    for hello in hellos:
        if terms.is_outside(hello.content.site):
            continue
        fault = terms.fault(hello.node, hello.content, simulated)
        if fault:
            refused.append(site_reason(fault))
        else:
            admitted.append(hello)
    return admitted


def _find_duplicates(hellos: list[Hello], simulated: bool) -> dict[int, str]:
    """Find nodes that must not take part because another node says that it is the same site.

    In a deployment, the node with the lowest id stays, and the other nodes are found. In a
    simulation the configuration must be wrong, so all nodes of that site are found.

    Args:
        hellos: the hellos (descriptions of sites) of all admitted nodes.
        simulated: whether all sites of the run are simulated.

    Returns:
        The reason by node id.
    """
    nodes: dict[str, list[int]] = {}
    for hello in hellos:
        nodes.setdefault(hello.content.site, []).append(hello.node)
    found: dict[int, str] = {}
    for site, same in sorted(nodes.items()):
        if not simulated:
            for node in sorted(same)[1:]:
                found[node] = _second_node_refusal(site, node)
        elif len(same) > 1:
            number = {2: "two"}.get(len(same), str(len(same)))
            reason = (
                f"{number} SuperNodes say that they are site '{site}': give each its own 'site' "
                "in its node config"
            )
            found |= dict.fromkeys(same, reason)
    return found


def _second_node_refusal(site: str, node: int) -> str:
    return (
        f"{site}: another SuperNode is already that site, so node {node} is left out: it can join "
        "once the other SuperNode is gone; if it is another site, give it its own 'site'"
    )


def _drop_unlike(hellos: list[Hello], settings: CommonSettings, refused: list[str]) -> list[Hello]:
    """Return the descriptions of the sites (hellos) that can take part together.

    The checks in ``TOGETHER_CHECKS`` run in this order:

    - No two sites have the same training samples.
    - All sites have the same task.
    - All sites send sums over their features if the run pools these sums. Otherwise no site does.
      If no site sends any, there is no fault.
    - No feature has a scale at a site that is far above the median over the sites.

    A site that fails a check is left out of the later checks. Its reason is appended to
    ``refused``. If several sites fail a check with the same reason, the reason is appended once.
    """
    pooled = settings.standardise == "pooled"
    for check in TOGETHER_CHECKS:
        reasons = check({hello.content.site: hello.content for hello in hellos}, pooled)
        # Two sites with the same reason get one line
        refused += dict.fromkeys(map(site_reason, reasons.values()))
        # Each check sees only the sites that passed those before
        hellos = [hello for hello in hellos if hello.content.site not in reasons]
    return hellos


def meet_latecomers(
    grid: Grid, participants: Participants, away_timeout: float = 300.0
) -> tuple[Participants, list[str]]:
    """Ask the nodes that connected since the last call, and admit those that can take part.

    A site whose SuperNode restarted comes back on a new node. While the site's old node is still
    connected, the new node is refused. It is asked again at each call, but its refusal is returned
    only once. Any other refused node is not asked again. A node of a site that 'server.sites' does
    not name is not asked again either.

    Args:
        grid: connects the server with the nodes.
        participants: the sites that take part so far, and the nodes refused so far.
        away_timeout: seconds that a node may be disconnected before it is given up.

    Returns:
        All participants, old and new, and the new refusals, one line each. Without new nodes, they
        are ``participants`` and an empty list.
    """
    connected = set(grid.get_node_ids())
    new_nodes = participants.terms.choose_nodes(
        connected - participants.asked - set(participants.nodes.values())
    )
    if not new_nodes:
        return participants, []
    # No site sends label counts at trust 'sums', so a latecomer need not either
    needs_counts = all(facts.label_counts for facts in participants.facts.values())
    read = partial(read_hello, needs_counts=needs_counts)
    hellos, refused = ask_nodes(grid, new_nodes, HELLO, read, away_timeout)
    hellos = _admit(hellos, refused, participants.terms, participants.are_simulated())
    asked = participants.asked | set(new_nodes)
    for hello in hellos:
        node, facts = hello.node, hello.content
        # Two nodes claim one site, and only the hospital knows which is right: the first one stays
        if participants.nodes.get(facts.site) in connected:
            asked -= {node}
            refusal = _second_node_refusal(facts.site, node)
            if refusal not in participants.refused and refusal not in refused:
                refused.append(refusal)
            continue
        joined = replace(
            participants,
            facts=dict(sorted({**participants.facts, facts.site: facts}.items())),
            nodes=dict(sorted({**participants.nodes, facts.site: node}.items())),
            traffic={**participants.traffic, facts.site: hello.traffic},
        )
        reason = _latecomer_fault(facts, participants, joined)
        if reason:
            refused.append(f"{facts.site}: {reason}")
        else:
            participants = joined
    return replace(participants, refused=(*participants.refused, *refused), asked=asked), refused


def _latecomer_fault(
    facts: SiteFacts, participants: Participants, joined: Participants
) -> str | None:
    """Explain why a site that connected late cannot take part, or return None if it can.

    A site that comes back must have the same fingerprints of its data as before. A site must have
    the same task as the first participant by name. It must send feature sums if the first
    participant does, and otherwise none. It must not have another site's training samples.

    Args:
        facts: the late site's description of itself and its data.
        participants: the participants without the late site.
        joined: the participants including the late site.
    """
    known = participants.facts.get(facts.site)
    if known is not None and known.fingerprints != facts.fingerprints:
        return "it comes back with other data: start a new run"
    first = participants.sites()[0]
    difference = find_difference(facts.site, facts, first, participants.facts[first])
    if difference:
        return difference
    if (facts.sums is None) != (participants.facts[first].sums is None):
        return (
            "it sent feature sums but the other sites did not, or the other sites did but it did "
            "not: see 'data.standardise'"
        )
    pooled = facts.sums is not None
    return find_shared_data(joined.facts, pooled).get(facts.site)
