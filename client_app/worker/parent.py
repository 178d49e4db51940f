"""The worker: it has imported everything, and forks a process for each message.

    python -m fedsilo.client_app.worker.parent --runtime 127.0.0.1:9094 --secret FILE --hospital PID

Flower starts a new process for each message, which imports PyTorch anew: ten seconds of a phase. A
fork of what is imported already takes milliseconds. The worker computes nothing itself and never
asks for a GPU: what a driver or a thread holds, a fork cannot take over.
"""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from fedsilo.client_app.worker.installed import installed_app
from fedsilo.client_app.worker.pace import Pace
from fedsilo.client_app.worker.task import answer_by, answer_task, end_with
from fedsilo.models.contract.errors import FedsiloError, SettingError

CANNOT = 3  # exit code: it would fail again
_RENEWED_AFTER = 1000  # tasks
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
# What a first message would import; torch._dynamo comes with its optimisers
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
    "torchmetrics",
    "fedsilo.client_app.answer",
    "fedsilo.client_app.hello",
    "fedsilo.datasets.registry",
)

_log = logging.getLogger("flwr")


@dataclass
class Worker:
    """The processes that answer tasks now.

    Attributes:
        answer: called in a new process with a task's token; it returns its exit code.
        running: tokens by process.
        started: tasks since the worker began.
    """

    answer: Callable[[str], int]
    running: dict[int, str] = field(default_factory=dict)
    started: int = 0

    def start(self, token: str) -> None:
        """Fork a process that answers a task."""
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            _become_task(self.answer, token)
        self.running[process] = token
        self.started += 1

    def reap(self) -> None:
        """Collect the processes that have ended, and say of one that was killed that it was."""
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            self.running.pop(process, None)
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                _log.error(
                    "fedsilo: the process %d that answered a message was ended by %s; Flower gives "
                    "the message up when it has not heard of it for some time",
                    process,
                    name,
                )

    def end(self) -> None:
        """End what runs."""
        for process in self.running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def is_worn(self) -> bool:
        """Tell whether the worker should begin anew: many tasks, or threads that forks would lose.

        A pool of OpenBLAS's does not count: it ends itself before a fork.
        """
        return self.started >= _RENEWED_AFTER or (self.started > 0 and _threads() > 1)


def preload() -> None:
    """Import what messages need; nothing is computed."""
    for name in _MODULES:
        importlib.import_module(name)
    for package in _PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.iter_modules(path, f"{package}."):
            importlib.import_module(module.name)
    gc.freeze()  # forks share these objects' memory: a collection would copy it


def main(arguments: Sequence[str] | None = None) -> int:
    """Take tasks until the hospital's process ends."""
    given = _parser().parse_args(arguments)
    try:
        secret = _secret(given.secret)
        installed = installed_app()
        preload()
    except FedsiloError as error:
        print(f"fedsilo: error: {error}", file=sys.stderr)
        return CANNOT
    by_installed = answer_by(installed)

    def answer(token: str) -> int:
        end_with(given.hospital)
        if given.site_file and runs_any_app(given.site_file):
            _run_theirs(given.runtime, token, given.hospital)
        return 0 if answer_task(given.runtime, token, by_installed) else 1

    worker = Worker(answer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(worker, _client(given.runtime, secret), given.hospital)
    except FedsiloError as error:
        print(f"fedsilo: error: {error}", file=sys.stderr)
        return CANNOT
    finally:
        worker.end()
    return 0


def serve(worker: Worker, client: RuntimeHttpClient, hospital: int) -> None:
    """Ask for tasks and start them, as long as the process that started this one runs.

    Raises:
        SettingError: the SuperNode does not take the worker's secret.
    """
    pace, told = Pace(), False
    while os.getppid() == hospital:
        worker.reap()
        given = _acquired(client)
        if given is None and not told:
            _log.warning("fedsilo: the SuperNode's Runtime API does not answer; the worker waits")
        told = given is None
        if given and given.HasField("task") and given.token:
            worker.start(given.token)
            pace.quicken()
            continue
        if not worker.running and worker.is_worn():
            _begin_anew()
        time.sleep(pace.next())


def _acquired(client: RuntimeHttpClient) -> AcquireTaskResponse | None:
    """Ask for a task; None: the SuperNode does not answer, which it may yet.

    Raises:
        SettingError: it does not take the worker's secret.
    """
    try:
        return client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise SettingError(
                "the SuperNode does not take the worker's secret: start both with the same file "
                "(--superexec-auth-secret-file of the SuperNode, --secret of the worker)"
            ) from None
        return None
    except httpx.HTTPError:
        return None


def runs_any_app(site_file: Path) -> bool:
    """Tell whether a hospital's site file lets a run's own app be run; unreadable: it does not."""
    from fedsilo.client_app.site.policy import parsed_site_file

    try:
        return parsed_site_file(site_file.read_text(encoding="utf-8")).app == "any"
    except (OSError, UnicodeDecodeError, SettingError):
        return False  # the installed app will say what is wrong with it


def _become_task(answer: Callable[[str], int], token: str) -> None:
    """Answer in this new process, and end it without what the parent would do at its end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        code = answer(token)
    except BaseException:  # also an exit: nothing of the parent's may run on in its fork
        _log.exception("fedsilo: a task ended by an error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_theirs(address: str, token: str, hospital: int) -> None:
    """Become Flower's own process, which runs the app that came with the run."""
    beside = Path(sys.executable).parent / TaskType.CLIENT_APP.value
    command = str(beside) if beside.is_file() else shutil.which(TaskType.CLIENT_APP.value)
    if command:
        told = ("--runtime-api-address", address, "--token", token, "--insecure")
        os.execv(command, [command, *told, "--parent-pid", str(hospital)])


def _client(address: str, secret: bytes) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # it is the loopback
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({_ACQUIRE})
            ),
        ],
    )


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise SettingError(f"the worker's secret {path} cannot be read: {error.strerror}") from None
    if not secret:
        raise SettingError(f"the worker's secret {path} is empty: give it random bytes")
    return secret


def _threads() -> int:
    """Return the threads of this process; 1 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _begin_anew() -> None:
    """Become a new worker, by the same id: the hospital's process needs to know nothing."""
    os.execv(
        sys.executable, [sys.executable, "-m", "fedsilo.client_app.worker.parent", *sys.argv[1:]]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedsilo.client_app.worker.parent", description=__doc__)
    parser.add_argument("--runtime", required=True, help="the SuperNode's Runtime API, host:port")
    parser.add_argument("--secret", required=True, type=Path, help="file of the SuperExec secret")
    parser.add_argument("--hospital", required=True, type=int, help="process with which it ends")
    parser.add_argument("--site-file", type=Path, help="the hospital's site file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
