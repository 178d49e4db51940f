"""The worker's forks: what is reaped, what a kill costs, and that a GPU is never asked for."""

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

import pytest
from flwr.app import ConfigRecord, RecordDict

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import CONFIG
from fedsilo.core.processes import free_ports
from fedsilo.deployment.worker import parent
from fedsilo.deployment.worker.hospital import CANNOT
from fedsilo.deployment.worker.parent import HospitalWorker, main, runs_any_app

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
