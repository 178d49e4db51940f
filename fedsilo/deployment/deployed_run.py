"""``fedsilo deploy run``: runs an experiment on a deployment and waits for its summary."""

import dataclasses
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w

from fedsilo.core.arguments import RunSources
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.processes import app_folder, tool
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import (
    FEDERATION,
    SERVER,
    Deployment,
    DeploymentError,
    read_deployment,
)
from fedsilo.deployment.flower_commands import (
    Say,
    flwr,
    list_missing_sites,
    print_command,
    server_runs,
)
from fedsilo.engines.planning import planned_settings
from fedsilo.engines.ray_engine import stream
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import open_run_directory
from fedsilo.server_app.run.meeting import Meeting, meeting_file, read_meeting
from fedsilo.server_app.run.terminal import make_console
from fedsilo.strategies.meeting.terms import split_sites

_AWAY = 5.0  # seconds; a meeting waits only briefly for an absent site, because nothing is trained
_PAUSE = 3.0  # seconds between two requests for a run's status after its log has ended
_COMPLETED = "finished:completed"


def run(
    experiment: str,
    folder: Path,
    sources: RunSources,
    say: Say,
    *,
    seed: int | None = None,
    name: str | None = None,
    overrides: Mapping[str, Value] | None = None,
) -> Path:
    """Run an experiment on a deployment, wait for its end, and return the run directory.

    The run's settings are written to a TOML file in the server's folder. Flower's log of the run is
    printed meanwhile.

    Args:
        experiment: the name of an experiment, or of a method, which runs with its defaults.
        folder: the deployment's folder.
        sources: the files and changed settings of the run. Its ``out`` is ignored, because the run
            directory is in the server's folder.
        say: prints the commands that start the run and show its log.
        seed: the run's seed. None means the experiment's seed.
        name: the run's name. None means the experiment's name for runs, or a generated one.
        overrides: settings that take precedence over all others, including ``seed`` and ``name``.

    Raises:
        FedsiloError: a setting is invalid, the server or a site on this machine is not online,
            the run directory cannot be used, or the run failed. If a failed run has a directory,
            the message ends with the command that resumes it.
    """
    deployment, settings, directory = plan(
        experiment, folder, sources, seed=seed, name=name, overrides=overrides
    )
    run_name = settings.common.run_name
    number = _start_run(deployment, settings, deployment.home(SERVER) / f"{run_name}.toml", say)
    log = [tool("flwr"), "log", number, FEDERATION, "--stream"]
    print_command(log, say)
    error, _ = stream(log, deployment.environment(SERVER), make_console())
    # The log can break off while the run goes on, so the server's status decides
    status = _wait_for_end(deployment, number)
    if status != _COMPLETED:
        fault = f"ended as {status}: read {_logs_command(deployment)}"
        if error:
            fault = f"failed: {error}"
        # Without a directory the run never began, so it cannot be resumed
        if directory.is_dir():
            again = resume_command(experiment, folder, sources, seed, run_name)
            fault += f"; once that is fixed: {again}"
        raise DeploymentError(f"run {number} {fault}")
    return directory


def plan(
    experiment: str,
    folder: Path,
    sources: RunSources,
    *,
    seed: int | None = None,
    name: str | None = None,
    overrides: Mapping[str, Value] | None = None,
) -> tuple[Deployment, RunSettings, Path]:
    """Build the settings of a run on a deployment, and check that the run could start.

    Nothing is started. The server must be running, and the run's sites on this machine must be
    online. The run directory must be usable. Hospitals on other machines are not checked.

    Args:
        experiment: the name of an experiment, or of a method, which runs with its defaults.
        folder: the deployment's folder.
        sources: the files and changed settings of the run. Its ``out`` is ignored, because the run
            directory is in the server's folder.
        seed: the run's seed. None means the experiment's seed.
        name: the run's name. None means the experiment's name for runs, or a generated one.
        overrides: settings that take precedence over all others, including ``seed`` and ``name``.

    Returns:
        The deployment, the settings of the run, and the path of the run directory, which may not
        exist yet.

    Raises:
        FedsiloError: the folder has no usable deployment, the server or a site on this machine
            is not online, a setting is invalid, or the run directory cannot be used.
    """
    deployment = read_deployment(folder)
    chosen: dict[str, Value] = {}
    if seed is not None:
        chosen["seed"] = seed
    if name is not None:
        chosen["run.name"] = name
    if overrides:
        chosen |= overrides
    at_server = dataclasses.replace(sources, out=deployment.runs)
    settings = planned_settings(experiment, at_server, chosen)
    run_name, resume = settings.common.run_name, settings.common.resume
    directory = open_run_directory(str(deployment.runs), run_name, resume).path
    _refuse_incomplete(deployment, split_sites(settings.common.sites))
    return deployment, settings, directory


def meet(experiment: str, deployment: Deployment, sources: RunSources, seed: int | None) -> Meeting:
    """Ask the sites of a deployment about their data, and return the answers.

    The answers have, for example, the number of samples at each site. To ask, the server makes a
    run with 'run.purpose' set to "meet", in which no model is trained. The run directory is
    temporary. The server waits only 5 seconds for an absent site.

    Args:
        experiment: the name of an experiment or of a method.
        deployment: the deployment, whose server must be running.
        sources: the files and changed settings. Its ``out`` is ignored.
        seed: the run's seed. None means the experiment's seed.

    Returns:
        A ``Meeting``: the answer of each site, and the reasons of sites that refused.

    Raises:
        FedsiloError: a setting is invalid, the server is down, or the sites could not be asked.
    """
    with tempfile.TemporaryDirectory(dir=deployment.home(SERVER), prefix="meeting-") as folder:
        overrides: dict[str, Value] = {"run.purpose": "meet", "run.away-timeout": _AWAY}
        if seed is not None:
            overrides["seed"] = seed
        at_folder = dataclasses.replace(sources, out=Path(folder))
        settings = planned_settings(experiment, at_folder, overrides)
        # The server's process writes the meeting to a file, because flwr returns only a status
        status = _wait_for_end(
            deployment, _start_run(deployment, settings, Path(folder) / "config.toml", None)
        )
        if status != _COMPLETED:
            raise DeploymentError(
                f"the sites could not be asked ({status}): for the reason, read "
                f"{_logs_command(deployment)}"
            )
        return read_meeting(meeting_file(settings.common))


def _logs_command(deployment: Deployment) -> str:
    return f"'fedsilo deploy logs server --deployment {deployment.folder}'"


def _start_run(deployment: Deployment, settings: RunSettings, config: Path, say: Say | None) -> str:
    """Write a run's settings to the TOML file ``config``, start the run, and return its id.

    The server chooses the id. The call does not wait for the run's end. ``say`` prints the command,
    unless it is None.

    Raises:
        DeploymentError: ``flwr run`` failed.
        ProcessError: ``flwr`` or fedsilo's checkout is missing.
    """
    write_atomically(config, tomli_w.dumps(settings.run_config()))
    command = ("run", str(app_folder()), FEDERATION, "--run-config", str(config))
    return str(flwr(deployment, *command, say=say)["run-id"])


def _refuse_incomplete(deployment: Deployment, sites: Sequence[str] = ()) -> None:
    """Check that the server is running, and that the run's sites on this machine are online.

    A site needs a running process on this machine, and the status "online" at the server. Hospitals
    on other machines are not checked. A server in a container has no process that is known here,
    so it needs only to answer.

    Args:
        deployment: the deployment.
        sites: the sites of the run. If empty, all sites on this machine are checked.

    Raises:
        DeploymentError: a process is not running, the server does not answer, or a site is
            offline.
    """
    state, wanted = "down", [SERVER, *(sites or deployment.sites)]
    local = [member for member in deployment.members if member in wanted]
    missing = [member for member in local if not deployment.process(member)]
    # The server may run in a container, where its process is not known
    if SERVER in missing and server_runs(deployment):
        missing.remove(SERVER)
    # Only a running server can be asked which sites are connected
    if not missing:
        state = "offline"
        missing = [site for site in list_missing_sites(deployment) if site in wanted]
    if missing:
        raise DeploymentError(
            f"members of {deployment.folder} are {state}: {', '.join(missing)}; start them by "
            "'fedsilo deploy up', and read the reason by 'fedsilo deploy logs'"
        )


def _wait_for_end(deployment: Deployment, number: str) -> str:
    """Wait until a run has ended, and return its status, such as "finished:completed".

    The server is asked for the status every three seconds. If Flower gives details, they follow the
    status in brackets. If the server stops answering, the result is "lost, because ..." with the
    reason, and no error is raised.

    Args:
        deployment: the deployment on whose server the run is.
        number: the id of the run at the server.
    """
    while True:
        try:
            (listed,) = flwr(deployment, "list", FEDERATION, "--run-id", number)["runs"]
        except DeploymentError as error:
            return f"lost, because the server does not answer ({error})"
        status = str(listed["status"])
        if status.startswith("finished"):
            details = str(listed["status-details"])
            if details not in ("", "N/A"):
                status += f" ({details})"
            return status
        time.sleep(_PAUSE)


def resume_command(
    experiment: str, folder: Path, sources: RunSources, seed: int | None, name: str
) -> str:
    """Build the shell command that resumes the run ``name`` of a deployment.

    The command is ``fedsilo deploy run`` with ``--name`` and ``--set run.resume=true``. It
    repeats the ``--file``, ``--config``, ``--seed`` and ``--set`` options with which the run was
    first started. A ``--set`` of 'run.resume', or of its older name 'resume', is left out. Words
    are quoted for a shell.
    """
    words = ["fedsilo", "deploy", "run", experiment, "--deployment", str(folder)]
    if sources.file:
        words += ["--file", str(sources.file)]
    if sources.config:
        words += ["--config", str(sources.config)]
    if seed is not None:
        words += ["--seed", str(seed)]
    for change in sources.changes:
        # 'resume' is the former name of the setting
        if not change.startswith(("run.resume=", "resume=")):
            words += ["--set", change]
    return shlex.join([*words, "--name", name, "--set", "run.resume=true"])
