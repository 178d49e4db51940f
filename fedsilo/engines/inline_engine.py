"""The in-process engine: a Flower Grid that calls the ClientApp for one site after another.

It is meant for debugging, tests and one large GPU, and runs the same apps as ``flwr run``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsilo.core.errors import MemoryShortageError
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.resources import has_gpu
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.config.training import why_not_together
from fedsilo.server_app.records.run_directory import RunDirectory

_SERVER_NODE = 1  # flwr.common.constant.SUPERLINK_NODE_ID
_FIRST_NODE = 1001


class InlineGrid(Grid):
    """A grid whose nodes run in this process: each call of ``pull_messages`` computes one reply.

    Args:
        client_app: answers the messages.
        run_config: the run's settings by key, the same for all nodes.
        node_configs: the node config of each node.
        together: how many sites to train as one batch; 1 for one after another.
    """

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, Value],
        node_configs: Iterable[Mapping[str, Value]],
        together: int = 1,
    ) -> None:
        self._app = client_app
        self._run = Run.create_empty(1)
        shared = dict(run_config)  # one for all nodes
        self._contexts: dict[int, Context] = {}
        for node, config in enumerate(node_configs, _FIRST_NODE):
            # A site keeps its state over the messages of a run in its own context
            own = Context(self._run.run_id, node, dict(config), RecordDict(), shared)
            self._contexts[node] = own
        self._waiting: dict[str, Message] = {}
        self._together = together
        self._trained: set[str] = set()  # messages whose sites have been trained as one batch
        self._train_together: Callable[[list[tuple[Message, Context]]], bool] | None = None
        self._said_alone = False  # whether a line said that sites do not train as one
        self._numbers = count(1)

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
        """Create a message to the site ``dst_node_id`` and return it. The message is not queued.

        The arguments and their order are those of Flower's own grids.
        """
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes; each node is a simulated site."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages that ``pull_messages`` will answer, and return their new ids in order.

        The id is also stored in the message's metadata. Nothing is computed yet.
        """
        ids = []
        for message in messages:
            ids.append(f"inline-{next(self._numbers)}")
            message.metadata.__dict__["_message_id"] = ids[-1]  # as Flower's own grids do
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Compute and return one reply: to the oldest waiting message among ``message_ids``.

        The result is a list with one reply, or an empty list if none of these messages is waiting.

        If the grid trains several sites as one batch, and the message was not in the latest batch,
        the next batch is trained first. That batch has the sites of the oldest waiting training
        messages, including messages that are not in ``message_ids``.
        """
        wanted = set(message_ids)
        # One reply per call, so that the caller can show progress between two sites
        for message_id in list(self._waiting):
            if message_id in wanted:
                if self._together > 1 and message_id not in self._trained:
                    self._train_next()
                return [self.answer(self._waiting.pop(message_id))]
        return []

    def _train_next(self) -> None:
        """Train the sites of the oldest waiting training messages as one batch.

        The batch has at most ``_together`` messages, whose ids are stored in ``_trained``. A site
        uses its result when it answers its message.

        If the batch needs more memory than there is, and the user left the number of sites open,
        all sites train one after another from now on, and a line says so. If a method has a
        training that no batch can take, one line says so.

        Raises:
            MemoryShortageError: the GPU or the machine lacks memory for the number of sites that
                the user chose.
            RuntimeError: the training failed for a reason other than a lack of memory.
        """
        if self._train_together is None:
            from fedsilo.engines import stacked_steps, together

            held = stacked_steps.HeldSamples()
            self._train_together = partial(together.train_together, held=held)
        batch: list[tuple[Message, Context]] = []
        self._trained = set()
        for message_id, message in self._waiting.items():
            if message.metadata.message_type == TRAIN and len(batch) < self._together:
                batch.append((message, self._contexts[message.metadata.dst_node_id]))
                self._trained.add(message_id)
        all_stack = True
        try:
            all_stack = self._train_together(batch)
        except (MemoryError, RuntimeError) as error:
            self._go_on_alone(error, batch)
        if not all_stack and not self._said_alone:
            self._said_alone = True
            message, context = batch[0]
            print(
                f"fedsilo: sites train one after another in round {message.metadata.group_id} and "
                f"in rounds like it, because method '{context.run_config['method']}' has training "
                "steps that sites cannot take as one"
            )

    def _go_on_alone(self, error: Exception, batch: list[tuple[Message, Context]]) -> None:
        """Make sites train one after another from now on, because memory is too short for a batch.

        A line that says so is printed. The samples that were kept on the device for batches are
        released.

        Args:
            error: the error that the training of the batch raised.
            batch: the messages of the batch, each with the context of its site.

        Raises:
            MemoryShortageError: memory is short, but the user set the number of sites
                ('machine.vectorised'), so nothing changes.
            Exception: ``error`` itself, if it is not about a lack of memory.
        """
        from fedsilo.client_app.training.memory import raise_memory_shortage

        message, context = batch[0]
        try:
            raise_memory_shortage(error, context.run_config, message, len(batch))
        except MemoryShortageError:
            if context.run_config["machine.vectorised"]:
                raise
            self._together, self._train_together = 1, None  # also lets go of the samples
            print(
                f"fedsilo: {len(batch)} sites as one batch need more memory than there is, so "
                "sites train one after another from now on"
            )
            return
        raise error

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Compute the reply to each message, one after another, and return the replies in order.

        Each message is queued first and gets an id. ``timeout`` is ignored.
        """
        replies: list[Message] = []
        for message_id in self.push_messages(messages):
            replies.extend(self.pull_messages([message_id]))
        return replies

    def answer(self, message: Message) -> Message:
        """Compute the reply to a message by calling the ClientApp with the context of its site.

        If the ClientApp raises an exception, the reply is an error message with the type and the
        text of the exception, as at a real node.
        """
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._app(message, context)
        except Exception as error:  # a SuperNode also turns a failing app into an error reply
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)


def partition_configs(nodes: int) -> list[dict[str, Value]]:
    """Return the node configs that Flower's simulation gives to ``nodes`` simulated sites."""
    return [{"partition-id": index, "num-partitions": nodes} for index in range(nodes)]


@contextmanager
def flower_identity() -> Iterator[None]:
    """Allow messages to be created outside of a Flower process, inside a ``with`` statement.

    Flower's Message constructor reads the ids of the run, the node and the task from variables of
    the process. The statement sets these variables, and restores them at its end.
    """
    # The private attributes, because the public ones raise an error while they are not set
    before = (TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, _SERVER_NODE, 1
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


def choose_together(common: CommonSettings, sites: int) -> int:
    """Choose how many simulated sites are trained as one batch, at least 1.

    The first rule that applies decides:

    - If 'machine.vectorised' is above 0, the result is that setting, even above ``sites``.
    - With fewer than two sites, with the device "cpu" or without a GPU, it is 1.
    - If the method or a setting requires that sites train one by one, it is 1.
    - Otherwise it is ``sites``.

    The last two choices are printed.

    Args:
        common: the run's common settings.
        sites: the number of simulated sites.
    """
    if common.vectorised or sites < 2 or common.device == "cpu" or not has_gpu():
        return max(1, common.vectorised)
    reason = why_not_together(common)
    if reason:
        print(f"fedsilo: sites use the GPU one after another, because {reason}")
        return 1
    print(
        f"fedsilo: all {sites} sites train as one batch on the GPU (one after another: --set "
        "machine.vectorised=1)"
    )
    return sites


@contextmanager
def inline_grid(settings: RunSettings, nodes: int, together: int = 1) -> Iterator[InlineGrid]:
    """Yield a Flower grid whose simulated sites run in this process, inside a ``with`` statement.

    A grid is Flower's interface by which a server sends messages to sites and gets their replies.

    Args:
        settings: the settings of the run.
        nodes: the number of simulated sites.
        together: the number of sites that train at the same time, with their samples in one batch.
            1 to train sites one by one.
    """
    from fedsilo.client_app.app import app

    with flower_identity():
        yield InlineGrid(app, settings.as_mapping(), partition_configs(nodes), together)


def run_inline(settings: RunSettings, nodes: int) -> RunDirectory:
    """Do a run over ``nodes`` simulated sites in this process, and return the run directory.

    On a GPU, several sites can be trained at the same time as one batched computation.
    ``choose_together`` chooses their number. If it is above 1, the run directory records it.

    Raises:
        FedsiloError: the run failed.
    """
    from fedsilo.server_app.run.runner import run

    together = choose_together(settings.common, nodes)
    with inline_grid(settings, nodes, together) as grid:
        launch: dict[str, Any] = {"engine": "inline", "resources": {"num-supernodes": nodes}}
        if together > 1:
            # The settings do not tell it if they leave the choice to the machine
            launch["sites-as-one"] = together
        return run(grid, settings, launch)
