import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedsilo.core.processes import runs


def ended_within(pid: int, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while psutil.pid_exists(pid) and runs(psutil.Process(pid)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not psutil.pid_exists(pid) or not runs(psutil.Process(pid))


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_bound_process_ends_with_its_killed_parent_and_cleans_up_if_the_signal_lets_it(
    tmp_path: Path, number: str
) -> None:
    child = (
        "import os, signal, sys, time\n"
        "from fedsilo.core.processes import end_with\n"
        f"open({str(tmp_path / 'file')!r}, 'w')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))\n"
        f"end_with(os.getppid(), signal.{number})\n"
        "try:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "finally:\n"
        f"    os.unlink({str(tmp_path / 'file')!r})\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not ended_within(pid, 0.3), "its parent is there"
    process.kill()
    process.wait()
    assert ended_within(pid, 15)
    assert (tmp_path / "file").exists() == (number == "SIGTERM")


def test_a_process_that_does_not_heed_the_signal_is_ended_all_the_same() -> None:
    child = (
        "import os, signal, time\n"
        "from fedsilo.core import processes\n"
        "processes._UNWINDING = 0.2\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "processes.end_with(os.getppid(), signal.SIGTERM)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert ended_within(pid, 15)
