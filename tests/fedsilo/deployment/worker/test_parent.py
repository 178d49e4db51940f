"""The worker's forks: what is reaped, what a kill costs, and that a GPU is never asked for."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.messages import CONFIG, TRAIN
from fedsilo.core.processes import free_ports
from fedsilo.deployment.worker import parent
from fedsilo.deployment.worker.hospital import CANNOT
from fedsilo.deployment.worker.parent import HospitalWorker, main, runs_any_app
from tests.support.identity import flower_names  # noqa: F401

APP = Path(__file__).resolve().parents[4]
RULES = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*"]\n'


def _until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_each_task_has_a_process_of_its_own_and_none_is_left(tmp_path: Path) -> None:
    def answer(token: str) -> int:
        (tmp_path / token).write_text(f"{os.getpid()}")
        return 0

    worker = HospitalWorker(answer)
    for token in ("a", "b", "c"):
        worker.start(token)
    assert sorted(worker.running.values()) == ["a", "b", "c"]

    def ended() -> bool:
        worker.reap()
        return not worker.running

    _until(ended)
    processes = {int((tmp_path / token).read_text()) for token in ("a", "b", "c")}
    assert len(processes | {os.getpid()}) == 4
    assert not any(Path(f"/proc/{process}").exists() for process in processes), "a zombie is left"
    worker.reap()
    assert worker.started == 3


def test_a_killed_task_is_named_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    worker = HospitalWorker(lambda token: time.sleep(60) or 0)
    worker.start("a")
    (process,) = worker.running
    os.kill(process, signal.SIGKILL)

    def ended() -> bool:
        worker.reap()
        return not worker.running

    with caplog.at_level(logging.ERROR, "flwr"):
        logging.getLogger("flwr").propagate = True
        _until(ended)
    assert f"the process {process} that answered a message was ended by SIGKILL" in caplog.text
    worker.start("b")
    worker.end()
    _until(ended)


def test_a_task_ended_directly_after_its_fork_does_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = os.fork

    def fork_and_end() -> int:
        process = fork()
        if process == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(os, "fork", fork_and_end)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        worker = HospitalWorker(lambda token: time.sleep(60) or 0)
        worker.start("a")
        (process,) = worker.running
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_or_an_exit_of_a_task_ends_that_process_alone() -> None:
    def answer(token: str) -> int:
        if token == "exit":
            sys.exit(0)
        raise RuntimeError("no")

    worker = HospitalWorker(answer)
    for token in ("exit", "error"):
        worker.start(token)
    for process in list(worker.running):
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def test_a_worker_is_worn_by_tasks_and_threads_never_before_its_first() -> None:
    worker = HospitalWorker(lambda token: 0)
    assert not worker.is_worn()
    worker.started = 1000
    assert worker.is_worn()


def test_what_is_imported_ahead_starts_no_thread_that_stays_and_asks_for_no_gpu() -> None:
    code = """
import os, sys, torch
def no(*a, **k): raise AssertionError("a GPU was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch._C._cuda_getDeviceCount = no
torch.cuda._lazy_init = torch._C._cuda_init = no
from fedsilo.deployment.worker.parent import preload
preload()
assert "fedsilo.client_app.methods.picsr" in sys.modules
if os.fork() == 0: os._exit(0)
os.wait()
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(APP)},
        check=False,
    )
    assert done.stdout.split() == ["1", "False"], done.stderr


@pytest.mark.parametrize(
    ("rules", "any_app"),
    [
        (RULES, False),
        (RULES + "app: installed\n", False),
        (RULES + "app: any\n", True),
        (RULES + "app: anny\n", False),
        ("app: any\n", False),
        ("[", False),
        (None, False),
    ],
)
def test_a_runs_own_app_is_run_only_where_a_whole_site_file_says_so(
    rules: str | None, any_app: bool, tmp_path: Path
) -> None:
    path = tmp_path / "site.yaml"
    if rules is not None:
        path.write_text(rules)
    assert runs_any_app(path) is any_app


def test_a_secret_that_cannot_be_read_or_is_empty_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["--runtime", "127.0.0.1:1", "--hospital", str(os.getppid())]
    for path, why in ((tmp_path / "none", "cannot be read: No such"), (tmp_path / "e", "is empty")):
        if why == "is empty":
            path.touch()
        assert main([*told, "--secret", str(path)]) == CANNOT
        assert why in capsys.readouterr().err


@pytest.fixture
def refusing() -> Iterator[str]:
    """Yield the address of a Runtime API that takes no secret."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(401)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_secret_that_does_not_fit_is_told_with_where_it_is_given(refusing: str) -> None:
    client = parent._client(refusing, b"other")
    with pytest.raises(SettingError, match=r"does not accept the worker's secret: start both with"):
        parent.serve(HospitalWorker(lambda token: 0), client, os.getppid())


def test_a_runtime_api_that_does_not_answer_is_waited_for_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter([1, 1, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(looks))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    (port,) = free_ports(1)
    client = parent._client(f"127.0.0.1:{port}", b"secret")
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, "flwr"):
        parent.serve(HospitalWorker(lambda token: 0), client, 1)
    assert caplog.text.count("the SuperNode's Runtime API does not answer; the worker waits") == 1
    assert next(looks, None) is None, "it ended with the hospital's process"


_ENDED = """
import atexit, os, signal, sys
from fedsilo.deployment.worker import parent
atexit.register(print, "libraries clean up")
parent.preload = lambda: None
parent.HospitalWorker.end = lambda self: os.write(1, b"tasks are ended")
parent.serve = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(parent.main(["--runtime", "127.0.0.1:1", "--secret", sys.argv[1], "--hospital", "1"]))
"""


def test_a_worker_that_is_asked_to_end_does_so_without_its_libraries_reports(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    command = [sys.executable, "-c", _ENDED, str(secret)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "tasks are ended")


@pytest.mark.parametrize(
    ("config", "mark"),
    [
        ({"run-name": "hearts", "round": 3}, "[hearts round 3] "),
        ({"run-name": "two\nlines\x1b[31m", "round": 1}, "["),
        ({}, ""),
    ],
)
def test_log_lines_name_the_run_and_the_round_of_the_message(
    config: dict[str, str | int], mark: str
) -> None:
    content = RecordDict({CONFIG: ConfigRecord(dict(config))})
    message: Any = SimpleNamespace(has_content=lambda: True, content=content)
    log = logging.getLogger("flwr")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with parent.naming_run(message):
            log.error("%d samples", 7)
        log.error("afterwards")
    finally:
        log.removeHandler(handler)
    inside, afterwards = (record.getMessage() for record in records)
    assert inside.startswith(mark)
    assert inside.endswith("7 samples")
    assert inside.isprintable()
    assert afterwards == "afterwards"


# --- A task in its process: the calls that end or replace a process are played ---


class Ended(BaseException):
    """Stands for the end of a process; it has the process's exit code, or the command after it."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the calls that end or replace this process raise ``Ended``; keep its signal handler."""

    def end(*given: Any) -> None:
        raise Ended(*given)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "execv", end)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@pytest.mark.parametrize(("answered", "code"), [(0, 0), (1, 1), (None, 1)])
def test_a_new_process_ends_with_the_code_of_its_answer_and_starts_nothing_else(
    answered: int | None, code: int, ends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(token: str) -> int:
        assert token == "a"
        if answered is None:
            raise RuntimeError("no")
        return answered

    monkeypatch.setattr(os, "fork", lambda: 0)  # as in the new process
    worker = HospitalWorker(answer)
    with pytest.raises(Ended) as ended:
        worker.start("a")
    assert ended.value.args == (code,)
    assert not worker.running
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    return path


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let ``main`` prepare nothing, and return a list of what its tasks call."""
    called: list[Any] = []
    for name in ("preload", "installed_app", "retry_soon", "answer_by", "_client"):
        monkeypatch.setattr(parent, name, lambda *_: None)
    monkeypatch.setattr(parent, "end_with", lambda hospital: called.append(hospital))
    monkeypatch.setattr(parent, "_run_flower_client_app", lambda *given: called.append(given))

    def answer(address: str, token: str, by: object) -> bool:
        called.append(token)
        return token == "good"

    monkeypatch.setattr(parent, "answer_task", answer)
    return called


def _main(secret: Path, *more: str) -> int:
    return main(["--runtime", "host:1", "--hospital", "7", "--secret", str(secret), *more])


def test_a_task_ends_with_its_hospital_and_by_the_installed_app(
    secret: Path, prepared: list[Any], ends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []

    def serve(worker: HospitalWorker, client: object, hospital: int) -> None:
        codes.extend(worker.answer(token) for token in ("good", "bad"))

    monkeypatch.setattr(parent, "serve", serve)
    assert _main(secret) == 0
    assert codes == [0, 1]
    assert prepared == [7, "good", 7, "bad"]


def test_a_site_file_that_allows_any_app_runs_flowers_own_process(
    secret: Path, prepared: list[Any], ends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "serve", lambda worker, *_: worker.answer("good"))
    rules = secret.with_name("site.yaml")
    rules.write_text(RULES + "app: any\n")
    assert _main(secret, "--site-file", str(rules)) == 0
    assert prepared == [7, ("host:1", "good", 7), "good"]


def test_a_signal_ends_the_tasks_and_an_error_is_told(
    secret: Path,
    prepared: list[Any],
    ends: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended_tasks: list[HospitalWorker] = []
    monkeypatch.setattr(HospitalWorker, "end", lambda self: ended_tasks.append(self))
    monkeypatch.setattr(parent, "serve", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Ended) as ended:
        _main(secret)
    assert ended.value.args == (0,)
    assert ended_tasks

    def refuse(*_: object) -> None:
        raise SettingError("the secret is another one")

    monkeypatch.setattr(parent, "serve", refuse)
    assert _main(secret) == CANNOT
    assert "the secret is another one" in capsys.readouterr().err


def test_modules_of_messages_are_imported_and_exempt_from_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "fedsilo.client_app.site.run_book"
    monkeypatch.setattr(parent, "_MODULES", ("json",))
    monkeypatch.setattr(parent, "_PACKAGES", ("fedsilo.client_app.site",))
    monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        parent.preload()
        assert module in sys.modules
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_worn_worker_without_tasks_is_replaced_by_a_new_one(
    ends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["parent.py", "--runtime", "host:1"])
    task = AcquireTaskResponse(task=Task(task_id=1), token="a")
    waiting = iter([task, AcquireTaskResponse(), AcquireTaskResponse()])
    client: Any = SimpleNamespace(AcquireTask=lambda request: next(waiting))
    worker = HospitalWorker(lambda token: 0)
    started: list[str] = []

    def start(token: str) -> None:
        started.append(token)
        worker.started = 1000

    monkeypatch.setattr(worker, "start", start)
    with pytest.raises(Ended) as ended:
        parent.serve(worker, client, os.getppid())
    assert started == ["a"]
    python, command = ended.value.args
    assert (python, command[-2:]) == (sys.executable, ["--runtime", "host:1"])
    assert command[2] == parent.__name__


def test_a_runtime_api_with_a_fault_of_its_own_counts_as_silent() -> None:
    def fail(request: object) -> None:
        answer = httpx.Response(503, request=httpx.Request("POST", "http://host"))
        raise httpx.HTTPStatusError("busy", request=answer.request, response=answer)

    client: Any = SimpleNamespace(AcquireTask=fail)
    assert parent._acquire_task(client) is None


@pytest.mark.parametrize("beside", [True, False])
def test_flowers_own_process_is_the_one_of_this_python_or_else_of_the_path(
    beside: bool, ends: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "flwr-clientapp"
    if beside:
        own.touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(parent.shutil, "which", lambda name: f"/elsewhere/{name}")
    with pytest.raises(Ended) as ended:
        parent._run_flower_client_app("host:1", "a", 7)
    path, command = ended.value.args
    assert path == (str(own) if beside else "/elsewhere/flwr-clientapp")
    assert command[command.index("--token") + 1] == "a"
    assert command[command.index("--parent-pid") + 1] == "7"
    monkeypatch.setattr(parent.shutil, "which", lambda name: None)
    if not beside:
        parent._run_flower_client_app("host:1", "a", 7)  # Flower is missing: it returns


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Play the SuperNode of one task, and return what it is told."""
    told: dict[str, Any] = {}
    context = Context(1, 1001, {}, RecordDict(), {})
    message = Message(RecordDict(), 1001, TRAIN)

    def pull(client: object) -> tuple[Message, Context, None, SimpleNamespace]:
        if "fault" in told:
            raise RuntimeError(told["fault"])
        return message, context, None, SimpleNamespace(content=b"app")

    def push_message(client: object, reply: Message, context: Context) -> None:
        told["reply"] = reply

    def push_output(client: object, context: Context | None, **outcome: str) -> None:
        told["outcome"] = (context is not None, outcome["sub_status"], outcome["details"])

    monkeypatch.setattr(parent, "pull_task_input", pull)
    monkeypatch.setattr(parent, "push_message", push_message)
    monkeypatch.setattr(parent, "push_task_output", push_output)
    beats = SimpleNamespace(start=lambda: None, stop=lambda: told.update(stopped=True))
    monkeypatch.setattr(parent, "HeartbeatSender", lambda send: beats)
    return told


def test_a_task_is_answered_and_the_supernode_is_told_so(superlink: dict[str, Any]) -> None:
    def answer(message: Message, context: Context, bundle: bytes) -> Message:
        assert bundle == b"app"
        return Message(RecordDict(), reply_to=message)

    assert parent.answer_task("127.0.0.1:1", "a", answer)
    assert superlink["reply"].has_content()
    assert superlink["outcome"] == (True, SubStatus.COMPLETED, "")
    assert superlink["stopped"]


def test_an_error_of_an_answer_is_a_reply_with_its_type_alone(superlink: dict[str, Any]) -> None:
    def answer(*_: object) -> Message:
        raise ValueError("patient 17")

    assert parent.answer_task("127.0.0.1:1", "a", answer)
    assert "ValueError" in superlink["reply"].error.reason
    assert "patient" not in superlink["reply"].error.reason
    assert superlink["outcome"] == (True, SubStatus.COMPLETED, "")


def test_a_task_without_its_message_is_told_as_failed(superlink: dict[str, Any]) -> None:
    superlink["fault"] = "no message"
    assert not parent.answer_task("127.0.0.1:1", "a", lambda *_: pytest.fail("nothing to answer"))
    assert "reply" not in superlink
    assert superlink["outcome"][:2] == (False, SubStatus.FAILED)
    assert superlink["stopped"]


def test_only_the_installed_app_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_other(bundle: bytes) -> None:
        if bundle != b"installed":
            raise RefusedError("file 'a.py' differs")

    installed: Any = SimpleNamespace(refuse_other=refuse_other)
    reply = Message(RecordDict(), reply_to=Message(RecordDict(), 1001, TRAIN))
    monkeypatch.setattr(parent, "app", lambda message, context: reply)
    answer = parent.answer_by(installed)
    message = Message(RecordDict(), 1001, TRAIN)
    context = Context(1, 1001, {"site": "north"}, RecordDict(), {})
    assert answer(message, context, b"installed") is reply
    refusal = answer(message, context, b"other")
    assert refusal.error.reason.count("file 'a.py' differs") == 1
