"""Waiting for the nodes of a run to connect, before any is asked who it is."""

import time

from flwr.serverapp import Grid

from fedsilo.core.errors import SiteError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.strategies.meeting.terms import Terms

_JOIN_SECONDS = 60.0  # seconds that a deployment's sites have to connect


def wait_for_nodes(
    grid: Grid, settings: CommonSettings, silos: int | None = None, terms: Terms | None = None
) -> list[int]:
    """Wait up to 60 seconds until enough nodes are connected, and return their ids, sorted.

    Enough are 'run.min-sites' nodes. If that is 0, each site in 'server.sites' needs a node, and at
    least one node must be connected. With a registry and named sites, only the nodes of these sites
    count. Once enough are connected, the function does not wait for more.

    Args:
        grid: connects the server with the nodes.
        settings: the run's settings.
        silos: the largest number of counted nodes. None means any number.
        terms: the run's sites and the registry. None if the run takes all nodes.

    Raises:
        SiteError: too few nodes are connected after 60 seconds, or more than ``silos`` are
            connected.
        SettingError: the run names a site that is not in the registry.
    """
    terms = terms or Terms()
    terms.refuse_unregistered()
    needed = max(settings.min_sites or len(terms.sites), 1)
    limit = time.monotonic() + _JOIN_SECONDS
    nodes = terms.choose_nodes(grid.get_node_ids())
    while len(nodes) < needed and time.monotonic() < limit:
        time.sleep(0.2)
        nodes = terms.choose_nodes(grid.get_node_ids())
    refuse_many(len(nodes), silos)
    if len(nodes) < needed:
        raise SiteError(
            f"{len(nodes)} SuperNodes{terms.of_sites()} are connected after {_JOIN_SECONDS:g} s, "
            f"but {needed} are needed ('run.min-sites'): start more, or lower 'run.min-sites'"
        )
    return nodes


def refuse_many(nodes: int, silos: int | None) -> None:
    """Check that ``nodes``, the number of connected nodes, is at most ``silos``.

    If ``silos`` is None, any number is accepted.

    Raises:
        SiteError: more nodes are connected.
    """
    if silos is not None and nodes > silos:
        raise SiteError(
            f"{nodes} SuperNodes are connected, but there are {silos} silos: "
            "start fewer SuperNodes, or raise 'split.silos' if images are cut into silos"
        )
