"""Tests that are killed leave no process of a deployment behind."""

import subprocess
import sys
from pathlib import Path

import psutil

from fedsilo.core.processes import RUN_MARK, app_folder

# As the fixture does: a guard, and a member in a session of its own
TESTS = f"""
import os, subprocess, sys, time
from pathlib import Path
from tests.support.deployed import ended_with_tests
folder = Path(sys.argv[1])
with ended_with_tests(folder):
    member = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {{"{RUN_MARK}": str(folder / "server" / "flwr")}},
        start_new_session=True,
    )
    print(member.pid, flush=True)
    time.sleep(600)
"""


def test_members_of_killed_tests_end_with_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TESTS, str(tmp_path)]
    tests = subprocess.Popen(command, cwd=app_folder(), stdout=subprocess.PIPE)
    assert tests.stdout
    member = psutil.Process(int(tests.stdout.readline()))
    assert member.is_running()
    tests.kill()
    tests.wait()
    _, alive = psutil.wait_procs([member], timeout=30)
    assert not alive
