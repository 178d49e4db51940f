"""``fedsilo deploy``: options only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsilo.server_app.cli.options import (
    DEPLOY,
    ChangesOption,
    ConfigOption,
    ExperimentArgument,
    FileOption,
    NameOption,
    OutOption,
    SeedOption,
    example,
)
from fedsilo.server_app.cli.printing import line_printer

_FOLDER = Path("deployment")
_Folder = Annotated[
    Path,
    typer.Option(
        "--deployment",
        "--dir",
        show_default=False,
        help=f"the deployment's folder (default {_FOLDER})",
    ),
]
# Their defaults are shown by typer: a newer click drops the help of an argument
_Silos = Annotated[str, typer.Argument(metavar="experiment")]
_SiteCount = Annotated[
    int | None, typer.Option("--sites", help="how many silos the experiment is cut into")
]
_Sites = Annotated[
    list[str],
    typer.Option(
        "--site", default_factory=list, show_default=False, help="a site by name, instead"
    ),
]
_DataDir = Annotated[Path | None, typer.Option("--data-dir", help="where the sites' data lie")]
_Device = Annotated[str | None, typer.Option("--device", help="of all sites (default cpu)")]
_NodeConfig = Annotated[
    list[str],
    typer.Option(
        "--node-config",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="what else every SuperNode is told, for example allow-folds=true",
    ),
]
_Member = Annotated[str, typer.Argument(metavar="member", help="server or a site")]
_Lines = Annotated[int, typer.Option("--lines", show_default=False, help="(default 40)")]


def add_commands(app: typer.Typer) -> None:
    """Add ``deploy up | status | logs | run | down``."""
    deploy = typer.Typer(rich_markup_mode=app.rich_markup_mode)
    deploy.command("up", help="start all that does not run", epilog=example("deploy up --sites 6"))(
        _up
    )
    deploy.command("status", help="print what runs", epilog=example("deploy status"))(_status)
    deploy.command(
        "logs", help="print the end of a log", epilog=example("deploy logs s1a --lines 100")
    )(_logs)
    deploy.command(
        "run",
        help="run an experiment there, and wait",
        epilog=example(
            "deploy run uefl-digits --set silos=6 --set rounds=3 --set uefl.iteration-rounds=1"
        ),
    )(_run)
    deploy.command("down", help="end all processes", epilog=example("deploy down"))(_down)
    app.add_typer(
        deploy,
        name="deploy",
        help="a server and hospitals as processes, with TLS",
        epilog=example("deploy up --sites 6"),
        rich_help_panel=DEPLOY,
    )


def _up(
    experiment: _Silos = "uefl-digits",
    *,
    folder: _Folder = _FOLDER,
    site_count: _SiteCount = None,
    sites: _Sites,
    data_dir: _DataDir = None,
    device: _Device = None,
    file: FileOption = None,
    node_config: _NodeConfig,
) -> None:
    from fedsilo.server_app.deploy.commands import up
    from fedsilo.server_app.deploy.making import DeploymentRequest
    from fedsilo.server_app.run.progress_bars import make_console

    request = DeploymentRequest(
        experiment=experiment,
        site_count=site_count,
        sites=tuple(sites),
        data_dir=data_dir,
        device=device,
        node_config=tuple(node_config),
        file=file,
    )
    say = line_printer(make_console())
    deployment = up(folder, request, say)
    say(f"{len(deployment.sites)} sites are online: {', '.join(deployment.sites)}")


def _status(folder: _Folder = _FOLDER) -> None:
    from rich.table import Table

    from fedsilo.server_app.deploy.commands import newest, status
    from fedsilo.server_app.run.progress_bars import make_console

    table = Table("member", "process", "seen by the server", "log")
    for state in status(folder):
        table.add_row(state.member, str(state.pid or "-"), state.seen, str(state.log))
    console = make_console()
    console.print(table, soft_wrap=not console.is_terminal)
    if line := newest(folder):
        line_printer(console)(line)


def _logs(
    member: _Member = "server",  # deploy.deployment.SERVER, which imports what runs
    *,
    folder: _Folder = _FOLDER,
    lines: _Lines = 40,
) -> None:
    from fedsilo.server_app.deploy.commands import logs

    print(logs(folder, member, lines))


def _run(
    experiment: ExperimentArgument,
    *,
    folder: _Folder = _FOLDER,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    seed: SeedOption = None,
    name: NameOption = None,
) -> None:
    from fedsilo.server_app.deploy.run import run
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.run.progress_bars import make_console

    sources = RunSources(file=file, config=config, changes=tuple(changes), out=out)
    say = line_printer(make_console())
    say(f"run directory: {run(experiment, folder, sources, say, seed=seed, name=name)}")


def _down(folder: _Folder = _FOLDER) -> None:
    from fedsilo.server_app.deploy.commands import down

    deployment, ended = down(folder)
    print(f"{len(ended)} processes ended; {deployment.folder} stays")
