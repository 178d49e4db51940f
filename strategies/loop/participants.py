"""The participants: which site is behind which node. Node ids are random, site names are not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from models.contract.errors import SiteError
from models.contract.feature_statistics import FeatureStatistics
from models.contract.messages import CONFIG, HELLO
from models.contract.settings import CommonSettings
from models.contract.site_facts import SiteFacts
from models.contract.versions import own_versions
from models.maths.standardisation import pooled_statistics
from models.networks.kinds import Task
from strategies.loop.messaging import exchange
from strategies.wire.bundles import record_bytes

HELLO_TIMEOUT = 600.0  # a first start may have to decode the data
_TAKEN = (
    "another SuperNode is that site already: if this one is to take its place it joins once that "
    "one is gone, else give it its own 'site'"
)


@dataclass(frozen=True)
class Participants:
    """Sites by name, sorted: what they said of themselves, and their node ids.

    ``traffic`` holds the bytes of asking, down to the site and up from it; ``refused`` tells why
    nodes that are left out could not take part; ``asked`` are the nodes not to be asked again.
    """

    facts: Mapping[str, SiteFacts]
    nodes: Mapping[str, int]
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    asked: frozenset[int] = frozenset()

    def sites(self) -> list[str]:
        """Return the site names, sorted."""
        return sorted(self.facts)

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
        """Return the task that all sites share.

        Raises:
            SiteError: two sites hold data of different shape, classes or features.
        """
        first, *others = self.sites()
        tasks = {
            site: Task(self.facts[site].input_shape, self.facts[site].classes)
            for site in self.facts
        }
        for site in others:
            if tasks[site] != tasks[first]:
                raise SiteError(
                    f"site {site} holds {tasks[site]}, site {first} {tasks[first]}: "
                    "all sites of a run need the same input shape and classes"
                )
            features, first_features = self.facts[site].features, self.facts[first].features
            if features != first_features:
                unlike = sorted(set(features) ^ set(first_features)) or "the same in another order"
                raise SiteError(
                    f"the features of sites {site} and {first} differ ({unlike}): give all sites "
                    "the same schema"
                )
            if self.facts[site].schema != self.facts[first].schema:
                raise SiteError(
                    f"the schemas of sites {site} and {first} differ (levels, classes and their "
                    "order, marks of missing values, policy or declared figures): give all sites "
                    "the same schema"
                )
            if self.facts[site].backbone != self.facts[first].backbone:
                raise SiteError(
                    f"the backbones of sites {site} and {first} differ "
                    f"({self.facts[site].backbone}; {self.facts[first].backbone}): give all sites "
                    "the same 'backbone-weights'"
                )
        return tasks[first]

    def figures(self) -> FeatureStatistics | None:
        """Return the figures pooled from the sites' sums, None where none were sent.

        Raises:
            SiteError: only some sites sent sums.
        """
        sums = {site: self.facts[site].sums for site in self.sites()}
        if not any(sums.values()):
            return None
        if silent := [site for site, sent in sums.items() if sent is None]:
            raise SiteError(
                f"{', '.join(silent)} sent no sums to pool: all sites of a run need the same "
                "'standardise'"
            )
        return pooled_statistics([sent for sent in sums.values() if sent is not None])


def refuse_shared_data(facts: Mapping[str, SiteFacts]) -> None:
    """Refuse two sites that train on the very same samples, which would count them twice.

    Raises:
        SiteError: the fingerprints of two training splits that are not empty agree.
    """
    owner: dict[str, str] = {}
    for site, site_facts in sorted(facts.items()):
        if not site_facts.sizes()["train"]:
            continue
        first = owner.setdefault(site_facts.fingerprints.get("train", site), site)
        if first != site:
            raise SiteError(
                f"sites {first} and {site} hold the same training samples: one of them was given "
                "the other's data directory or volume, or its 'site' is not its own"
            )


def wait_for_nodes(grid: Grid, settings: CommonSettings, silos: int | None = None) -> list[int]:
    """Return the connected nodes, waiting up to ``join-timeout`` for ``min-sites`` of them.

    ``silos`` is how many there are, None if only the sites know.

    Raises:
        SiteError: fewer than ``min-sites``, or none, or more nodes than silos.
    """
    needed = max(settings.min_sites, 1)
    limit = time.monotonic() + settings.join_timeout
    while len(nodes := sorted(grid.get_node_ids())) < needed and time.monotonic() < limit:
        time.sleep(0.2)
    if silos is not None and len(nodes) > silos:
        raise SiteError(
            f"{len(nodes)} SuperNodes are connected and there are {silos} silos: "
            "start fewer SuperNodes, or raise 'silos' where images are cut into silos"
        )
    if len(nodes) < needed:
        raise SiteError(
            f"{len(nodes)} SuperNodes are connected after {settings.join_timeout:g} s "
            f"and {needed} are needed ('min-sites'): start more, or lower 'min-sites'"
        )
    return nodes


def meet_sites(grid: Grid, settings: CommonSettings, silos: int | None = None) -> Participants:
    """Ask every connected node who it is; there cannot be more of them than ``silos``.

    Raises:
        SiteError: fewer than ``min-sites`` (all) can take part, two nodes claim one site, or two
            sites train on the same samples.
    """
    nodes = wait_for_nodes(grid, settings, silos)
    facts_by_site: dict[str, SiteFacts] = {}
    nodes_by_site: dict[str, int] = {}
    traffic: dict[str, tuple[int, int]] = {}
    answers = _ask(grid, nodes)
    if answers.unreadable:
        raise SiteError(answers.unreadable[0])
    refused = answers.refused
    for node, facts, weight in answers.heard:
        if facts.site in facts_by_site:
            raise SiteError(
                f"two SuperNodes say that they are site '{facts.site}': give each its "
                "own 'site' in its node config"
            )
        facts_by_site[facts.site] = facts
        nodes_by_site[facts.site], traffic[facts.site] = node, weight
    if refused and len(facts_by_site) < (settings.min_sites or len(nodes)):
        raise SiteError(
            f"a SuperNode cannot take part: {'; '.join(refused)} -- {len(facts_by_site)} of "
            f"{len(nodes)} can and {settings.min_sites or len(nodes)} are needed ('min-sites')"
        )
    refuse_shared_data(facts_by_site)
    facts_by_site = dict(sorted(facts_by_site.items()))
    nodes_by_site = dict(sorted(nodes_by_site.items()))
    return Participants(facts_by_site, nodes_by_site, traffic, tuple(refused), frozenset(nodes))


def meet_latecomers(grid: Grid, participants: Participants) -> tuple[Participants, list[str]]:
    """Ask nodes that connected since; return all participants, and why others are refused.

    A site whose SuperNode was started anew, and so has another node, is the same site. While its
    old node still counts as connected the new one is refused, told of once, and asked again later.
    """
    connected = set(grid.get_node_ids())
    new_nodes = sorted(connected - participants.asked - set(participants.nodes.values()))
    if not new_nodes:
        return participants, []
    answers = _ask(grid, new_nodes)
    refused, asked = answers.refused + answers.unreadable, participants.asked | set(new_nodes)
    for node, facts, weight in answers.heard:
        if participants.nodes.get(facts.site) in connected:
            asked -= {node}
            if (refusal := f"{facts.site}: {_TAKEN}") not in (*participants.refused, *refused):
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
    try:
        joined.task()
        refuse_shared_data(joined.facts)
    except SiteError as error:
        return str(error)
    return None


Heard = tuple[int, SiteFacts, tuple[int, int]]


@dataclass(frozen=True)
class _Answers:
    """What nodes said of themselves, why others cannot take part, and what of an unreadable answer.

    ``heard`` has of each node its id, what it said, and the bytes of asking, down and up.
    """

    heard: list[Heard] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def _ask(grid: Grid, nodes: Iterable[int]) -> _Answers:
    """Ask nodes who they are."""
    content = RecordDict({CONFIG: ConfigRecord({"hello": True, **own_versions()})})
    messages = [Message(content, node, HELLO) for node in nodes]
    answers = _Answers()
    for node, reply in sorted(exchange(grid, messages, HELLO_TIMEOUT).items()):
        if reply is None or reply.has_error():
            reason = "no answer" if reply is None else reply.error.reason or "an error"
            answers.refused.append(reason)
            continue
        try:
            facts = SiteFacts.from_config(reply.content.config_records[CONFIG])
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            answers.unreadable.append(
                f"a SuperNode's hello cannot be read ({type(error).__name__}: {error}): server "
                "and site run different versions of fedsilo"
            )
            continue
        if "/" in facts.site:
            answers.refused.append(
                f"a site is called '{facts.site}': names of arrays end a site's name at '/', so "
                "choose a 'site' without one in its node config"
            )
            continue
        answers.heard.append((node, facts, (record_bytes(content), record_bytes(reply.content))))
    return answers
