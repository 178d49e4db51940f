"""The participants: which site is behind which node. Node ids are random, site names are not.

Whatever a node says of itself, it costs the run that node alone: it is named and left out, and the
run continues if 'min-sites' allows. What a hello may hold is in ``hello``, what sites must share
in ``alike``, whom the operator lets in in ``admission``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from flwr.serverapp import Grid

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import HELLO
from fedsilo.models.contract.one_line import by_reason, site_reason
from fedsilo.models.contract.settings import SUMS, CommonSettings
from fedsilo.models.contract.site_facts import FeatureStatistics, SiteFacts
from fedsilo.models.maths.standardisation import pooled_statistics
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.meeting.admission import Terms
from fedsilo.strategies.meeting.alike import (
    Refused,
    odd_sums,
    other_tasks,
    shared_data,
    task_of,
    unlike,
)
from fedsilo.strategies.meeting.hello import ask_nodes, read_hello

Heard = tuple[int, SiteFacts, tuple[int, int]]  # a node, what it said, bytes down and up

_JOIN_SECONDS = 60.0  # for the sites of a deployment to connect


@dataclass(frozen=True)
class Participants:
    """Sites by name, sorted: what they said of themselves, and their node ids.

    ``traffic`` holds the bytes of asking, down to the site and up from it; ``refused`` tells why
    nodes that are left out could not take part; ``asked`` are the nodes not to be asked again;
    ``terms`` are those on which sites take part.
    """

    facts: Mapping[str, SiteFacts]
    nodes: Mapping[str, int]
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    asked: frozenset[int] = frozenset()
    terms: Terms = field(default_factory=Terms)

    def sites(self) -> list[str]:
        """Return the site names, sorted."""
        return sorted(self.facts)

    def simulated(self) -> bool:
        """Tell whether all sites are simulated: a run of one process or machine."""
        return all(facts.simulated for facts in self.facts.values())

    def agreed(self) -> dict[str, int]:
        """Return the training samples that each site counts for by 'site-weights', if there are."""
        weights = self.terms.weights
        return {site: weights.samples[site] for site in self.sites()} if weights else {}

    def leaves(self) -> list[str]:
        """Return what else the sites said of themselves, in words."""
        if self.figures() is None:
            return []
        return [
            "at the start: for each feature of the table the number of values, their sum and the "
            "sum of their squares over the site's training rows (its exact mean and variance, and "
            "of a category the exact count); mean and standard deviation pooled from them go to "
            "all sites"
        ]

    def task(self) -> Task:
        """Return the task that all sites share: who has another was left out."""
        return task_of(self.facts[self.sites()[0]])

    def figures(self) -> FeatureStatistics | None:
        """Return the figures pooled from the sites' sums, None where none were sent."""
        sums = [sent for site in self.sites() if (sent := self.facts[site].sums) is not None]
        return pooled_statistics(sums) if sums else None


def wait_for_nodes(grid: Grid, settings: CommonSettings, silos: int | None = None) -> list[int]:
    """Return the connected nodes, waiting up to a minute for ``min-sites`` of them.

    ``silos`` is how many there are, None if only the sites know.

    Raises:
        SiteError: fewer than ``min-sites``, or none, or more nodes than silos.
    """
    needed = max(settings.min_sites, 1)
    limit = time.monotonic() + _JOIN_SECONDS
    while len(nodes := sorted(grid.get_node_ids())) < needed and time.monotonic() < limit:
        time.sleep(0.2)
    _refuse_many(len(nodes), silos)
    if len(nodes) < needed:
        raise SiteError(
            f"{len(nodes)} SuperNodes are connected after {_JOIN_SECONDS:g} s "
            f"and {needed} are needed ('min-sites'): start more, or lower 'min-sites'"
        )
    return nodes


def _refuse_many(nodes: int, silos: int | None) -> None:
    if silos is not None and nodes > silos:
        raise SiteError(
            f"{nodes} SuperNodes are connected and there are {silos} silos: "
            "start fewer SuperNodes, or raise 'silos' where images are cut into silos"
        )


def meet_sites(
    grid: Grid, settings: CommonSettings, silos: int | None = None, terms: Terms | None = None
) -> Participants:
    """Ask every connected node who it is; errors of ``hear_sites``, and those named here.

    Raises:
        SiteError: fewer than ``min-sites`` (all) can take part; it names all that cannot.
    """
    met = hear_sites(grid, settings, silos, terms)
    needed = needed_sites(met, settings)
    if met.refused and len(met.facts) < needed:
        raise SiteError(
            f"a site cannot take part: {'; '.join(grouped_refusals(met.refused))} -- "
            f"{len(met.facts)} of {len(met.asked)} can and {needed} are needed ('min-sites')"
        )
    return met


def grouped_refusals(refused: Iterable[str]) -> list[str]:
    """Return refusals, each ``<site>: <reason>``, with the sites of one reason in one line."""
    pairs = []
    for refusal in sorted(refused):
        site, colon, reason = refusal.partition(": ")
        pairs.append((site, colon + reason) if colon else ("", refusal))
    return [sites + reason for reason, sites in by_reason(pairs).items()]


def needed_sites(met: Participants, settings: CommonSettings) -> int:
    """Return how many sites a run needs: ``min-sites``, or all that were asked."""
    return settings.min_sites or len(met.asked)


def hear_sites(
    grid: Grid, settings: CommonSettings, silos: int | None = None, terms: Terms | None = None
) -> Participants:
    """Ask every connected node who it is; there cannot be more of them than ``silos``.

    Who cannot take part, alone or with the others, is left out and named in ``refused``; maybe
    nobody is left.

    Raises:
        SiteError: too few, or too many, are connected.
    """
    nodes, terms = wait_for_nodes(grid, settings), terms or Terms()
    read = partial(read_hello, counted=settings.trust != SUMS)
    heard, refused = ask_nodes(grid, nodes, HELLO, read, settings.away_timeout)
    simulated = all(facts.simulated for _, facts, _ in heard)
    heard = _admitted(heard, refused, terms, simulated)
    doubles = _doubles(heard, simulated)
    _refuse_many(len(nodes) - len(doubles), silos)
    refused += dict.fromkeys(doubles.values())
    heard = [one for one in heard if one[0] not in doubles]
    heard = _unlike_left_out(heard, settings, refused)
    by_site = sorted(heard, key=lambda one: one[1].site)
    return Participants(
        {facts.site: facts for _, facts, _ in by_site},
        {facts.site: node for node, facts, _ in by_site},
        {facts.site: weight for _, facts, weight in by_site},
        tuple(refused),
        frozenset(nodes) if simulated else frozenset(nodes) - doubles.keys(),
        terms,
    )


def _admitted(heard: list[Heard], refused: list[str], terms: Terms, simulated: bool) -> list[Heard]:
    """Return who fulfils the terms of operator and method; the others go to ``refused``."""
    faults = {node: terms.fault(node, facts, simulated) for node, facts, _ in heard}
    refused += [site_reason(fault) for fault in faults.values() if fault]
    return [one for one in heard if not faults[one[0]]]


def _doubles(heard: list[Heard], simulated: bool) -> dict[int, str]:
    """Return the nodes whose site has another SuperNode that takes its place, each with why.

    The first by node id takes part; a registry has left the one of the right key. Sites of a
    simulation have no doubles but by a fault, which leaves out all of that name.
    """
    nodes: dict[str, list[int]] = {}
    for node, facts, _ in heard:
        nodes.setdefault(facts.site, []).append(node)
    found: dict[int, str] = {}
    for site, those in sorted(nodes.items()):
        if simulated and len(those) > 1:
            found |= dict.fromkeys(
                those,
                f"{'two' if len(those) == 2 else len(those)} SuperNodes say that they are site "
                f"'{site}': give each its own 'site' in its node config",
            )
        found |= {node: _taken(site, node) for node in sorted(those)[1:] if not simulated}
    return found


def _taken(site: str, node: int) -> str:
    return (
        f"{site}: another SuperNode is that site already, and node {node} is left out: if it is to "
        "take its place it joins once that one is gone, else give it its own 'site'"
    )


def _unlike_left_out(
    heard: list[Heard], settings: CommonSettings, refused: list[str]
) -> list[Heard]:
    """Return the sites that can take part together; the reasons of the others go to ``refused``."""
    pooled = settings.standardise == "pooled"
    for left_out in (shared_data, other_tasks, lambda facts: odd_sums(facts, pooled)):
        reasons: Refused = left_out({facts.site: facts for _, facts, _ in heard})
        refused += dict.fromkeys(map(site_reason, reasons.values()))  # that of a pair is told once
        heard = [one for one in heard if one[1].site not in reasons]
    return heard


def meet_latecomers(grid: Grid, participants: Participants) -> tuple[Participants, list[str]]:
    """Ask nodes that connected since; return all participants, and why others are refused.

    A site whose SuperNode was restarted, and so has another node, is the same site. While its
    old node still counts as connected the new one is refused, reported once, and asked again later.
    """
    connected = set(grid.get_node_ids())
    new_nodes = sorted(connected - participants.asked - set(participants.nodes.values()))
    if not new_nodes:
        return participants, []
    counted = all(facts.label_counts for facts in participants.facts.values())
    heard, refused = ask_nodes(grid, new_nodes, HELLO, partial(read_hello, counted=counted))
    heard = _admitted(heard, refused, participants.terms, participants.simulated())
    asked = participants.asked | set(new_nodes)
    for node, facts, weight in heard:
        if participants.nodes.get(facts.site) in connected:
            asked -= {node}
            if (refusal := _taken(facts.site, node)) not in (*participants.refused, *refused):
                refused.append(refusal)
            continue
        joined = replace(
            participants,
            facts=dict(sorted({**participants.facts, facts.site: facts}.items())),
            nodes=dict(sorted({**participants.nodes, facts.site: node}.items())),
            traffic={**participants.traffic, facts.site: weight},
        )
        if reason := _why_not(facts, participants, joined):
            refused.append(f"{facts.site}: {reason}")
        else:
            participants = joined
    return replace(participants, refused=(*participants.refused, *refused), asked=asked), refused


def _why_not(facts: SiteFacts, participants: Participants, joined: Participants) -> str | None:
    """Return why a latecomer whose site has no other node cannot take part, None if it can."""
    known = participants.facts.get(facts.site)
    if known is not None and known.fingerprints != facts.fingerprints:
        return "it comes back with other data: start a new run"
    first = participants.sites()[0]
    if difference := unlike(facts.site, facts, first, participants.facts[first]):
        return difference
    if (facts.sums is None) != (participants.facts[first].sums is None):
        return "it sent sums and the others none, or none where they did: see 'standardise'"
    return shared_data(joined.facts).get(facts.site)
