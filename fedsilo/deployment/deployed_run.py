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
    is_healthy,
    list_missing_sites,
    print_command,
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

    Flower's log of the run is printed while it runs.

    Args:
        experiment: the experiment, or a method.
        folder: the deployment's folder.
        sources: the files and changed settings of the run. Its ``out`` is ignored, because the run
            directory is in the server's folder.
        say: prints one line for each command that is run.
        seed: the run's seed; None for the experiment's.
        name: the run's name; None for the experiment's, or a generated one.
        overrides: settings that take precedence over all others, including ``seed`` and ``name``.

    Raises:
        FedsiloError: a member is down, the run directory cannot be used, or the run failed. For a
            failed run whose directory exists, the message has the command that resumes it.
    """
    deployment, settings, directory = plan(
        experiment, folder, sources, seed=seed, name=name, overrides=overrides
    )
    run_name = settings.common.run_name
    number = _start(deployment, settings, deployment.home(SERVER) / f"{run_name}.toml", say)
    log = [tool("flwr"), "log", number, FEDERATION, "--stream"]
    print_command(log, say)
    error, _ = stream(log, deployment.environment(SERVER), make_console())
    status = _end(deployment, number)
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
    """Plan what ``run`` starts, and start nothing.

    Whether the local members run and are online is checked.

    Args:
        experiment: the experiment, or a method.
        folder: the deployment's folder.
        sources: the files and changed settings of the run. Its ``out`` is ignored.
        seed: the run's seed; None for the experiment's.
        name: the run's name; None for the experiment's, or a generated one.
        overrides: settings that take precedence over all others, including ``seed`` and ``name``.

    Returns:
        The deployment, the settings of the run, and the run directory, which may not exist yet.

    Raises:
        FedsiloError: a member is down, the settings are not valid, or the run directory cannot be
            used.
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
    """Ask the sites for their facts through the deployment's server, as at a run's start.

    No model is trained, and no run directory is kept. An absent site is waited for only 5 seconds.

    Args:
        experiment: the experiment, or a method.
        deployment: the deployment, whose server must run.
        sources: the files and changed settings. Its ``out`` is ignored.
        seed: the run's seed; None for the experiment's.

    Raises:
        FedsiloError: the server is down, or the sites could not be asked.
    """
    with tempfile.TemporaryDirectory(dir=deployment.home(SERVER), prefix="meeting-") as folder:
        overrides: dict[str, Value] = {"run.purpose": "meet", "run.away-timeout": _AWAY}
        if seed is not None:
            overrides["seed"] = seed
        at_folder = dataclasses.replace(sources, out=Path(folder))
        settings = planned_settings(experiment, at_folder, overrides)
        # The server's process writes the meeting to a file, because flwr returns only a status
        status = _end(deployment, _start(deployment, settings, Path(folder) / "config.toml", None))
        if status != _COMPLETED:
            raise DeploymentError(
                f"the sites could not be asked ({status}): for the reason, read "
                f"{_logs_command(deployment)}"
            )
        return read_meeting(meeting_file(settings.common))


def _logs_command(deployment: Deployment) -> str:
    return f"'fedsilo deploy logs server --deployment {deployment.folder}'"


def _start(deployment: Deployment, settings: RunSettings, config: Path, say: Say | None) -> str:
    """Write the settings to the file ``config``, start a run with them, and return its run id.

    The call does not wait for the run's end. If ``say`` is not None, it prints the command.
    """
    write_atomically(config, tomli_w.dumps(settings.run_config()))
    command = ("run", str(app_folder()), FEDERATION, "--run-config", str(config))
    return str(flwr(deployment, *command, say=say)["run-id"])


def _refuse_incomplete(deployment: Deployment, sites: Sequence[str] = ()) -> None:
    """Check that the server and the run's sites on this machine run and are connected.

    Args:
        deployment: the deployment.
        sites: the sites of the run; empty for all.

    Raises:
        DeploymentError: a local process is down, or a local site is offline. Hospitals on other
            machines are not checked.
    """
    state, wanted = "down", [SERVER, *(sites or deployment.sites)]
    local = [member for member in deployment.members if member in wanted]
    missing = [member for member in local if not deployment.process(member)]
    # The process of a server in a container is not known here, so its health is asked for instead
    if SERVER in missing and deployment.address and is_healthy(deployment):
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


def _end(deployment: Deployment, number: str) -> str:
    """Wait until a run has ended and return its status, such as "finished:completed".

    Flower's details, if there are any, follow in brackets.

    The status is requested every three seconds, because a run can outlive its log stream. If the
    server stops answering, the returned status begins with "lost", and no error is raised.
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
    """Build the shell command that resumes the run ``name`` with the same options.

    The options are the configuration file, the seed and the changed settings (``--set``), each only
    if it was given. Words are quoted for a shell. A change of ``run.resume`` is dropped, because
    the command sets it to true.
    """
    words = ["fedsilo", "deploy", "run", experiment, "--deployment", str(folder)]
    if sources.config:
        words += ["--config", str(sources.config)]
    if seed is not None:
        words += ["--seed", str(seed)]
    for change in sources.changes:
        # 'resume' is the former name of the setting
        if not change.startswith(("run.resume=", "resume=")):
            words += ["--set", change]
    return shlex.join([*words, "--name", name, "--set", "run.resume=true"])
