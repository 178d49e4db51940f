"""What is started at a hospital, and what the one does when the other ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import flwr.supercore.version
import psutil
import pytest

from fedsilo.core.errors import SettingError
from fedsilo.deployment.worker import hospital
from fedsilo.deployment.worker.hospital import CANNOT, build_commands, main

SECRET = Path("/tmp/fedsilo-x/secret")
TOLD = ["--superlink", "a:9092", "--port", "9999", "--node-config", 'site="north"']


def test_both_are_told_of_one_secret_and_the_runtime_apis_place() -> None:
    supernode, worker = build_commands(TOLD, SECRET, 7)
    assert supernode[1:3] == ["-m", "fedsilo.deployment.worker.supernode"]
    assert supernode[3 : 3 + len(TOLD)] == TOLD
    assert supernode[-4:] == ["--isolation", "process", "--superexec-auth-secret-file", str(SECRET)]
    assert worker[3:] == [
        *("--runtime", "127.0.0.1:9999", "--secret", str(SECRET), "--hospital", "7")
    ]
    told = ["--host", "::1", "--node-config", 'site="n" site-file="/etc/site.yaml"']
    _, worker = build_commands(told, SECRET, 7)
    assert worker[3:5] == ["--runtime", "[::1]:9094"]
    assert worker[-2:] == ["--site-file", "/etc/site.yaml"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--isolation", "subprocess"], "--isolation is set by fedsilo"),
        (["--superexec-auth-secret-file", "x"], "--superexec-auth-secret-file is set by fedsilo"),
        (["--host", "0.0.0.0"], "the Runtime API answers only the worker: remove it"),
        (["--node-config", "site=north"], "--node-config cannot be read"),
    ],
)
def test_what_would_open_the_worker_is_refused(more: list[str], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        build_commands([*TOLD, *more], SECRET, 7)


def test_another_flower_is_refused_with_the_command_that_installs_the_known_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flwr.supercore.version, "package_version", "1.40.2")
    assert main(TOLD) == 2
    said = capsys.readouterr().err
    assert "Flower 1.40.2 is installed" in said
    assert "pip install 'flwr[simulation]~=1.39.0'" in said


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_worker_that_ends_is_started_again_and_all_ends_with_the_supernode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hospital, "_LONGEST_PAUSE", 0.1)
    log = tmp_path / "log"
    worker = _python(
        f"import os, time\nf = open({str(log)!r}, 'a'); print(os.getpid(), file=f, flush=True)\n"
        f"if len(open({str(log)!r}).readlines()) < 3: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    )
    node = _python(
        f"import time, sys\nwhile True:\n    time.sleep(.05)\n    try: n = open({str(log)!r})"
        ".readlines()\n    except OSError: continue\n    if len(n) == 3: sys.exit(5)"
    )
    assert _in_main(node, worker) == 5
    assert capfd.readouterr().err.count("the worker ended (by SIGKILL) and is started again") == 2
    last = int(log.read_text().split()[-1])
    assert not Path(f"/proc/{last}").exists(), "it outlives the SuperNode"


def test_a_worker_that_cannot_ends_the_hospitals_node() -> None:
    node = _python("import time; time.sleep(60)")
    assert _in_main(node, _python(f"import sys; sys.exit({CANNOT})")) == CANNOT


def test_a_signal_ends_both(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    sleeps = _python(
        f"import os, time; print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True)\n"
        "time.sleep(60)"
    )

    def end() -> None:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    assert _in_main(sleeps, sleeps) == 0
    thread.join()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())


def test_what_a_killed_worker_leaves_to_a_containers_first_process_is_collected() -> None:
    orphan, known = subprocess.Popen(["true"]), subprocess.Popen(["true"])
    for process in (orphan, known):
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    hospital.collect_orphans({known.pid})
    assert not psutil.pid_exists(orphan.pid)
    assert known.wait() == 0, "its own are left to those who wait for them"
    orphan.wait()


def test_nothing_starts_where_no_server_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.deployment.worker.hospital", "--isolation", "process"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[4])},
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "fedsilo: error[setting]: --isolation is set by fedsilo"
    )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back the proxies that ``main`` sets, and accept the installed Flower."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(hospital, "refuse_other_flower", lambda: None)


def test_the_secret_is_for_both_processes_alone_and_goes_with_them(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def stay(supernode: list[str], worker: list[str]) -> int:
        path = Path(supernode[-1])
        assert worker[worker.index("--secret") + 1] == str(path)
        assert (path.stat().st_mode & 0o777, path.stat().st_size) == (0o600, 32)
        seen.append(path)
        return 5

    monkeypatch.setattr(hospital, "_supervise", stay)
    monkeypatch.setattr(sys, "argv", ["hospital.py", *TOLD])
    assert main() == 5
    assert not seen[0].exists()
    assert "127.0.0.1" in os.environ["no_proxy"]


def test_a_full_disk_is_one_line(
    environment: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/tmp/secret")

    monkeypatch.setattr(hospital, "write_atomically", fail)
    assert main(TOLD) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedsilo: error")
    assert said.count("\n") == 1


def test_a_process_that_ignores_the_request_to_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hospital, "_PATIENCE", 0.1)
    stubborn = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo begun; while :; do sleep 0.05; done"],
        stdout=subprocess.PIPE,
    )
    assert stubborn.stdout
    assert stubborn.stdout.readline() == b"begun\n"
    hospital._end_processes(stubborn)
    assert stubborn.returncode == -signal.SIGKILL
    stubborn.stdout.close()


def _in_main(node: list[str], worker: list[str]) -> int:
    """Run the hospital's loop; its signal handlers are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return hospital._supervise(node, worker)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
