"""The roster: which site is behind which node. Node ids are random, site names are not."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from models.contract import CONFIG, HELLO, SiteFacts
from models.errors import SiteError
from models.networks import Task
from models.settings import CommonSettings
from strategies.exchange import exchange
from strategies.state import record_bytes

HELLO_TIMEOUT = 600.0  # a first start may have to decode the data


@dataclass(frozen=True)
class Roster:
    """Sites by name, sorted: what they said of themselves, and their node ids.

    ``traffic`` holds the bytes of asking, down to the site and up from it.
    """

    facts: Mapping[str, SiteFacts]
    nodes: Mapping[str, int]
    traffic: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def sites(self) -> list[str]:
        """Return the site names, sorted."""
        return sorted(self.facts)

    def task(self) -> Task:
        """Return the task that all sites share.

        Raises:
            SiteError: two sites hold images of different shape or different classes.
        """
        first, *others = self.sites()
        tasks = {
            site: Task(self.facts[site].image_shape, self.facts[site].classes)
            for site in self.facts
        }
        for site in others:
            if tasks[site] != tasks[first]:
                raise SiteError(
                    f"site {site} holds {tasks[site]}, site {first} {tasks[first]}: "
                    "all sites of a run need the same image shape and classes"
                )
        return tasks[first]


def wait_for_nodes(grid: Grid, settings: CommonSettings) -> list[int]:
    """Return the connected nodes, waiting up to ``join-timeout`` for ``min-sites`` of them.

    Raises:
        SiteError: fewer than ``min-sites``, or none, or more nodes than silos.
    """
    least = max(settings.min_sites, 1)
    limit = time.monotonic() + settings.join_timeout
    while len(nodes := sorted(grid.get_node_ids())) < least and time.monotonic() < limit:
        time.sleep(0.2)
    if len(nodes) > settings.silos:
        raise SiteError(
            f"{len(nodes)} SuperNodes are connected and 'silos' is {settings.silos}: "
            "start fewer SuperNodes or raise 'silos'"
        )
    if len(nodes) < least:
        raise SiteError(
            f"{len(nodes)} SuperNodes are connected after {settings.join_timeout:g} s "
            f"and {least} are needed ('min-sites'): start more, or lower 'min-sites'"
        )
    return nodes


def meet_sites(grid: Grid, settings: CommonSettings) -> Roster:
    """Ask every connected node who it is.

    Raises:
        SiteError: a node cannot answer, or two nodes claim one site.
    """
    nodes = wait_for_nodes(grid, settings)
    content = RecordDict({CONFIG: ConfigRecord({"hello": True})})
    messages = [Message(content, node, HELLO) for node in nodes]
    facts: dict[str, SiteFacts] = {}
    found: dict[str, int] = {}
    traffic: dict[str, tuple[int, int]] = {}
    for node, reply in sorted(exchange(grid, messages, HELLO_TIMEOUT).items()):
        if reply is None or reply.has_error():
            reason = "no answer" if reply is None else reply.error.reason
            raise SiteError(f"a SuperNode cannot take part: {reason}")
        try:
            said = _facts(reply.content.config_records[CONFIG])
            said.sizes()["train"]  # what every reply's weight is held against
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise SiteError(
                f"a SuperNode's hello cannot be read ({type(error).__name__}: {error}): server "
                "and site run different versions of fedsilo"
            ) from None
        if said.site in facts:
            raise SiteError(
                f"two SuperNodes say that they are site '{said.site}': give each its "
                "own 'site' in its node config"
            )
        facts[said.site], found[said.site] = said, node
        traffic[said.site] = (record_bytes(content), record_bytes(reply.content))
    return Roster(dict(sorted(facts.items())), dict(sorted(found.items())), traffic)


def _facts(config: Mapping[str, Any]) -> SiteFacts:
    channels, height, width = (int(length) for length in config["image-shape"])
    return SiteFacts(
        site=str(config["site"]),
        distribution=str(config["distribution"]),
        image_shape=(channels, height, width),
        classes=int(config["classes"]),
        label_counts=json.loads(config["label-counts"]),
        fingerprints=json.loads(config["fingerprints"]),
        homeless=bool(config["homeless"]),
    )
