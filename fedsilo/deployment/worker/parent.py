"""The worker: it imports everything ahead, and forks a process for each message.

    python -m fedsilo.deployment.worker.parent --runtime 127.0.0.1:9094 --secret FILE --hospital PID

Flower starts a new process for each message, which imports PyTorch again, ten seconds for each
phase. A fork of a process that has imported it takes milliseconds. The worker itself does not
compute and never asks for a GPU, because a fork cannot use the resources of a driver or of another
thread.

A fork handles its message like Flower's ``flwr-clientapp``, except that the app received with the
run is only compared with the installed one, and not executed.
"""

import argparse
import gc
import importlib
import logging
import os
import pkgutil
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from flwr.app import ConfigRecord, Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsilo.client_app.app import app, refuse
from fedsilo.core.errors import FedsiloError, RefusedError, SettingError, error_line
from fedsilo.core.files.atomic_files import read_regular
from fedsilo.core.messages import CONFIG
from fedsilo.core.one_line import one_line
from fedsilo.core.processes import end_with
from fedsilo.deployment.worker.hospital import CANNOT
from fedsilo.deployment.worker.installed import InstalledApp, installed_app
from fedsilo.deployment.worker.supernode import PollInterval
from fedsilo.strategies.wire.messaging import retry_soon

_LONGEST_NAME = 100  # characters of a run's name in a log line
_RENEWED_AFTER = 1000  # tasks after which the worker is restarted
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
# The first message would import these; torch's optimisers import torch._dynamo
_PACKAGES = (
    "fedsilo.client_app.methods",
    "fedsilo.client_app.training",
    "fedsilo.client_app.privacy",
    "fedsilo.client_app.site",
    "fedsilo.client_app.summary",
)
_MODULES = (
    "torch",
    "torch._dynamo",
    "fedsilo.client_app.answer",
    "fedsilo.client_app.hello",
    "fedsilo.datasets.registry",
)

# Makes a reply from the message, the context and the bytes of the run's app
Answer = Callable[[Message, Context, bytes], Message]

_log = logging.getLogger("flwr")


@dataclass
class HospitalWorker:
    """The forked processes that answer tasks, and the function that each of them calls."""

    # Answers a task, given its token, in a new process; returns that process's exit code
    answer: Callable[[str], int]
    # The token of each process, by process id
    running: dict[int, str] = field(default_factory=dict)
    started: int = 0  # the number of tasks since the worker began

    def start(self, token: str) -> None:
        """Fork a process that answers one task, such as training in a round, and return at once.

        The new process calls ``answer`` with ``token``, which identifies the task, and exits when
        the task is answered. In the parent, the process is added to ``running`` and counted in
        ``started``.
        """
        # Unflushed text would be in both processes and be printed twice
        sys.stdout.flush()
        sys.stderr.flush()
        # A SIGTERM between the fork and the child's own handler would be lost: it waits until then
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        process = os.fork()
        if process == 0:
            _become_task(self.answer, token)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.running[process] = token
        self.started += 1

    def reap(self) -> None:
        """Remove the processes that have ended from ``running``, without waiting for the others.

        If a signal ended a process, an error is logged, because the reply may not have been sent.
        """
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            self.running.pop(process, None)
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                _log.error(
                    "fedsilo: the process %d that answered a message was ended by %s; Flower gives "
                    "up the message after some time without a sign of life",
                    process,
                    name,
                )

    def end(self) -> None:
        """Send SIGTERM to all processes that are answering tasks, without waiting for their end."""
        for process in self.running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def is_worn(self) -> bool:
        """Return whether the worker should be replaced by a fresh process before the next task.

        Either of two conditions is enough:

        - The worker has started at least 1000 tasks.
        - It has started a task, and its process has more than one thread. A fork copies only the
          thread that calls it. The child could wait for ever for a lock that another thread holds.

        OpenBLAS's threads do not count, because OpenBLAS ends them before the first fork.
        """
        threads = psutil.Process().num_threads()
        return self.started >= _RENEWED_AFTER or (self.started > 0 and threads > 1)


def preload() -> None:
    """Import the modules that are needed to answer messages, to share their memory with forks.

    Afterwards, all objects in memory are exempt from garbage collection (``gc.freeze``). A
    collection would write to the shared memory, and the system would copy it.
    """
    for name in _MODULES:
        importlib.import_module(name)
    for package in _PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.iter_modules(path, f"{package}."):
            importlib.import_module(module.name)
    gc.freeze()  # forks share these objects' memory, which a collection would copy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a hospital's worker, which answers each task of the SuperNode in a new process.

    The SuperNode is Flower's process that receives messages. The fedsilo that is installed here
    answers the tasks, and refuses a run whose code differs. The site file is read at each task. If
    it says "app: any", Flower's own program executes the code that came with the run instead. The
    worker ends when its parent process ends. SIGTERM ends the worker and its tasks.

    Args:
        arguments: the worker's arguments. None means the arguments of this process.

    Returns:
        The exit code: 0, or 3 (``CANNOT``) if the secret or the installation cannot be used, so
        that a restart would fail too. Such an error is printed to stderr.
    """
    given = _parser().parse_args(arguments)
    try:
        secret = _read_secret(given.secret)
        installed = installed_app()
        preload()
        retry_soon()
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return CANNOT
    # The digests are computed once, before the first fork, and every task uses them
    by_installed = answer_by(installed)

    def answer(token: str) -> int:
        # Only in the fork, because a thread in the worker itself would make each fork unsafe
        end_with(given.hospital)
        if given.site_file and runs_any_app(given.site_file):
            _run_flower_client_app(given.runtime, token, given.hospital)
        if answer_task(given.runtime, token, by_installed):
            return 0
        return 1

    worker = HospitalWorker(answer)

    def leave(*_: object) -> None:
        worker.end()
        os._exit(0)  # a normal exit would let Triton print a long list of unfreed objects

    signal.signal(signal.SIGTERM, leave)
    try:
        serve(worker, _client(given.runtime, secret), given.hospital)
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return CANNOT
    finally:
        worker.end()
    return 0


def serve(worker: HospitalWorker, client: RuntimeHttpClient, hospital: int) -> None:
    """Take tasks from the SuperNode, and start a process for each, until the parent process ends.

    The SuperNode is asked more often for ten seconds after each task. If it stops answering, one
    warning is logged, and the worker keeps asking. If ``worker.is_worn()`` is true and no task is
    running or waiting, this process starts its program again, with the same process id.

    Args:
        worker: starts and reaps the processes that answer.
        client: the client of the SuperNode's Runtime API.
        hospital: the id of the parent process. Any other parent id means that this parent has
            ended.

    Raises:
        SettingError: the SuperNode does not accept the worker's secret.
    """
    interval, silent = PollInterval(), False
    while os.getppid() == hospital:
        worker.reap()
        given = _acquire_task(client)
        if given is None and not silent:
            _log.warning("fedsilo: the SuperNode's Runtime API does not answer; the worker waits")
        silent = given is None
        if given and given.HasField("task") and given.token:
            worker.start(given.token)
            interval.note_arrival()
            continue
        if not worker.running and worker.is_worn():
            # A new worker with the same process id, so that the hospital's process notices nothing
            again = ("-m", "fedsilo.deployment.worker.parent", *sys.argv[1:])
            os.execv(sys.executable, [sys.executable, *again])
        time.sleep(interval.seconds())


def _acquire_task(client: RuntimeHttpClient) -> AcquireTaskResponse | None:
    """Ask the SuperNode for the next task, and return its response.

    If no task is waiting, the response contains no task. If the SuperNode does not answer, or
    answers with an HTTP error, the result is None.

    Raises:
        SettingError: the SuperNode does not accept the worker's secret (HTTP 401 or 403).
    """
    try:
        return client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise SettingError(
                "the SuperNode does not accept the worker's secret: start both with the same file "
                "(--superexec-auth-secret-file of the SuperNode, --secret of the worker)"
            ) from None
        return None
    except httpx.HTTPError:
        return None


def runs_any_app(site_file: Path) -> bool:
    """Return whether a site file allows a run to bring its own code (its key 'app' is "any").

    If the file cannot be read or parsed, the result is False.
    """
    from fedsilo.client_app.site.policy import parse_site_file

    try:
        text = read_regular(Path(os.path.realpath(site_file))).decode("utf-8")
        return parse_site_file(text).app == "any"
    except (OSError, UnicodeDecodeError, SettingError):
        return False  # the installed app will report the fault


def _become_task(answer: Callable[[str], int], token: str) -> None:
    """Answer one task in this process, which was just forked, and exit.

    The function never returns. The exit code is that of ``answer``, or 1 after an error, which
    is logged. Python's cleanup at the exit is skipped, because it would also affect the parent.
    Before the task, SIGTERM is unblocked and gets its default effect, which ends the process.
    """
    # The handler changes first: a waiting SIGTERM would run the worker's handler in the fork
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = 1
    try:
        code = answer(token)
    # Including SystemExit, because the parent's code must not continue in its fork
    except BaseException:
        _log.exception("fedsilo: a task ended by an error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_flower_client_app(address: str, token: str, hospital: int) -> None:
    """Replace this process by Flower's ``flwr-clientapp``, which executes the app of a run.

    The app is the code that the run brings to the hospital. The worker calls this function only if
    the hospital allows any app. The command is taken from the folder of the running Python
    executable, or otherwise from the PATH. The function returns only if the command is in neither
    place.

    Args:
        address: the address of the SuperNode's Runtime API, host:port.
        token: identifies the task at the SuperNode.
        hospital: the id of the hospital's main process. Flower's process ends when that process
            ends.
    """
    # Next to this Python first: another Flower on the PATH may have another version
    command = shutil.which(TaskType.CLIENT_APP.value)
    beside = Path(sys.executable).parent / TaskType.CLIENT_APP.value
    if beside.is_file():
        command = str(beside)
    if command:
        options = ("--runtime-api-address", address, "--token", token, "--insecure")
        os.execv(command, [command, *options, "--parent-pid", str(hospital)])


def _runtime_client(
    address: str, component: str, interceptor: Any, **options: Any
) -> RuntimeHttpClient:
    """Build an HTTP client for the Runtime API of the SuperNode, which hands out tasks.

    The client uses plain HTTP without TLS, because its requests do not leave this machine.

    Args:
        address: the Runtime API's address, host:port.
        component: the name by which the client introduces itself, such as "flwr-clientapp".
        interceptor: adds the caller's credential to each request, such as a task's token.
        options: further arguments of Flower's ``RuntimeHttpClient.from_server_address``.
    """
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # it stays on the loopback
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), interceptor],
        **options,
    )


def answer_task(address: str, token: str, answer: Answer) -> bool:
    """Fetch the message of a task, send the reply, and return whether a reply was sent.

    A reply that reports an error counts as sent. If the message cannot be fetched from the
    SuperNode or the reply cannot be sent, the error is logged and the result is False. In every
    case the SuperNode is told that the task has ended. Heartbeats keep it from abandoning a long
    task. During the answer, log lines name the run and the round.

    Args:
        address: the address of the SuperNode's Runtime API, on this machine.
        token: identifies the task at the SuperNode.
        answer: makes the reply from the message, the context and the bytes of the run's app. If
            it raises an error, the reply reports only the error's type.
    """
    by_token, retrying = RuntimeTokenHttpInterceptor(token), make_simple_http_retry_invoker()
    client = _runtime_client(address, "flwr-clientapp", by_token, retry_invoker=retrying)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    # Without a sign of life the SuperNode would give the task up during a long training
    heartbeat.start()
    context, status, details = None, SubStatus.FAILED, "the task was not answered"
    try:
        message, context, _, fab = pull_task_input(client)
        with naming_run(message):
            reply = _answer(message, context, fab.content, answer)
            push_message(client, reply, context)
            outcome = "answered"
            if reply.has_error():
                outcome = "not answered"
            _log.info("%s: %s", message.metadata.message_type, outcome)
        status, details = SubStatus.COMPLETED, ""
    except Exception:  # no error may pass here: the SuperNode must hear that the task has ended
        _log.exception("fedsilo: a task could not be answered")
    finally:
        # The heartbeat outlasts this call, or the SuperNode could give the task up meanwhile
        push_task_output(client=client, context=context, sub_status=status, details=details)
        heartbeat.stop()
        client.close()
    return status == SubStatus.COMPLETED


@contextmanager
def naming_run(message: Message) -> Iterator[None]:
    """Put "[NAME round N] " before each message of Flower's logger during the block.

    ``NAME`` and ``N`` are the run's name and the round in the message. The message comes from
    the server, so both values are freed of line breaks and cut to 100 characters. If there is no
    run name, the log does not change.
    """
    config = ConfigRecord()
    if message.has_content():
        config = message.content.config_records.get(CONFIG, config)
    run = one_line(config.get("run-name", ""), _LONGEST_NAME)
    mark = ""
    if run:
        mark = f"[{run} round {one_line(config.get('round', 0), _LONGEST_NAME)}] "

    def add_mark(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{mark}{record.getMessage()}", None
        return True

    _log.addFilter(add_mark)
    try:
        yield
    finally:
        _log.removeFilter(add_mark)


def _answer(message: Message, context: Context, bundle: bytes, answer: Answer) -> Message:
    """Call ``answer`` with the other arguments, and return the reply to ``message``.

    If ``answer`` raises an error, the error is logged, and the reply names only its type. The
    text of an error could reveal data.
    """
    try:
        return answer(message, context, bundle)
    except Exception as error:
        _log.exception("fedsilo: a message could not be answered")
        reason = f"{type(error).__name__} (its text is in the site's own log)"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def answer_by(installed: InstalledApp) -> Answer:
    """Return a function that answers a run's messages with the installed app.

    The function takes the message, Flower's context and the bytes of the run's app. If that app
    differs from the installed one, the reply is a refusal, and none of the run's code is executed.
    """

    def answer(message: Message, context: Context, bundle: bytes) -> Message:
        try:
            installed.refuse_other(bundle)
        except RefusedError as error:
            return refuse(message, context, error)
        return app(message=message, context=context)

    return answer


def _client(address: str, secret: bytes) -> RuntimeHttpClient:
    by_secret = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=frozenset({_ACQUIRE})
    )
    return _runtime_client(address, "SuperExec", by_secret)


def _read_secret(path: Path) -> bytes:
    """Read the secret by which the SuperNode recognises the worker.

    The secret is the whole content of the file.

    Raises:
        SettingError: the file is empty or cannot be read.
    """
    secret, fault = b"", "is empty: give it random bytes"
    try:
        secret = path.read_bytes()
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    if not secret:
        raise SettingError(f"the worker's secret {path} {fault}")
    return secret


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedsilo.deployment.worker.parent", description=__doc__)
    parser.add_argument("--runtime", required=True, help="the SuperNode's Runtime API, host:port")
    parser.add_argument("--secret", required=True, type=Path, help="file of the SuperExec secret")
    parser.add_argument("--hospital", required=True, type=int, help="process with which it ends")
    parser.add_argument("--site-file", type=Path, help="the hospital's site file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
