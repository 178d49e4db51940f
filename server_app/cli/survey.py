"""``survey``: what data the sites hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsilo.server_app.cli.options import (
    DATA,
    ChangesOption,
    ConfigOption,
    ExperimentArgument,
    FileOption,
    NameOption,
    OutOption,
    SupernodesOption,
    example,
)
from fedsilo.server_app.cli.printing import line_printer

_Deployment = Annotated[
    Path | None,
    typer.Option(
        "--deployment", metavar="DIR", help="ask the hospitals of a deployment, not simulated sites"
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``survey``."""
    app.command(
        "survey",
        help="ask the sites what their data are like",
        epilog=example("survey fedavg-heart --set data-dir=data"),
        rich_help_panel=DATA,
    )(_survey)


def _survey(
    experiment: ExperimentArgument,
    *,
    deployment: _Deployment = None,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    supernodes: SupernodesOption = None,
    name: NameOption = None,
) -> None:
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.survey.command import survey

    say = line_printer(make_console())
    sources = RunSources(file=file, config=config, changes=tuple(changes), out=out)
    page = survey(experiment, sources, say, deployment=deployment, supernodes=supernodes, name=name)
    say(f"page: {page}")
