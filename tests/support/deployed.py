"""What tests do with the processes of a deployment, and that none outlives the tests."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedsilo.cli.main import main
from fedsilo.core.processes import RUN_MARK, app_folder, end_trees, runs
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory

_END_LIMIT = 60.0  # seconds until the processes of a deployment have ended


def kill(deployment: Deployment, member: str) -> None:
    """Kill a member's process and all that it started, as a power cut would."""
    process = deployment.process(member)
    assert process
    tree = [process, *process.children(recursive=True)]
    for one in tree:
        one.kill()
    while any(runs(one) for one in tree):
        time.sleep(0.05)


def run_options(folder: Path, values: Mapping[str, Value], name: str) -> list[str]:
    """Write settings to a file, and return the words of ``fedsilo deploy run`` with them."""
    config = folder / f"{name}-asked.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    named = ("--config", str(config), "--name", name, "--deployment", str(folder))
    return ["deploy", "run", "fedavg-digits", *named]


def run_deployed(folder: Path, values: Mapping[str, Value], name: str) -> tuple[int, RunDirectory]:
    """Run settings on the deployment in ``folder``; return the exit code and the run."""
    code = main(run_options(folder, values, name))
    return code, RunDirectory(read_deployment(folder).runs / name)


@contextmanager
def ended_with_tests(folder: Path) -> Iterator[None]:
    """End the processes of a deployment with this one, however it ends: Ctrl-C, TERM or KILL.

    Members of a deployment outlive the command that starts them. So a guard in a session of its own
    reads a pipe that only this process holds, and ends them once the pipe has ended.
    """
    command = [sys.executable, "-m", "tests.support.deployed", str(folder)]
    guard = subprocess.Popen(
        command, cwd=app_folder(), stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert guard.stdin is not None  # PIPE was asked for
        guard.stdin.close()
        guard.wait(_END_LIMIT)


def _members(folder: Path) -> Iterator[psutil.Process]:
    """Yield the running processes whose FLWR_HOME is in a folder, in a tree or orphaned."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            home = process.environ().get(RUN_MARK, "")
            if Path(home).is_relative_to(folder) and runs(process):
                yield process


if __name__ == "__main__":
    sys.stdin.buffer.read()
    while left := list(_members(Path(sys.argv[1]))):
        end_trees(left)
