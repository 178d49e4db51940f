"""The Ray engine: ``flwr run`` on a SuperLink of its own, which ends with the run.

Flower's local SuperLink is shared by a machine and keeps running, so two runs would meet in it.
Therefore each run here gets its own ports and FLWR_HOME, in this process's Python environment. A
guard process (``guard`` in this file) ends all processes of the run, even if this one is killed.

With the address of a running Ray cluster, Flower's actors on other nodes read the app, the data
cache and the run directory by the paths of this machine, but with their own packages.
docs/cluster.md says what every node must have.
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
from fedsilo.core.errors import ProcessError, SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import GPU_SHARE
from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import git_revision
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

LOCAL = "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON"  # its "env_vars" go into each worker's environment
_TRAVELLING = re.compile(r"(FEDSILO|FLWR)_\w+|OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG")
# Seconds for Ray to connect; it takes a second, but tries a dead address for minutes
_CONNECT_LIMIT = 60.0
# A separate process tries the connection, because Ray ends a process when it gives up connecting
_CONNECT = "import logging, ray, sys; ray.init(sys.argv[1], logging_level=logging.ERROR)"


def run_with_ray(
    settings: RunSettings, resources: Mapping[str, Value], address: str = ""
) -> RunDirectory:
    """Do a run with Flower's simulation on Ray (``flwr run``), and return the run directory.

    If RAY_ADDRESS names a cluster but ``address`` is empty, a warning is printed to stderr.

    Args:
        settings: the settings of the run.
        resources: the number of sites and their shares of cores and GPUs, which are checked here.
        address: the address of a running Ray cluster, or ``auto``. If empty, Ray starts one.

    Raises:
        FedsiloError: the run failed or wrote no summary. If the Flower app logged an error, the
            message is that error.
        KeyboardInterrupt: the user pressed Ctrl-C. The run's progress is marked as interrupted. If
            the run had begun, the exception's only argument is the path of its directory.
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
    # An exit code of 0 does not prove that the app finished, so the summary must exist
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
    """Run a SuperLink (Flower's server) in simulation mode, inside a ``with`` statement.

    The SuperLink listens on free ports of this machine, and writes its output into ``home``.
    Another process guards it, and ends it even if this process is killed. When the statement ends,
    all processes of the run are ended.

    Args:
        home: the folder of the SuperLink's state. Its path is also an environment variable of the
            run's processes, which identifies them.
        variables: environment variables to add for the SuperLink, or None.
        address: the address of a running Ray cluster. If it is empty, the run starts a cluster.

    Yields:
        The environment variables that ``flwr`` needs to find the SuperLink.

    Raises:
        ProcessError: the SuperLink did not start.
    """
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
        # Its own session lets Ctrl-C reach only this process, which then ends the run
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
        # The guard takes the end of this pipe for our end, and ends the SuperLink
        guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            guard.wait(_END_LIMIT)
        processes.end_run(home)  # the guard may have been killed before it ended the run
        guard.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: str, log: Path) -> None:
    limit = time.monotonic() + _START_LIMIT
    fault = f"did not start within {_START_LIMIT:.0f} s"
    while time.monotonic() < limit:
        if process.poll() is not None:
            fault = "ended at its start: " + " ".join(log.read_text().split()[-60:])
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:  # urllib's own errors are
            time.sleep(0.2)
    raise ProcessError(f"Flower's SuperLink {fault}")


def _flwr_run(
    app: Path,
    config: Path,
    resources: Mapping[str, Value],
    environment: Mapping[str, str],
    directory: RunDirectory,
) -> str:
    """Run ``flwr run``, and show its log and progress bars on the terminal.

    Once the app has logged an error, the log is shown only with --verbose, because this function
    returns the error.

    Args:
        app: the folder of the Flower app.
        config: the TOML file with the run's settings.
        resources: the resources of the sites. If Ray's number of cores or GPUs ('init-args...') is
            0, it is not passed on, so that Ray counts them itself.
        environment: the environment variables of the command.
        directory: the run directory, from which the progress is read.

    Returns:
        An empty string on success. After an error, the last error that the app logged. If it logged
        none, a sentence about the exit code.
    """
    wanted = []
    for key, value in resources.items():
        # Ray counts this machine's cores and GPUs itself, unless a number is given
        if value or not key.startswith("init-args"):
            wanted.append(f"{key}={value}")
    options = ["--run-config", str(config), "--stream", "--federation-config", " ".join(wanted)]
    command = [processes.tool("flwr"), "run", str(app), *options]
    console = make_console()
    with progress_bars(console, lambda: read_progress(directory.path)):
        last_error, code = stream(command, environment, console)
    return last_error or ("" if code == 0 else f"'flwr run' ended with exit code {code}: see above")


def stream(
    command: Sequence[str], environment: Mapping[str, str], console: Console
) -> tuple[str, int]:
    """Run a Flower command until it ends, and print each line of its output at once.

    The output includes stderr. An error line is a log line in which the app reports an error. Two
    kinds of lines are printed only with --verbose: routine messages of Flower and Ray, and
    everything from the first error line on.

    Returns:
        The text of the last error line, empty if there is none, and the exit code.
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
    # Flower's log colours its lines
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    match = re.match(r"ERROR\s*:\s+fedsilo: (.*)", plain)  # errors of sites begin differently
    return match[1].strip() if match else ""


# --- A running Ray cluster ---


def ray_variables(address: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Build the environment variables by which Ray finds its cluster.

    ``RAY_ADDRESS`` is the cluster's address. If the cluster is already running,
    ``RAY_JOB_CONFIG_JSON`` has the variables that Ray passes on to its workers on other machines.
    These are the variables of fedsilo and Flower, the number of OpenMP threads, and the workspace
    of cuBLAS.

    Args:
        address: the address of a running cluster. If it is empty, Ray starts a new cluster for the
            run, and ``RAY_ADDRESS`` is "local".
        variables: the environment variables of the run.
    """
    if not address:
        return {ADDRESS_VARIABLE: LOCAL}
    travelling = {k: value for k, value in variables.items() if _TRAVELLING.fullmatch(k)}
    job = json.dumps({"runtime_env": {"env_vars": travelling}})
    return {ADDRESS_VARIABLE: address, _JOB_VARIABLE: job}


def unused_cluster(environment: Mapping[str, str] = os.environ) -> str | None:
    """Build the warning that a run does not use the cluster that RAY_ADDRESS names.

    A cluster is used only with --ray-address. The result is None if RAY_ADDRESS is missing, empty
    or "local".
    """
    address = environment.get(ADDRESS_VARIABLE, LOCAL)
    if not address or address == LOCAL:
        return None
    return (
        f"{ADDRESS_VARIABLE} names {address}, but this run does not use it: give it by "
        "--ray-address to spread the run over that cluster"
    )


def check_cluster(address: str, resources: Mapping[str, Value]) -> None:
    """Check that Ray connects to a running cluster within 60 seconds.

    The connection is tried in another process.

    Args:
        address: the address of the cluster, ``auto`` or ``HOST:PORT``.
        resources: the resources of the run.

    Raises:
        SettingError: Ray does not connect, or the resources set the cluster's number of cores or
            GPUs ('init-args...') above 0. A running cluster has its own numbers.
    """
    for key in ("init-args-num-cpus", "init-args-num-gpus"):
        if resources.get(key):
            raise SettingError(
                f"resource '{key}' is for a cluster that the run starts, but --ray-address names "
                "a running one: remove the resource"
            )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONNECT, address],
            capture_output=True,
            text=True,
            check=False,
            timeout=_CONNECT_LIMIT,
        )
    except subprocess.TimeoutExpired:
        reason = f"it did not answer within {_CONNECT_LIMIT:g} s"
    else:
        if not done.returncode:
            return
        lines = done.stderr.strip().splitlines() or ["Ray gave no reason"]
        reason = one_line(lines[-1], 300)
    raise SettingError(
        f"the Ray cluster at {one_line(address, 100)} cannot be used: {reason}; look at 'ray "
        "status' there, or leave --ray-address out"
    )


# --- The guard process ---

_LOOK = 0.5  # seconds between checks of the command
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guard(home: Path, command: Sequence[str], pipe: int) -> int:
    """Run a command until it ends or its owner dies, then end all processes of the run.

    The owner is the process that started this one, and it holds the other end of ``pipe``. When the
    owner dies, ``pipe`` ends. This process then ends the command, too, and deletes the folder
    ``home``. If the command ends first, the folder is kept, because the owner still reads it.

    Args:
        home: the folder of the run's state. The run's processes have its path in their environment.
        command: the command and its arguments.
        pipe: the file descriptor to read from. The owner never writes to the pipe.

    Returns:
        The command's exit code, or 0 if the owner died first.
    """
    for number in _ENDINGS:
        signal.signal(number, _exit_by_signal)
    pipe_ended = False
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        pipe_ended = _pipe_ended_before(process, pipe)
        return 0 if pipe_ended else process.returncode
    finally:
        # A second signal must not interrupt the end of the run, or processes would be left behind
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


def _exit_by_signal(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:], sys.stdin.fileno()))
