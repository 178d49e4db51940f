"""``fedsilo deploy run``: an experiment on a deployment, from its start to its summary."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import time

from models.contract.settings_schema import Value
from server_app.deploy.commands import flwr, online, tell
from server_app.deploy.deployment import (
    FEDERATION,
    SERVER,
    Deployment,
    DeploymentError,
    read_deployment,
)
from server_app.records.run_directory import open_run_directory
from server_app.run.planning import RunSources, planned
from server_app.run.processes import app_folder, tool
from server_app.run.progress_bars import make_console

_PAUSE = 3.0  # seconds between looks at a run whose log has broken off


def run(options: argparse.Namespace) -> None:
    """Run an experiment on the deployment and wait for its end.

    Raises:
        FedsiloError: a member is down, the run directory is not as it must be, or the run failed.
    """
    import tomli_w

    deployment = read_deployment(options.dir.expanduser().resolve())
    sources = RunSources(
        file=options.file,
        config=options.config,
        changes=tuple(options.changes),
        out=deployment.runs,
    )
    settings, _ = planned(options.experiment, sources, more=_named(options))
    name, resume = settings.common.run_name, settings.common.resume
    directory = open_run_directory(str(deployment.runs), name, resume).path
    _refuse_incomplete(deployment)
    config = deployment.home(SERVER) / f"{name}.toml"
    config.write_text(tomli_w.dumps(dict(settings.as_mapping())), encoding="utf-8")
    console = make_console()
    command = ("run", str(app_folder()), FEDERATION, "--run-config", str(config))
    number = str(flwr(deployment, *command, say=console)["run-id"])
    log = [tool("flwr"), "log", number, FEDERATION, "--stream"]
    tell(console, log)
    subprocess.run(log, env=deployment.environment(SERVER), check=False)
    status = _end(deployment, number)
    if status != "finished:completed":
        after = "; after mending it: " + _again(options, name) if directory.is_dir() else ""
        raise DeploymentError(
            f"run {number} ended as {status}: the lines above say why, or 'fedsilo deploy logs "
            f"server --dir {deployment.folder}'{after}"
        )
    console.print(f"run directory: {directory}", highlight=False, soft_wrap=True)


def _refuse_incomplete(deployment: Deployment) -> None:
    gone = [member for member in deployment.members if not deployment.process(member)]
    away = [site for site in deployment.sites if site not in online(deployment)] if not gone else []
    if gone or away:
        raise DeploymentError(
            f"{', '.join(gone or away)} of {deployment.folder} {'down' if gone else 'offline'}: "
            "'fedsilo deploy up' starts what has ended, 'fedsilo deploy logs' says why"
        )


def _named(options: argparse.Namespace) -> dict[str, Value]:
    given = {"seed": options.seed, "run-name": options.name}
    return {key: value for key, value in given.items() if value is not None}


def _end(deployment: Deployment, number: str) -> str:
    """Wait until a run has ended and return how; its log may break off while it goes on."""
    while True:
        try:
            (found,) = flwr(deployment, "list", FEDERATION, "--run-id", number)["runs"]
        except DeploymentError as error:
            return f"lost, since the server does not answer ({error})"
        status = str(found["status"])
        if status.startswith("finished"):
            details = str(found["status-details"])
            return status if details in ("", "N/A") else f"{status} ({details})"
        time.sleep(_PAUSE)


def _again(options: argparse.Namespace, name: str) -> str:
    """Return the command that resumes the run, with the options that it was started with."""
    words = ["fedsilo", "deploy", "run", options.experiment, "--dir", str(options.dir)]
    if options.config:
        words += ["--config", str(options.config)]
    if options.seed is not None:
        words += ["--seed", str(options.seed)]
    for change in options.changes:
        if not change.startswith("resume="):
            words += ["--set", change]
    return shlex.join([*words, "--name", name, "--set", "resume=true"])
