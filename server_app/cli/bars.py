"""``bars``: finished runs site by site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsilo.server_app.cli.options import (
    COMPARE,
    CsvOption,
    MeasuredSplit,
    RunDirsArgument,
    example,
    refuse_below,
)

_Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="M,...",
        help="names or patterns of metrics (default: accuracy, entropy and perplexity)",
    ),
]
_Round = Annotated[int | None, typer.Option("--round", help="of this round (default: the last)")]
_Split = Annotated[
    MeasuredSplit, typer.Option("--split", show_default=False, help="(default test)")
]
_Own = Annotated[
    bool,
    typer.Option(
        "--own", help="also each site's own model before the average; on validation samples"
    ),
]
_Picture = Annotated[
    Path | None, typer.Option("--picture", show_default=False, help="(default bars.png)")
]


def add_commands(app: typer.Typer) -> None:
    """Add ``bars``."""
    app.command(
        "bars",
        help="draw finished runs site by site",
        epilog=example("bars runs/fedavg runs/uefl --metrics accuracy"),
        rich_help_panel=COMPARE,
    )(_bars)


def _bars(
    run_dirs: RunDirsArgument,
    *,
    metrics: _Metrics = None,
    round_: _Round = None,
    split: _Split = "test",
    own: _Own = False,
    csv: CsvOption = None,
    picture: _Picture = None,
) -> None:
    from fedsilo.datasets.io.atomic_files import write_atomically
    from fedsilo.server_app.studies.compare.per_site import BarOptions, draw_bars, site_bars
    from fedsilo.server_app.studies.compare.tables import csv_text
    from fedsilo.server_app.studies.figures.learning_curves import write_picture

    if round_ is not None:
        refuse_below(0, "round", round_)
    asked = BarOptions(metrics=metrics, split=split, round=round_, own=own)
    bars = site_bars(run_dirs, asked)
    if csv:
        write_atomically(csv, csv_text(bars.table))
    path = picture or Path("bars.png")
    write_picture(path, draw_bars(bars))
    print(path)
