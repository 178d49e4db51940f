"""What a finished run's model is put to: ``predict``, ``calibrate``, ``export``, ``card``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsilo.server_app.cli.options import (
    USE,
    RunDirArgument,
    RunsDataDirOption,
    RunsStateDirOption,
    Split,
    example,
)

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
    """Add ``predict``, ``calibrate``, ``export`` and ``card``."""
    app.command(
        "predict",
        help="predict new cases with a finished run's model",
        epilog=example("predict runs/skin --images new --out new.csv"),
        rich_help_panel=USE,
    )(_predict)
    app.command(
        "calibrate",
        help="fit how sure a run's model may be at a site",
        epilog=example("calibrate runs/heart --site va --coverage 0.9"),
        rich_help_panel=USE,
    )(_calibrate)
    app.command(
        "export",
        help="write a run's model as a program that needs no fedsilo",
        epilog=example("export runs/heart --format pt2 --out heart-model"),
        rich_help_panel=USE,
    )(_export)
    app.command(
        "card",
        help="write the model card of a run",
        epilog=example("card runs/heart"),
        rich_help_panel=USE,
    )(_card)


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
    from fedsilo.server_app.cli.printing import progress_bar
    from fedsilo.server_app.studies.predict.masks import is_finetuned, predict_masks
    from fedsilo.server_app.studies.predict.prediction import predict
    from fedsilo.server_app.studies.predict.request import PredictRequest

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
        if is_finetuned(run_dir):
            lines = predict_masks(request, watch).lines()
        else:
            lines = [*predict(request, watch).lines(), str(out)]
    print(*lines, sep="\n")


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
    from fedsilo.server_app.studies.predict.calibration import calibrate, calibration_path

    found = calibrate(run_dir, site, coverage, out, data_dir, state_dir)
    print(*found.lines(coverage), str(out or calibration_path(run_dir, site)), sep="\n")


def _export(
    run_dir: RunDirArgument,
    *,
    form: Annotated[
        Literal["pt2", "onnx", "monai"],
        typer.Option("--format", show_default=False, help="(default pt2, torch.export's)"),
    ] = "pt2",
    site: _Site = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder to write (default: in the run directory)")
    ] = None,
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
) -> None:
    from fedsilo.server_app.studies.export.command import export

    print(*export(run_dir, form, site, out, data_dir, state_dir).lines(), sep="\n")


def _card(
    run_dir: RunDirArgument,
    *,
    site: Annotated[str | None, typer.Option("--site", help="of this site's own model")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="(default: model-card.md in the run directory)")
    ] = None,
) -> None:
    from fedsilo.server_app.studies.export.card import card

    path = out or run_dir / "model-card.md"
    card(run_dir, site, path)
    print(path)
