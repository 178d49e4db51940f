"""``sweep``: finished runs over a setting in which they differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.server_app.cli.options import COMPARE, MeasuredSplit, example

_HELP = "draw a figure of finished runs over a setting"
_OLD_NAME = "against"
# Also below the options: a newer click drops the help of an argument
_EPILOG = (
    "setting: in which the runs differ, for example unseen; run_dir: a run, or a folder of runs\n\n"
    + example("sweep unseen runs --metric accuracy")
)
_Setting = Annotated[
    str, typer.Argument(metavar="setting", help="in which the runs differ, for example unseen")
]
_Folders = Annotated[
    list[Path], typer.Argument(metavar="run_dir...", help="a run, or a folder of runs")
]
_Metric = Annotated[str, typer.Option("--metric", show_default=False, help="(default accuracy)")]
_Split = Annotated[
    MeasuredSplit, typer.Option("--split", show_default=False, help="(default test)")
]
_Picture = Annotated[
    Path | None, typer.Option("--picture", show_default=False, help="(default sweep.png)")
]


def add_commands(app: typer.Typer) -> None:
    """Add ``sweep``, and its old name."""
    app.command("sweep", help=_HELP, epilog=_EPILOG, rich_help_panel=COMPARE)(_sweep)
    app.command(_OLD_NAME, help=_HELP, epilog=_EPILOG, hidden=True, rich_help_panel=COMPARE)(_sweep)


def _sweep(
    context: typer.Context,
    setting: _Setting,
    folders: _Folders,
    *,
    metric: _Metric = "accuracy",
    split: _Split = "test",
    picture: _Picture = None,
) -> None:
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.compare.over_setting import draw_sweep, point_text, sweep
    from fedsilo.server_app.studies.figures.learning_curves import write_picture

    name = context.info_name
    if name == _OLD_NAME:
        print("fedsilo: 'against' is called 'sweep' now: fedsilo sweep ...", file=sys.stderr)
    swept = sweep(setting, folders, metric=metric, split=split)
    console = make_console()
    for experiment, points in swept.lines():
        texts = ", ".join(point_text(point) for point in points)
        console.print(f"{experiment}: {texts}", highlight=False, soft_wrap=True)
    # The old name goes on writing the old file
    path = picture or Path(f"{name}.png")
    write_picture(path, draw_sweep(swept))
    console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
