"""The commands that draw and explain finished runs where their data lie: options only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.cli.options import (
    LOOK,
    USE,
    RunDirArgument,
    RunDirsArgument,
    RunsDataDirOption,
    RunsStateDirOption,
    SitesOption,
    Split,
    example,
    refuse_below,
)

Layer = Literal["embedding", "penultimate"]

SplitOption = Annotated[Split, typer.Option("--split", show_default=False, help="(default test)")]
_PICTURE = "PNG to write (default: {})"


def add_commands(app: typer.Typer) -> None:
    """Add ``plot``, ``explain``, ``attention``, ``histograms``, ``embeddings`` and ``gradcam``."""
    app.command(
        help="draw the learning curves of a finished run again",
        epilog=example("plot runs/uefl-digits"),
        rich_help_panel=LOOK,
    )(plot)
    app.command(
        help="why a run's model answers so for one patient",
        epilog=example("explain runs/hearts --site va --row 0"),
        rich_help_panel=USE,
    )(explain)
    app.command(
        help="draw where a run's ViT looked, per site",
        epilog=example("attention runs/skin --site rosendahl --images 3"),
        rich_help_panel=LOOK,
    )(attention)
    app.command(
        help="draw how sites' images differ in brightness",
        epilog=example("histograms runs/mammograms --split train"),
        rich_help_panel=LOOK,
    )(histograms)
    app.command(
        help="draw what models make of all sites' samples",
        epilog=example("embeddings runs/fedavg runs/moon --limit 200"),
        rich_help_panel=LOOK,
    )(embeddings)
    app.command(
        help="draw where convolutional networks find a class",
        epilog=example("gradcam runs/fedavg --site s1a --rows 0,3,7"),
        rich_help_panel=LOOK,
    )(gradcam)


def plot(run_dir: RunDirArgument) -> None:
    """Draw a run's pictures; print the place of each."""
    from fedsilo.server_app.studies.figures.learning_curves import redraw

    for path in redraw(run_dir):
        print(path)


def explain(
    run_dir: RunDirArgument,
    site: Annotated[str, typer.Option(help="the patient's site")],
    row: Annotated[int, typer.Option(help="row of the split, from 0")],
    split: SplitOption = "test",
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
    json: Annotated[
        Path | None, typer.Option("--json-file", "--json", help="also write it as JSON")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="also draw it as PNG")] = None,
) -> None:
    """Print the explanation; write it as JSON or picture where that is asked for."""
    from fedsilo.server_app.studies.figures import explain as explaining

    explanation = explaining.explain(run_dir, site, row, split, data_dir, state_dir)
    print("\n".join(explanation.lines()))
    explaining.save_explanation(explanation, document=json, picture=picture)


def attention(
    run_dir: RunDirArgument,
    site: SitesOption,
    split: SplitOption = "test",
    images: Annotated[
        int, typer.Option(show_default=False, help="images per class (default 5)")
    ] = 5,
    data_dir: RunsDataDirOption = None,
    state_dir: RunsStateDirOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--pictures", "--out", help="folder of the pictures (default: the run's)"),
    ] = None,
) -> None:
    """Draw a sheet per site; print the place of each."""
    from fedsilo.server_app.studies.figures.attention import attention as drawn_sites

    refuse_below(1, "images", images)
    chosen: list[str | None] = [*site] or [None]
    for one in chosen:
        for sheet in drawn_sites(run_dir, one, split, images, data_dir, state_dir, out):
            print(sheet.path or f"site {sheet.site} has no {split} images")


def histograms(
    run_dir: RunDirArgument,
    site: SitesOption,
    split: Annotated[
        Split, typer.Option("--split", show_default=False, help="(default train)")
    ] = "train",
    picture: Annotated[
        Path | None, typer.Option(help=_PICTURE.format("RUN-DIR/histograms.png"))
    ] = None,
    data_dir: RunsDataDirOption = None,
) -> None:
    """Draw the histograms of a run's sites; print the picture's place."""
    from fedsilo.server_app.studies.figures import intensity_histograms
    from fedsilo.server_app.studies.figures.learning_curves import write_picture

    measured = intensity_histograms.histograms(run_dir, site, split, data_dir)
    path = picture or run_dir / "histograms.png"
    write_picture(path, intensity_histograms.draw_histograms(measured))
    print(path)


def embeddings(
    run_dirs: RunDirsArgument,
    site: SitesOption,
    split: SplitOption = "test",
    picture: Annotated[
        Path | None, typer.Option(help=_PICTURE.format("embeddings.png of the first run"))
    ] = None,
    data_dir: RunsDataDirOption = None,
    layer: Annotated[Layer, typer.Option(show_default=False, help="(default embedding)")] = (
        "embedding"
    ),
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="samples a site (default: all)")
    ] = None,
    seed: Annotated[
        int, typer.Option(show_default=False, help="of t-SNE and folds (default 0)")
    ] = 0,
    state_dir: RunsStateDirOption = None,
    csv: Annotated[Path | None, typer.Option(help="also write the numbers as CSV")] = None,
) -> None:
    """Write a file of points per run and draw all of them; print their places and the numbers."""
    import pandas as pd

    from fedsilo.datasets.io.atomic_files import write_atomically
    from fedsilo.server_app.studies.compare.tables import csv_text
    from fedsilo.server_app.studies.figures import embeddings as embedding
    from fedsilo.server_app.studies.figures.embedding_panels import draw_panels
    from fedsilo.server_app.studies.figures.learning_curves import write_picture

    if limit is not None:
        refuse_below(1, "limit", limit)
    selection = embedding.Selection(site, split, layer, limit, seed)
    panels = embedding.embeddings(run_dirs, selection, data_dir, state_dir)
    for run_dir, panel in zip(run_dirs, panels, strict=True):
        print(embedding.write_document(run_dir, panel, selection), *panel.lines(), sep="\n  ")
    path = picture or run_dirs[0] / "embeddings.png"
    write_picture(path, draw_panels(panels, f"{split} samples, {layer} layer"))
    print(path)
    if csv:
        numbers = [panel.numbers for panel in panels]
        rows = [{"run": run.name} | found for run, found in zip(run_dirs, numbers, strict=True)]
        write_atomically(csv, csv_text(pd.DataFrame(rows)))
        print(csv)


def gradcam(
    run_dirs: RunDirsArgument,
    site: Annotated[str, typer.Option(help="the images' site")],
    rows: Annotated[str, typer.Option(help="rows of the split, from 0, as 0,3,7")] = "",
    scenarios: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=20,
            help="instead of --rows: so many images of each class that all runs, none, the first "
            "alone, or the second and not the first are right about",
        ),
    ] = None,
    split: SplitOption = "test",
    picture: Annotated[
        Path | None, typer.Option(help=_PICTURE.format("gradcam-SITE.png of the first run"))
    ] = None,
    data_dir: RunsDataDirOption = None,
    label: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="(default: what each network says)"),
    ] = None,
    state_dir: RunsStateDirOption = None,
) -> None:
    """Draw the sheet; print its place."""
    from fedsilo.server_app.studies.figures import gradcam as grad_cam
    from fedsilo.server_app.studies.figures.learning_curves import write_picture

    if bool(rows) == (scenarios is not None):
        raise SettingError("name images by --rows or by --scenarios, one of the two")
    wanted = grad_cam.Scenarios(scenarios) if scenarios else parse_rows(rows)
    sheet = grad_cam.gradcam(run_dirs, site, wanted, split, label, data_dir, state_dir)
    path = picture or run_dirs[0] / f"gradcam-{site}.png"
    write_picture(path, grad_cam.draw_sheet(sheet))
    print(path)


def parse_rows(text: str) -> list[int]:
    """Return the rows of ``--rows``, as '0,3,7'.

    Raises:
        SettingError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(f"--rows is '{text}'; it must be rows counted from 0, such as 0,3,7")
    return [int(part) for part in parts]
