"""``fedsilo predict`` and ``calibrate``: options only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server_app.cli.options import RunDirArgument, RunsDataDirOption, RunsStateDirOption, Split

_Site = Annotated[
    str | None, typer.Option("--site", help="whose model (default: that of all sites)")
]
_Images = Annotated[
    Path | None, typer.Option("--images", metavar="DIR", help="predict the image files below it")
]
_Manifest = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="CSV", help="predict the files in its column 'path'"),
]
_Table = Annotated[
    Path | None,
    typer.Option("--table", metavar="CSV", help="predict its rows, with or without a label"),
]
_Split = Annotated[
    Split | None, typer.Option("--split", help="predict these rows of the site's own")
]
_Out = Annotated[Path, typer.Option("--out", help="CSV to write, not there yet; and a JSON beside")]
_Coverage = Annotated[
    float | None,
    typer.Option("--coverage", help="also prediction sets of this coverage; needs 'calibrate'"),
]
_Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", help="what 'calibrate' wrote (default: the run's)"),
]


def add_commands(app: typer.Typer) -> None:
    """Add ``predict`` and ``calibrate``."""
    app.command("predict", help="predict new cases with a finished run's model")(_predict)
    app.command("calibrate", help="fit how sure a run's model may be at a site")(_calibrate)


def _predict(
    run_dir: RunDirArgument,
    *,
    out: _Out,
    site: _Site = None,
    images: _Images = None,
    manifest: _Manifest = None,
    table: _Table = None,
    split: _Split = None,
    coverage: _Coverage = None,
    calibration: _Calibration = None,
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
) -> None:
    from server_app.cli.printing import progress_bar
    from server_app.predict.prediction import predict
    from server_app.predict.request import PredictRequest

    request = PredictRequest(
        run_dir=run_dir,
        site=site,
        images=images,
        manifest=manifest,
        table=table,
        split=split,
        out=out,
        coverage=coverage,
        calibration=calibration,
        data_dir=data_dir,
        state_dir=state_dir,
    )
    with progress_bar("predict") as watch:
        found = predict(request, watch)
    print(*found.lines(), str(out), sep="\n")


def _calibrate(
    run_dir: RunDirArgument,
    *,
    site: Annotated[str, typer.Option("--site", help="the site whose validation rows decide")],
    coverage: Annotated[
        float,
        typer.Option("--coverage", show_default=False, help="of prediction sets (default 0.9)"),
    ] = 0.9,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON to write (default: in the run directory)")
    ] = None,
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
) -> None:
    from server_app.predict.calibration import calibrate, calibration_path

    found = calibrate(run_dir, site, coverage, out, data_dir, state_dir)
    print(*found.lines(coverage), str(out or calibration_path(run_dir, site)), sep="\n")
