"""``fedsilo deploy``: runs a server and sites as processes of this machine, with TLS and keys.

It runs Flower's commands and prints each one. ``joining`` adds hospitals on other machines.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.processes import end_trees
from fedsilo.deployment.deployment import (
    SERVER,
    Deployment,
    DeploymentError,
    is_deployment,
    read_deployment,
)
from fedsilo.deployment.flower_commands import (
    Say,
    healthy,
    offline,
    online,
    tell,
    wait_for,
    wait_until_left,
)
from fedsilo.deployment.joining import register
from fedsilo.deployment.making import (
    DeploymentRequest,
    make_deployment,
    make_secrets,
    refuse_changes,
    share_signing_keys,
)
from fedsilo.deployment.worker.installed import refuse_other_flower


@dataclass(frozen=True)
class MemberStatus:
    """The state of the server or of a site."""

    member: str  # ``server`` or the site
    pid: int | None  # id of its process; None if the process does not run on this machine
    seen: str  # the site's state at the server, online or offline; empty for the server itself
    log: Path | None  # log file of its process; None if the hospital is on another machine


def up(folder: Path, request: DeploymentRequest, say: Say) -> Deployment:
    """Make the deployment if it is new, and start every member that does not run.

    Raises:
        FedsiloError: the request contradicts the deployment, a member does not start, or the
            installed version of Flower is not supported.
    """
    refuse_other_flower()
    folder = folder.expanduser().resolve()
    if is_deployment(folder):
        deployment = read_deployment(folder)
        refuse_changes(deployment, request)
    else:
        deployment = make_deployment(folder, request)
    make_secrets(deployment)
    share_signing_keys(deployment)
    deployment.write_connection()
    for member in deployment.members:
        if not deployment.process(member):
            if member != SERVER and member in deployment.started:
                wait_until_left(deployment, member, say)
            deployment = _start(deployment, member, say)
        # Sites are registered as soon as the server answers, before they are started
        if member == SERVER:
            wait_for(deployment, _find_silent_server)
            for site in deployment.sites:
                if site not in deployment.nodes:
                    deployment = register(deployment, site, say)
            deployment.write_registry()
    wait_for(deployment, offline)
    return deployment


def _find_silent_server(deployment: Deployment) -> list[str]:
    """Return the server's name if the server does not answer yet; else an empty list."""
    if healthy(deployment):
        return []
    return [SERVER]


def status(folder: Path) -> list[MemberStatus]:
    """Return the state of all members; DeploymentError if the server runs but does not answer."""
    deployment = read_deployment(folder)
    # A server in a container has no known process here, so its health is asked for instead
    online_sites: list[str] = []
    if deployment.process(SERVER) or (deployment.address and healthy(deployment)):
        online_sites = online(deployment)
    members = [MemberStatus(SERVER, _pid(deployment, SERVER), "", deployment.log(SERVER))]
    for site in (*deployment.sites, *deployment.hospitals):
        state = "offline"
        if site in online_sites:
            state = "online"
        log = None
        if site in deployment.sites:
            log = deployment.log(site)
        members.append(MemberStatus(site, _pid(deployment, site), state, log))
    return members


def _pid(deployment: Deployment, member: str) -> int | None:
    process = deployment.process(member)
    if process is None:
        return None
    return process.pid


def logs(folder: Path, member: str, lines: int) -> str:
    """Return the last ``lines`` lines of a member's log.

    Raises:
        FedsiloError: the deployment has no such member, or the member has no log.
    """
    path = read_deployment(folder).log(member)
    if not path.is_file():
        raise DeploymentError(
            f"{member} has no log {path}, because it has not run yet: start it by 'fedsilo deploy "
            "up'"
        )
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(text[-lines:])


def down(folder: Path) -> tuple[Deployment, list[str]]:
    """End all processes of a deployment; its folder stays.

    Returns:
        The deployment, and the members that were running.
    """
    deployment = read_deployment(folder)
    running = deployment.running()
    # Sites end first, so that they can sign off at the server
    for members in (deployment.sites, [SERVER]):
        processes = []
        for member in members:
            process = deployment.process(member)
            if process is not None:
                processes.append(process)
        end_trees(processes)
    return deployment, running


def _start(deployment: Deployment, member: str, say: Say) -> Deployment:
    """Start a member's process, which keeps running after this command has ended."""
    command = deployment.command(member)
    tell(command, say)
    # A session of its own keeps Ctrl-C in this terminal away from it
    with deployment.log(member).open("ab") as log:
        process = subprocess.Popen(
            command,
            env=deployment.environment(member),
            cwd=deployment.home(member),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return deployment.with_started(member, process.pid)
