"""A deployment: a server, hospitals as processes of this machine, kits for other machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api.options import (
    DeploymentFolder,
    ExperimentName,
    MaybePath,
    Option,
    RunName,
    Seed,
    Sources,
    command,
    run_sources,
)
from fedsilo.core.arguments import AnyPath, Tell, path_of, refuse_below, several, silent
from fedsilo.core.one_line import format_count
from fedsilo.deployment.options import DeploymentOptions, ServiceOptions

if TYPE_CHECKING:
    from fedsilo.deployment.backup.backup import MadeBackup, Restored
    from fedsilo.deployment.deployment import Deployment
    from fedsilo.deployment.joining import MadeKit
    from fedsilo.deployment.member_status import MemberStatus

_FOLDER = "deployment"
PassphraseFile = Annotated[
    MaybePath,
    Option("a file whose first line is the passphrase (default: ask)", value="FILE"),
]


@command
def up(
    experiment: Annotated[
        str | None, "the experiment whose silos become the sites [default: uefl-digits]"
    ] = None,
    *,
    deployment: DeploymentFolder = _FOLDER,
    tell: Tell = silent,
    **options: Unpack[DeploymentOptions],
) -> Deployment:
    """Start the server and the sites of this machine, except those that are running already.

    If the folder ``deployment`` has no deployment yet, a new one is made from ``options``. Its
    sites are the silos of ``experiment``, by default those of 'uefl-digits'. The call returns when
    the server and these sites are online.

    Returns:
        The deployment, with the ids of its processes.

    Raises:
        FedsiloError: the options contradict each other or the existing deployment, the silos of
            ``experiment`` are not the existing deployment's sites, or a server or site does not
            start.
    """
    from fedsilo.deployment.commands import up

    return up(Path(deployment), experiment, options, tell)


@command
def add(
    names: Annotated[Sequence[str], "a name for each hospital"],
    *,
    deployment: DeploymentFolder = _FOLDER,
    tell: Tell = silent,
) -> Sequence[MadeKit]:
    """Register hospitals on other machines, and make a kit for each.

    A kit is a zip with all that a hospital needs to connect: a private key, the authority's
    certificate and the server's address. The server must be running.

    Returns:
        The kits, in the order of ``names``.

    Raises:
        FedsiloError: a name is not allowed or already exists, or the server does not answer.
    """
    from fedsilo.deployment.joining import add

    return add(Path(deployment), several(names), tell)


@command
def renew(
    member: Annotated[str, "a hospital or server"],
    *,
    deployment: DeploymentFolder = _FOLDER,
    tell: Tell = silent,
) -> MadeKit | str:
    """Replace a hospital's key and kit, or the certificate of the server.

    A hospital on another machine gets a new key in a new kit, the zip with which it connects. A
    site of this machine gets a new key, and its process is ended until 'fedsilo deploy up'. The
    server then refuses the old key. If ``member`` is 'server', it gets a new certificate for its
    next start.

    Returns:
        For a hospital on another machine, its new kit. Otherwise a sentence on the next step.

    Raises:
        FedsiloError: ``member`` is not in the deployment, or a hospital's key cannot be replaced,
            for example because the server does not answer.
    """
    from fedsilo.deployment.joining import renew

    return renew(Path(deployment), member, tell)


@command
def revoke(
    member: Annotated[str, "a site"], *, deployment: DeploymentFolder = _FOLDER, tell: Tell = silent
) -> str:
    """Exclude a hospital for good.

    The server accepts no more messages from the hospital. If the hospital's process runs on this
    machine, the process is ended. Copies of the hospital's keys and kit at the server are deleted.
    The name can be added again, but only with a new key.

    Returns:
        The sentence '<member> is revoked'.

    Raises:
        FedsiloError: ``member`` is not in the deployment, or the server does not answer.
    """
    from fedsilo.deployment.joining import revoke

    revoke(Path(deployment), member, tell)
    return f"{member} is revoked"


@command
def status(*, deployment: DeploymentFolder = _FOLDER) -> list[MemberStatus]:
    """List the members of a deployment, and whether each one runs.

    The server comes first, then the sites on this machine, then the hospitals on other machines.
    Each entry has the member's name, process id, state at the server, log file and times of
    connection. If the server is down, all sites and hospitals count as offline.

    Raises:
        FedsiloError: the folder does not contain a deployment, or the server runs but does not
            answer.
    """
    from fedsilo.deployment.member_status import status

    return status(Path(deployment))


@command
def logs(
    member: Annotated[
        str, "server or a site"
    ] = "server",  # deploy.deployment.SERVER, which imports what runs
    *,
    deployment: DeploymentFolder = _FOLDER,
    lines: Annotated[int, "number of lines"] = 40,
) -> str:
    """Show the last lines of a member's log.

    A member is the server or a site on this machine. The lines are returned as one text.

    Raises:
        FedsiloError: ``lines`` is below 1, ``member`` is not in the deployment or runs on another
            machine, or its log does not exist because it has not run yet.
    """
    from fedsilo.deployment.commands import logs

    refuse_below(1, "lines", lines)
    return logs(Path(deployment), member, lines)


@command
def run(
    experiment: ExperimentName,
    *,
    deployment: DeploymentFolder = _FOLDER,
    seed: Seed = None,
    name: RunName = None,
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> Path:
    """Run an experiment on the deployment, and wait for its end.

    The server and the hospitals of the deployment must be running. Pictures are drawn on this
    machine after the run, because the server does not draw any.

    Args:
        experiment: the name of the experiment. The name of a method stands for a run with the
            method's default settings.
        deployment: the deployment's folder.
        seed: the seed. None for the experiment's.
        name: the name of the run directory. None for one from the settings.
        tell: is called with lines about the progress.
        sources: changes to the experiment's settings. ``out`` is ignored, because the run directory
            is in the server's folder.

    Returns:
        The run directory.

    Raises:
        FedsiloError: the server or a hospital is down, the run directory cannot be used, or the run
            failed.
    """
    from fedsilo.deployment.deployed_run import run
    from fedsilo.pictures.learning_curves import draw_pictures
    from fedsilo.server_app.records.run_directory import RunDirectory

    folder = run(experiment, Path(deployment), run_sources(sources), tell, seed=seed, name=name)
    # The server draws nothing
    draw_pictures(RunDirectory(folder), tell)
    return folder


def plan_deployed_run(
    experiment: str,
    *,
    deployment: Path | str = _FOLDER,
    seed: int | None = None,
    name: str | None = None,
    **sources: Unpack[Sources],
) -> Iterator[str]:
    """Yield the lines of ``deploy run --dry-run``: the plan of a run, its hospitals and its folder.

    The arguments are those of ``run``. Nothing is run or written. The server and the sites on this
    machine must be online, but hospitals on other machines are not asked.

    Raises:
        FedsiloError: the server or a site on this machine is down, or the run directory cannot be
            used.
    """
    from fedsilo.deployment.deployed_run import plan

    there, settings, directory = plan(
        experiment, Path(deployment), run_sources(sources), seed=seed, name=name
    )
    common = settings.common
    rounds = format_count(common.rounds, "round")
    yield f"plan: {common.method} on {common.dataset}, {rounds}, seed {common.seed}"
    yield f"hospitals on this machine: {', '.join(there.sites) or 'none'}; others may have joined"
    yield f"would write: {directory}"
    yield "nothing was run or written; 'fedsilo doctor run' asks the hospitals whether it fits"


@command
def down(*, deployment: DeploymentFolder = _FOLDER) -> str:
    """Stop all processes of a deployment on this machine. The deployment's folder is kept.

    Returns:
        A sentence with the number of members that were running and the path of the folder.

    Raises:
        FedsiloError: the folder does not contain a deployment.
    """
    from fedsilo.deployment.commands import down

    there, ended = down(Path(deployment))
    return f"ended {format_count(len(ended), 'process')}; the folder {there.folder} stays"


@command
def backup(
    file: Annotated[AnyPath, "the new file of the backup"],
    *,
    deployment: DeploymentFolder = _FOLDER,
    passphrase_file: PassphraseFile = None,
    tell: Tell = silent,
) -> MadeBackup:
    """Write an encrypted backup of a deployment, which may be running.

    The backup contains the keys, the registrations, the database of the server, all run directories
    with their checkpoints, and the private state of sites on this machine. Hospitals on other
    machines back up their own folders. Without ``passphrase_file``, the passphrase is asked for at
    the terminal.

    Returns:
        The path of the backup, its size in bytes and its manifest.

    Raises:
        FedsiloError: the file exists, the passphrase has fewer than 12 characters or cannot be
            read, the folder does not contain a deployment, or the sites of this machine write too
            fast to be copied.
    """
    from fedsilo.deployment.backup.backup import back_up
    from fedsilo.deployment.backup.passphrase import read_passphrase

    passphrase = read_passphrase(path_of(passphrase_file), is_new=True)
    return back_up(Path(deployment), Path(file), passphrase, tell)


@command
def restore(
    file: Annotated[AnyPath, "the file of 'fedsilo deploy backup'"],
    *,
    deployment: DeploymentFolder = _FOLDER,
    passphrase_file: PassphraseFile = None,
) -> Restored:
    """Restore a deployment from a backup into a new or empty folder.

    Nothing is started. A damaged backup or a wrong passphrase leaves nothing behind. Without
    ``passphrase_file``, the passphrase is asked for at the terminal.

    Returns:
        The deployment, the backup's manifest, and notes for the operator.

    Raises:
        FedsiloError: the backup is truncated, altered or of another version, the passphrase is not
            the backup's, or the folder is not empty.
    """
    from fedsilo.deployment.backup.backup import restore
    from fedsilo.deployment.backup.passphrase import read_passphrase

    def ask() -> str:
        return read_passphrase(path_of(passphrase_file), is_new=False)

    return restore(Path(file), Path(deployment), ask)


@command
def service(
    *,
    deployment: DeploymentFolder = _FOLDER,
    user: Annotated[
        str | None, "the user of the service (default: the owner of the deployment's folder)"
    ] = None,
    install: Annotated[bool, "install the unit and start the service (needs root)"] = False,
    uninstall: Annotated[bool, "stop the service and remove its unit (needs root)"] = False,
) -> str:
    """Print, install or uninstall the systemd unit that runs a deployment's server.

    Without ``install`` and ``uninstall``, nothing is changed.

    Returns:
        The text of the unit. After ``install`` or ``uninstall``, a sentence about the change.

    Raises:
        FedsiloError: the folder does not contain a deployment, both options are given, or the
            service cannot be installed or uninstalled.
    """
    from fedsilo.deployment.service.changing import change_server_service

    options: ServiceOptions = {"user": user}
    return change_server_service(Path(deployment), options, install=install, uninstall=uninstall)
