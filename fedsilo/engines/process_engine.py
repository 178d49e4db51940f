"""The engine of several processes: a fork server that has loaded PyTorch, and a worker per core.

A worker is a pool of one process (``concurrent.futures``), forked in milliseconds. So if a process
dies, the engine knows which message it was answering. The large parts of a message are in shared
memory without a name, which the system frees however a process ends.
"""

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.forkserver import ensure_running
from threading import Thread

from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fedsilo.client_app.training.freed_memory import return_freed_memory
from fedsilo.core import processes
from fedsilo.core.errors import ProcessError
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import GPU_SHARE
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, flower_identity, partition_configs
from fedsilo.server_app.config.resources import check_device, check_resources, worker_environments
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.wire.parcels import Packing, Parcel, unpack

_PRELOADED = ("answer", "hello", "lab", "session")  # modules of client_app
_DEATHS = 3  # after this many dead workers for one message, its site counts as failed
_PAUSES = (0.0, 0.1, 1.0)  # seconds before each try to start a worker
_WAIT = 30.0  # seconds; the longest wait of one pull


class SiteProcess:
    """A worker process that answers one message at a time, for any simulated site.

    Args:
        arguments: environment variables of the process, settings of the run, and a node config for
            each site.
    """

    def __init__(
        self, arguments: tuple[dict[str, str], dict[str, Value], list[dict[str, Value]]]
    ) -> None:
        self.arguments = arguments
        self.start()

    def start(self) -> None:
        """Start the worker process. It replaces an earlier process that has died.

        The fork server creates the process by forking. If the fork server has just been killed, the
        start is tried up to three times, with a pause before the second and the third try.

        Raises:
            ProcessError: all tries failed.
        """
        for pause in _PAUSES:
            time.sleep(pause)
            self.pool = ProcessPoolExecutor(
                1, get_context("forkserver"), _begin_worker, self.arguments
            )
            try:
                with processes.without_main():
                    self.process = self.pool.submit(os.getpid)
                return
            except (EOFError, OSError) as error:  # the fork server was killed just now
                reason = one_line(error)
        raise ProcessError(
            f"cannot start a process for sites ({reason}): use --engine inline, which starts none"
        )

    def submit(self, parcel: Parcel) -> Future[Parcel]:
        """Send a packed message to the process, and return the future of its packed reply.

        If the process was killed while it was idle, it is started again first. If it is killed
        later, the future raises a BrokenProcessPool.

        Raises:
            ProcessError: the process cannot be started again.
        """
        try:
            return self.pool.submit(_answer_parcel, parcel)
        except BrokenProcessPool:
            self.start()
            return self.pool.submit(_answer_parcel, parcel)

    def end(self) -> None:
        """Kill the process at once, even in the middle of a computation."""
        # Killed first, because ``shutdown`` would wait for the end of a computation
        with suppress(BrokenProcessPool, ProcessLookupError):
            os.kill(self.process.result(), signal.SIGKILL)
        self.pool.shutdown(cancel_futures=True)


class ProcessGrid(InlineGrid):
    """A grid whose nodes run in worker processes.

    A node is given to the same worker as before if that worker is idle, because the worker then has
    the site's data in memory.
    """

    def __init__(
        self,
        run_config: Mapping[str, Value],
        node_configs: list[dict[str, Value]],
        environments: Iterable[Mapping[str, str]],
    ) -> None:
        super().__init__(ClientApp(), run_config, node_configs)  # its workers have the app
        self._packing = Packing()
        self._idle = [
            SiteProcess((os.environ | own, dict(run_config), node_configs)) for own in environments
        ]
        self._running: dict[Future[Parcel], tuple[Message, SiteProcess]] = {}
        self._replies: dict[str, Message] = {}
        self._home: dict[int, SiteProcess] = {}
        self._deaths = Counter[str]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue ``messages``, and return their ids. Earlier messages are not waited for any more.

        Earlier messages that no worker has begun are dropped, and so are replies that were not
        pulled.
        """
        # A new phase begins only when nobody waits for the replies of the phase before
        self._waiting.clear()
        self._replies.clear()
        return_freed_memory()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Wait for a reply to any of the messages, and return all replies that have arrived.

        The replies are in the order of ``message_ids``, and are returned only once. The result is
        empty in two cases: no worker has a message to answer, or no worker has answered one within
        30 seconds.

        Raises:
            ProcessError: shared memory has no room for a message, or a worker that has died cannot
                be started again.
        """
        wanted = list(message_ids)
        while self._replies.keys().isdisjoint(wanted):
            self._dispatch()
            done, _ = wait(self._running, _WAIT, FIRST_COMPLETED)
            if not done:
                return []
            for future in done:
                self._store_reply(future)
        self._dispatch()  # idle workers compute while the caller reads these replies
        return [self._replies.pop(key) for key in wanted if key in self._replies]

    def _dispatch(self) -> None:
        """Give a waiting message to each idle worker, until no worker is idle or no message waits.

        A worker keeps the data of the sites that it has run, so a site should return to its last
        worker. An idle worker gets the oldest message for such a site, or for a site that no worker
        has run. Otherwise, it gets the oldest message of all.
        """
        while self._idle and self._waiting:
            worker = self._idle.pop()
            chosen = next(iter(self._waiting))
            for key, message in self._waiting.items():
                # A worker has the data of its sites open; a site without a worker is free to take
                if self._home.get(message.metadata.dst_node_id, worker) is worker:
                    chosen = key
                    break
            message = self._waiting.pop(chosen)
            self._home[message.metadata.dst_node_id] = worker
            future = worker.submit(self._packing.pack(message))
            self._running[future] = message, worker

    def _store_reply(self, future: Future[Parcel]) -> None:
        """Store the reply that a worker's future holds, and mark the worker as idle.

        ``pull_messages`` returns the reply. If the worker died, it is started again, and the
        message goes back to the front of the queue. If a message has cost three workers, it gets an
        error reply instead.
        """
        message, worker = self._running.pop(future)
        self._idle.append(worker)
        key = message.metadata.message_id
        try:
            self._replies[key] = unpack(future.result())
        except BrokenProcessPool:
            self._deaths[key] += 1
            # First in the queue again, because the round waits for it; memory may be free by now
            if self._deaths[key] < _DEATHS:
                self._waiting = {key: message, **self._waiting}
            else:
                self._replies[key] = _build_killed_reply(message)
            worker.start()

    def end(self) -> None:
        """End all processes at once."""
        for worker in [*self._idle, *(worker for _, worker in self._running.values())]:
            worker.end()


def _build_killed_reply(message: Message) -> Message:
    """Build the error reply to a message after three workers died while they answered it."""
    reason = (
        f"its process was killed {_DEATHS} times while it answered, perhaps for lack of memory: "
        "give sites more with 'client-resources-num-cpus', or use --engine inline"
    )
    reply = Message(Error(0, reason), reply_to=message)
    reply.metadata.__dict__["_message_id"] = f"reply-{message.metadata.message_id}"
    return reply


# --- In a worker ---

_site: InlineGrid | None = None
_replies = Packing()


def _begin_worker(
    environment: dict[str, str],
    run_config: dict[str, Value],
    node_configs: list[dict[str, Value]],
) -> None:
    """Initialise a worker process, so that it can answer messages for any simulated site.

    The worker's environment variables are replaced. A grid that runs all sites in the worker is
    stored in the global ``_site``. The worker ignores Ctrl-C, because the command's process handles
    it. The worker ends when the command's process ends.

    Args:
        environment: all environment variables of the worker.
        run_config: the settings of the run.
        node_configs: the configuration of each site's node.
    """
    global _site
    # Without this, the garbage collector would touch, and so copy, all pages shared with the server
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_command, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    from fedsilo.client_app.app import app

    flower_identity().__enter__()
    _site = InlineGrid(app, run_config, node_configs)


def _end_with_command() -> None:
    # A worker of a killed command would wait for messages for ever
    command = parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _answer_parcel(parcel: Parcel) -> Parcel:
    """Unpack a message, let its simulated site answer it, and pack the reply."""
    assert _site is not None
    return _replies.pack(_site.answer(unpack(parcel)))


# --- A run ---


def start_fork_server() -> None:
    """Start the fork server, the process that forks the workers, if it does not run already.

    The fork server loads PyTorch in the background, and ignores Ctrl-C.
    """
    modules = [f"fedsilo.client_app.{name}" for name in _PRELOADED]
    get_context("forkserver").set_forkserver_preload([*modules, __name__])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is the command's
    try:
        ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def process_grid(settings: RunSettings, resources: Mapping[str, Value]) -> Iterator[ProcessGrid]:
    """Yield a grid that runs simulated sites in worker processes, inside a ``with`` statement.

    A grid is Flower's interface by which a server sends messages to sites and gets their replies.
    The worker processes are killed at the end of the statement.

    Args:
        settings: the settings of the run.
        resources: the number of sites and each worker's share of cores and GPUs, as
            ``check_resources`` returns them.

    Raises:
        SettingError: the workers would have no access to the GPU that 'machine.device' asks for.
    """
    share = str(resources["client-resources-num-gpus"])
    check_device(settings.common.device, float(share))
    start_fork_server()
    environments = [{GPU_SHARE: share, **own} for own in worker_environments(resources)]
    nodes = partition_configs(int(resources["num-supernodes"]))
    with flower_identity():
        grid = ProcessGrid(settings.as_mapping(), nodes, environments)
        try:
            yield grid
        finally:
            grid.end()


def run_with_processes(settings: RunSettings, resources: Mapping[str, Value]) -> RunDirectory:
    """Do a run with simulated sites in worker processes, and return the run directory.

    Args:
        settings: the settings of the run.
        resources: the number of sites and their shares of cores and GPUs, which are checked here.

    Raises:
        FedsiloError: the resources are wrong, the workers cannot use the device, or the run failed.
    """
    from fedsilo.server_app.run.runner import run

    wanted = check_resources(resources)
    with process_grid(settings, wanted) as grid:
        return run(grid, settings, {"engine": "processes", "resources": wanted})
