"""``plot``, ``explain`` and ``attention``: a finished run is drawn and explained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import typer

from server_app.cli.options import RunDirArgument, RunsDataDirOption, RunsStateDirOption, Split

_Split = Annotated[Split, typer.Option("--split", show_default=False)]


def add_commands(app: typer.Typer) -> None:
    """Add ``plot``, ``explain`` and ``attention``."""
    app.command("plot", help="draw the learning curves of a finished run again")(_plot)
    app.command("explain", help="why a run's model answers so for one patient")(_explain)
    app.command("attention", help="draw where a run's ViT looked, per site")(_attention)


def _plot(run_dir: RunDirArgument) -> None:
    from server_app.figures.learning_curves import draw_curves, draw_pictures
    from server_app.records.finished_run import FinishedRun
    from server_app.records.run_directory import RunDirectory
    from strategies.methods.registry import strategy_class

    directory = RunDirectory(run_dir)
    draw_curves(directory)
    print(directory.path / "curves.png")
    method = strategy_class(FinishedRun(directory).summary["method"])
    for path in draw_pictures(directory, method.pictures):
        print(path)


def _explain(
    run_dir: RunDirArgument,
    *,
    site: Annotated[str, typer.Option("--site", help="the patient's site")],
    row: Annotated[int, typer.Option("--row", help="row of the split, from 0")],
    split: _Split = "test",
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write it as JSON")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="also draw it as PNG")] = None,
) -> None:
    from server_app.figures.explain import explain

    explain(argparse.Namespace(**locals()))


def _attention(
    run_dir: RunDirArgument,
    *,
    site: Annotated[str | None, typer.Option("--site", help="one site (default: all)")] = None,
    split: _Split = "test",
    images: Annotated[
        int, typer.Option("--images", show_default=False, help="images per class (default 5)")
    ] = 5,
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder of the pictures (default: the run's)")
    ] = None,
) -> None:
    from server_app.figures.explain import draw_attention

    draw_attention(argparse.Namespace(**locals()))
