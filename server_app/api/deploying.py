"""A deployment: a server, hospitals as processes of this machine, kits for other machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from fedsilo.models.contract.one_line import counted
from fedsilo.server_app.run.arguments import (
    AnyPath,
    Sources,
    Tell,
    path_of,
    refuse_below,
    run_sources,
    several,
    silent,
)

if TYPE_CHECKING:
    from fedsilo.server_app.deploy.commands import MemberStatus
    from fedsilo.server_app.deploy.deployment import Deployment
    from fedsilo.server_app.deploy.joining import MadeKit

_FOLDER = "deployment"


def up(
    experiment: str = "uefl-digits",
    *,
    deployment: AnyPath = _FOLDER,
    sites: int | None = None,
    site: Sequence[str] = (),
    host: str | None = None,
    data_dir: AnyPath | None = None,
    device: str | None = None,
    file: AnyPath | None = None,
    node_config: Sequence[str] = (),
    tell: Tell = silent,
) -> Deployment:
    """Start the server and all sites of this machine that do not run."""
    from fedsilo.server_app.deploy.commands import up
    from fedsilo.server_app.deploy.making import DeploymentRequest

    request = DeploymentRequest(
        experiment=experiment,
        site_count=sites,
        sites=tuple(several(site)),
        data_dir=path_of(data_dir),
        device=device,
        node_config=tuple(several(node_config)),
        file=path_of(file),
        host=host,
    )
    return up(Path(deployment), request, tell)


def add(
    names: Sequence[str], *, deployment: AnyPath = _FOLDER, tell: Tell = silent
) -> Sequence[MadeKit]:
    """Register hospitals on other machines, and make a kit for each."""
    from fedsilo.server_app.deploy.joining import add

    return add(Path(deployment), several(names), tell)


def renew(member: str, *, deployment: AnyPath = _FOLDER, tell: Tell = silent) -> MadeKit | str:
    """Replace a hospital's key and kit, or the certificate of the server."""
    from fedsilo.server_app.deploy.joining import renew

    return renew(Path(deployment), member, tell)


def revoke(member: str, *, deployment: AnyPath = _FOLDER, tell: Tell = silent) -> str:
    """Exclude a hospital for good."""
    from fedsilo.server_app.deploy.joining import revoke

    revoke(Path(deployment), member, tell)
    return f"{member} is revoked"


def status(*, deployment: AnyPath = _FOLDER) -> list[MemberStatus]:
    """List the members of a deployment, and whether each one runs."""
    from fedsilo.server_app.deploy.commands import status

    return status(Path(deployment))


def logs(
    member: str = "server",  # deploy.deployment.SERVER, which imports what runs
    *,
    deployment: AnyPath = _FOLDER,
    lines: int = 40,
) -> str:
    """Print the last lines of a member's log."""
    from fedsilo.server_app.deploy.commands import logs

    refuse_below(1, "lines", lines)
    return logs(Path(deployment), member, lines)


def run(
    experiment: str,
    *,
    deployment: AnyPath = _FOLDER,
    seed: int | None = None,
    name: str | None = None,
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> Path:
    """Run an experiment on the deployment, and wait for its end."""
    from fedsilo.server_app.deploy.run import run
    from fedsilo.server_app.records.run_directory import RunDirectory
    from fedsilo.server_app.studies.figures.learning_curves import draw_pictures

    folder = run(experiment, Path(deployment), run_sources(sources), tell, seed=seed, name=name)
    # The server draws nothing
    draw_pictures(RunDirectory(folder), tell)
    return folder


def down(*, deployment: AnyPath = _FOLDER) -> str:
    """Stop all processes; the folder stays."""
    from fedsilo.server_app.deploy.commands import down

    there, ended = down(Path(deployment))
    return f"ended {counted(len(ended), 'process')}; the folder {there.folder} stays"
