"""The in-process engine: Flower's Grid, calling the ClientApp directly. No ray, no processes.

For debugging, for tests, and for one big GPU. It runs the same Strategy and ClientApp as
``flwr run`` does, one client after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from fedsilo.server_app.run.runner import Finish

_SERVER_NODE = 1  # flwr.common.constant.SUPERLINK_NODE_ID
_FIRST_NODE = 1001


class InlineGrid(Grid):
    """A grid whose nodes are this process: ``pull_messages`` answers one message a call.

    Args:
        client_app: the app of every node.
        run_config: what each node's Context holds.
        node_configs: one per node; partition ids where none is given.
    """

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, Value],
        node_configs: Iterable[Mapping[str, Value]],
    ) -> None:
        self._app = client_app
        self._run = Run.create_empty(1)
        self._contexts = {
            _FIRST_NODE + index: Context(
                run_id=self._run.run_id,
                node_id=_FIRST_NODE + index,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for index, config in enumerate(node_configs)
        }
        self._waiting: dict[str, Message] = {}
        self._pushed = 0

    def set_run(self, run: Run) -> None:
        """Set the run that this grid operates in."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid operates in."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message (deprecated in Flower; use the Message constructor)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages and return their ids."""
        ids = []
        for message in messages:
            self._pushed += 1
            message_id = f"inline-{self._pushed}"
            message.metadata.__dict__["_message_id"] = message_id  # as Flower's own grids do
            self._waiting[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the oldest waiting message among ``message_ids``."""
        wanted = set(message_ids)
        for message_id in list(self._waiting):
            if message_id in wanted:
                return [self._answer(self._waiting.pop(message_id))]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and return all replies."""
        return [
            reply
            for message_id in self.push_messages(messages)
            for reply in self.pull_messages([message_id])
        ]

    def _answer(self, message: Message) -> Message:
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # as a SuperNode does: a failing app is an error reply
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)


def partition_configs(nodes: int) -> list[dict[str, Value]]:
    """Return the node configs that Flower's simulation gives ``nodes`` SuperNodes."""
    return [{"partition-id": index, "num-partitions": nodes} for index in range(nodes)]


@contextmanager
def flower_identity() -> Iterator[None]:
    """Give Flower's Message constructor the run and node that it asks the process for."""
    before = (TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, _SERVER_NODE, 1
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


@contextmanager
def inline_grid(settings: RunSettings, nodes: int) -> Iterator[InlineGrid]:
    """Give a grid of ``nodes`` simulated sites in this process."""
    from fedsilo.client_app.app import app

    with flower_identity():
        yield InlineGrid(app, settings.as_mapping(), partition_configs(nodes))


def run_inline(settings: RunSettings, nodes: int, finish: Finish | None = None) -> RunDirectory:
    """Run ``settings`` over ``nodes`` simulated sites in this process.

    Raises:
        FedsiloError: the run failed.
    """
    from fedsilo.server_app.run.runner import run

    with inline_grid(settings, nodes) as grid:
        launch = {"engine": "inline", "resources": {"num-supernodes": nodes}}
        return run(grid, settings, launch, finish)
