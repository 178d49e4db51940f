"""Simulated sites that share SuperNodes, so that any number of SuperNodes can serve every site.

Flower's simulation starts as many SuperNodes as its own options say, by default two, and does not
know a data set's silos. Here each silo has its own node id. A message to that id goes to one of
Flower's SuperNodes, and a record in the message names the site that has to answer. Only a
simulation has such ids: in a deployment one SuperNode is one hospital.
"""

from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsilo.core.messages import SIMULATED_SITE
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import silo_names

# Flower's class is recognised by name, because its module changes between versions
_SIMULATION_GRID = "InMemoryGrid"
_FIRST_NODE = 1001


class SimulatedSites(Grid):
    """A Flower grid that has one node for each simulated site.

    It passes the messages for these nodes on to the SuperNodes of the simulation's own grid, of
    which there may be any number.

    Args:
        grid: the simulation's own grid.
        sites: the number of sites of the run, at least 1.
    """

    def __init__(self, grid: Grid, sites: int) -> None:
        self._grid = grid
        self._sites = sites

    def set_run(self, run: Run) -> None:
        """Set the run of the simulation's grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run of the simulation's grid."""
        return self._grid.run

    def create_message(self, *given: Any, **named: Any) -> Message:
        """Create a message (deprecated in Flower; use the Message constructor)."""
        return self._grid.create_message(*given, **named)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of the simulated sites: 1001 for the first site, 1002 for the next.

        The list is empty if no SuperNode is connected.
        """
        if not list(self._grid.get_node_ids()):
            return []
        return [_FIRST_NODE + partition for partition in range(self._sites)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send each message for a simulated site to a SuperNode, and return the new message ids.

        The destination of a message is the node id of a simulated site. A copy is sent, with a
        record of the site's number and the number of sites. Sites and SuperNodes count from 0, and
        SuperNodes are sorted by id. With n SuperNodes, site k belongs to SuperNode k modulo n. Any
        SuperNode can answer for any site, because the site's state is in files under its name.
        """
        supernodes = sorted(self._grid.get_node_ids())
        sent = []
        for message in messages:
            partition = message.metadata.dst_node_id - _FIRST_NODE
            site = ConfigRecord({"partition-id": partition, "num-partitions": self._sites})
            # Messages to several sites may share one content, so the record goes into a copy
            content = RecordDict({**message.content, SIMULATED_SITE: site})
            metadata = message.metadata
            sent.append(
                Message(
                    content,
                    supernodes[partition % len(supernodes)],
                    metadata.message_type,
                    ttl=metadata.ttl,
                    group_id=metadata.group_id,
                )
            )
        return self._grid.push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the messages with these ids, as far as they have arrived."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Raise a NotImplementedError, because ``wire.messaging`` takes replies one by one."""
        raise NotImplementedError("use push_messages and pull_messages")


def is_simulation(grid: Grid) -> bool:
    """Tell whether ``grid`` is the grid of Flower's own simulation."""
    return type(grid).__name__ == _SIMULATION_GRID


def with_all_sites(grid: Grid, settings: CommonSettings) -> Grid:
    """Return a grid with one node per silo, if ``grid`` is the grid of Flower's simulation.

    A silo is the part of the data that one simulated site holds. All silos then run, whatever the
    number of SuperNodes. In two cases ``grid`` is returned unchanged: it is of another kind, or
    only the sites know the names of the silos.

    Raises:
        DataError: the data set's files, which give the number of silos, are missing.
    """
    if not is_simulation(grid):
        return grid
    sites = len(silo_names(settings))
    if not sites:
        return grid
    return SimulatedSites(grid, sites)
