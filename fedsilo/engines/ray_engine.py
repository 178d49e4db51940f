"""The Ray engine: ``flwr run`` on a SuperLink of its own, which ends with the run.

Flower's local SuperLink is shared by a machine and keeps running, so two runs would meet in it.
Therefore each run here gets its own ports and FLWR_HOME, in this process's Python environment. A
guard process (``guard`` in this file) ends all processes of the run, even if this one is killed.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w
from rich.console import Console
from rich.text import Text

from fedsilo.core import processes
from fedsilo.core.errors import ProcessError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings.common_settings import GPU_SHARE
from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import git_revision
from fedsilo.engines.ray_cluster import check_cluster, ray_variables, unused_cluster
from fedsilo.server_app.config.resources import check_device, check_resources
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.progress import mark_interrupted, read_progress
from fedsilo.server_app.records.run_directory import CONFIG, RunDirectory, runs_folder
from fedsilo.server_app.run.terminal import make_console, progress_bars

_START_LIMIT = 60.0  # seconds
_END_LIMIT = 30.0  # seconds

# Lines that Flower and Ray print at every start; warnings, errors and the app's own lines pass
_NOISE = re.compile(
    r"INFO .*:\s|^Successfully started run|^Successfully installed fedsilo|^Using SuperLink: |"
    r"Since flwr 1.32, default simulated|Flower configuration not found|Manually terminating|"
    r"FutureWarning: Tip: In future versions of Ray|^  warnings.warn\($|^$"
)


def run_with_ray(
    settings: RunSettings, resources: Mapping[str, Value], address: str = ""
) -> RunDirectory:
    """Run ``settings`` with ``flwr run`` and return the run directory.

    ``address`` is the address of a running Ray cluster, or ``auto``; if empty, Ray starts one.

    Raises:
        FedsiloError: the run failed; the message is the app's own last error line.
    """
    app, runs = processes.app_folder(), runs_folder(settings.common.out)
    directory = RunDirectory(runs / settings.common.run_name)
    wanted = check_resources(resources)
    share = float(wanted["client-resources-num-gpus"])
    place: dict[str, Any] = {"prefix": "fedsilo-flwr-"}
    if address:
        check_cluster(address, wanted)
        runs.mkdir(parents=True, exist_ok=True)
        # Flower's actors read the app from this folder, so all nodes must see it
        place = {"prefix": ".fedsilo-flwr-", "dir": runs}
    elif line := unused_cluster():
        print(f"fedsilo: {line}", file=sys.stderr)
    with tempfile.TemporaryDirectory(**place) as home:
        config = Path(home) / "run-config.toml"
        write_atomically(config, tomli_w.dumps(settings.run_config()))
        check_device(settings.common.device, share)
        launch = json.dumps({"engine": "ray", "resources": wanted})
        variables = {processes.LAUNCH: launch, GPU_SHARE: str(wanted["client-resources-num-gpus"])}
        try:
            with _superlink(Path(home), variables, address) as environment:
                error = _flwr_run(app, config, wanted, environment, directory)
        except KeyboardInterrupt:
            mark_interrupted(directory.path)
            begun = [str(directory.path)] if (directory.path / CONFIG).is_file() else []
            raise KeyboardInterrupt(*begun) from None
    if not error and not directory.has_ended():
        error = (
            f"the Flower run ended, but wrote no summary in {directory.path}: read the log above, "
            "then resume the run"
        )
    if error:
        raise ProcessError(error)
    return directory


@contextmanager
def _superlink(
    home: Path, variables: Mapping[str, str] | None = None, address: str = ""
) -> Iterator[dict[str, str]]:
    """Start a SuperLink in simulation mode; yield the environment in which flwr finds it."""
    http_port, control_port = map(str, processes.free_ports(2))
    environment = {
        **os.environ,
        **(variables or {}),
        processes.RUN_MARK: str(home),
        "SPT_NOENV": "1",  # without this, Ray's process titles overwrite the mark
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": http_port,
        "FLWR_LOCAL_CONTROL_API_PORT": control_port,
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "FEDSILO_REVISION": git_revision(),  # the app runs from a bundle, not from the checkout
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    environment |= ray_variables(address, environment)
    superlink = [
        *(processes.tool("flower-superlink"), "--insecure", "--simulation"),
        *("--isolation", "subprocess", "--control-api-address", f"127.0.0.1:{control_port}"),
        *("--host", "127.0.0.1", "--port", http_port),
        *("--log-file", str(home / "superlink.log")),
    ]
    log = home / "superlink.out"
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "fedsilo.engines.ray_engine", str(home), *superlink],
            env=environment,
            stdin=subprocess.PIPE,  # ends with this process
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(guard, http_port, log)
        yield environment
    finally:
        assert guard.stdin is not None  # PIPE was asked for
        guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            guard.wait(_END_LIMIT)
        processes.end_run(home)  # the guard may have been killed before it ended the run
        guard.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: str, log: Path) -> None:
    limit = time.monotonic() + _START_LIMIT
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise ProcessError(
                "Flower's SuperLink ended at its start: " + " ".join(log.read_text().split()[-60:])
            )
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:  # urllib's own errors are
            time.sleep(0.2)
    raise ProcessError(f"Flower's SuperLink did not start within {_START_LIMIT:.0f} s")


def _flwr_run(
    app: Path,
    config: Path,
    resources: Mapping[str, Value],
    environment: Mapping[str, str],
    directory: RunDirectory,
) -> str:
    """Stream the run's log to standard output; return the app's error line, or an empty string.

    Nothing is shown after the error line, because Flower's lines on the same error say less.
    """
    wanted = " ".join(
        f"{key}={value}"
        for key, value in resources.items()
        if value or not key.startswith("init-args")
    )
    options = ["--run-config", str(config), "--stream", "--federation-config", wanted]
    command = [processes.tool("flwr"), "run", str(app), *options]
    console = make_console()
    with progress_bars(console, lambda: read_progress(directory.path)):
        last_error, code = stream(command, environment, console)
    return last_error or ("" if code == 0 else f"'flwr run' ended with exit code {code}: see above")


def stream(
    command: Sequence[str], environment: Mapping[str, str], console: Console
) -> tuple[str, int]:
    """Run a Flower command and print its output; its routine log lines only with --verbose.

    Returns:
        The app's error line, which is not printed, or an empty string; and the exit code.
    """
    last_error, verbose = "", bool(os.environ.get(processes.VERBOSE))
    with subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None  # PIPE was asked for
        for line in process.stdout:
            last_error = _error_in(line) or last_error
            if verbose or not (last_error or _NOISE.search(line)):
                console.print(Text.from_ansi(line.rstrip("\n")), soft_wrap=True)
        return last_error, process.wait()


def _error_in(line: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    match = re.match(r"ERROR\s*:\s+fedsilo: (.*)", plain)  # errors of sites begin differently
    return match[1].strip() if match else ""


_LOOK = 0.5  # seconds between checks of the command
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guard(home: Path, command: Sequence[str], pipe: int) -> int:
    """Run ``command`` until it or ``pipe`` ends; then end all processes that belong to ``home``.

    ``pipe`` is a file descriptor to which nothing is ever written; it ends with the process that
    holds the other end. Return the command's exit code, or 0 if the pipe ended first.
    """
    for number in _ENDINGS:
        signal.signal(number, _leave)
    pipe_ended = False
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        pipe_ended = _pipe_ended_before(process, pipe)
        return 0 if pipe_ended else process.returncode
    finally:
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        processes.end_run(home)
        if pipe_ended:  # otherwise fedsilo still reads the log in this folder, then removes it
            shutil.rmtree(home, ignore_errors=True)


def _pipe_ended_before(process: subprocess.Popen[bytes], pipe: int) -> bool:
    while process.poll() is None:
        ready, _, _ = select.select([pipe], [], [], _LOOK)
        if ready and not os.read(pipe, 1024):
            return True
    return False


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:], sys.stdin.fileno()))
