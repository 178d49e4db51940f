"""Draws pictures and writes pages about finished runs, and explains predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedsilo.api import options
from fedsilo.core.arguments import (
    AnyPath,
    AnyRun,
    Tell,
    folder_of,
    folders_of,
    path_of,
    plugin_texts,
    refuse_below,
    several,
    silent,
)
from fedsilo.core.errors import SettingError
from fedsilo.core.files.site_names import folder_name
from fedsilo.server_app.config.trusted_plugins import name_plugins

RunPicture = Annotated[
    options.MaybePath,
    "picture to write: .png, .svg or .pdf (default: a PNG in the first run directory)",
]
_LARGEST_SEED = 2**32 - 1  # scikit-learn refuses larger ones

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsilo.explanations.sample import Explanation
    from fedsilo.reports.clinic import Examination
    from fedsilo.runs.finished_run import Shown


@options.command
def plot(run_dir: options.RunDir) -> Iterator[Path]:
    """Draw the learning curves of a finished run again.

    All other pictures of the run, such as survival curves, are drawn again too. Each is written as
    PNG and PDF, and replaces the earlier file.

    Yields:
        The path of each picture file.

    Raises:
        RunDirectoryError: the run has not ended, or one of its files cannot be read.
    """
    from fedsilo.pictures.learning_curves import draw_run
    from fedsilo.server_app.records.run_directory import RunDirectory

    return draw_run(RunDirectory(folder_of(run_dir)))


@options.command
def explain(
    run_dir: options.RunDir,
    *,
    site: Annotated[str, "the site of the patient"],
    row: Annotated[int, "row of the split or of --table, counted from 0"] = 0,
    split: options.SplitOfSamples = "test",
    table: Annotated[options.MaybePath, "a new case: a row of a CSV, Excel or Parquet file"] = None,
    image: Annotated[options.MaybePath, "a new case: an image file"] = None,
    data_dir: options.DataDir = None,
    state_dir: options.StateDir = None,
    json_file: Annotated[options.MaybePath, "also write the explanation as JSON"] = None,
    picture: Annotated[options.MaybePath, "also draw the explanation (.png, .svg or .pdf)"] = None,
    plugin: options.OwnPlugin = None,
) -> Explanation:
    """Explain a model's prediction for one patient.

    The patient is row ``row`` of the site's ``split``. A new patient is row ``row`` of ``table``,
    or the picture ``image``. The model decides what is shown, such as Shapley values of columns, or
    a map over an image.

    Returns:
        The explanation.

    Raises:
        FedsiloError: the patient or the run cannot be used.
    """
    from fedsilo.core.files.atomic_files import write_atomically
    from fedsilo.explanations.sample import explain_sample
    from fedsilo.pictures.picture_files import picture_path, write_picture
    from fedsilo.runs.finished_run import FinishedRun

    drawing = picture_path(picture)
    name_plugins(plugin_texts(plugin))
    if table is not None and image is not None:
        raise SettingError(
            "an explanation is for one case, but --table and --image are given: remove one"
        )
    run = FinishedRun.open(folder_of(run_dir))
    run.require_classes("explain")
    if table is None and image is None:
        lab = run.lab(site, path_of(data_dir), path_of(state_dir), split=split)
        explanation = explain_sample(lab, split, row)
    else:
        # A new case needs only the model, but no rows of the site
        from fedsilo.inference.predict.case_details import explain_new_case

        model = run.model(site, data_dir=data_dir, state_dir=state_dir)
        explanation = explain_new_case(model, path_of(table), row, path_of(image))
    if json_file:
        write_atomically(Path(json_file), json.dumps(explanation.document(), indent=2) + "\n")
    if drawing is not None:
        write_picture(drawing, explanation.figure())
    return explanation


@options.command
def attention(
    run_dir: options.RunDir,
    *,
    site: options.Sites = (),
    split: options.SplitOfSamples = "test",
    images: Annotated[int, "images per class"] = 5,
    data_dir: options.DataDir = None,
    state_dir: options.StateDir = None,
    pictures: Annotated[options.MaybePath, "folder of the pictures (default: the run's)"] = None,
    plugin: options.OwnPlugin = None,
) -> Iterator[Path | str]:
    """Draw the attention of a run's ViT, in one picture for each site.

    A picture has, for each class, the ``images`` images with the most certain predictions. It shows
    the attention of all layers together.

    Yields:
        For each site the path of its picture, or a text if it has no images.

    Raises:
        FedsiloError: an argument is wrong, or the run has no ViT.
    """
    from fedsilo.explanations.attention import attention_sheet
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    refuse_below(1, "images", images)
    run = FinishedRun.open(folder_of(run_dir))
    run.require_classes("attention")
    folder, data, state = path_of(pictures) or run.path, path_of(data_dir), path_of(state_dir)
    for name in several(site) or run.silos:
        lab = run.lab(name, data, state, split=split)
        sheet = attention_sheet(lab, split, images)
        path = folder / f"attention-{folder_name(name)}.png"
        yield _write_sheet(path, sheet, f"site {name} has no {split} images")


@options.command
def overlays(
    run_dir: options.RunDir,
    *,
    site: options.Sites = (),
    split: options.SplitOfSamples = "test",
    data_dir: options.DataDir = None,
    state_dir: options.StateDir = None,
    pictures: Annotated[options.MaybePath, "folder of the pictures (default: the run's)"] = None,
    plugin: options.OwnPlugin = None,
) -> Iterator[Path | str]:
    """Draw the best, the median and the worst segmented image of each site.

    Images are ranked by Dice score, and show the outlines of the true and the predicted mask. These
    pictures contain patients' images.

    Yields:
        For each site the path of its picture, or a text if all masks are empty.

    Raises:
        FedsiloError: the run cannot be used.
    """
    from fedsilo.explanations.mask_overlays import overlay_sheet
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    run = FinishedRun.open(folder_of(run_dir))
    folder, data, state = path_of(pictures) or run.path, path_of(data_dir), path_of(state_dir)
    for name in several(site) or run.silos:
        sheet = overlay_sheet(run.lab(name, data, state, split=split), split)
        path = folder / f"overlays-{folder_name(name)}.png"
        lacking = f"site {name} has no {split} images with anything to mark"
        yield _write_sheet(path, sheet, lacking)


def _write_sheet(path: Path, sheet: Figure | None, lacking: str) -> Path | str:
    """Write a site's picture and return its path, or return a line of text if there is none.

    ``sheet`` is None if the site has no images for it. The result is then ``lacking``.
    """
    from fedsilo.pictures.picture_files import write_picture

    if sheet is None:
        return lacking
    write_picture(path, sheet)
    return path


@options.command
def histograms(
    run_dir: options.RunDir,
    *,
    site: options.Sites = (),
    split: options.SplitOfSamples = "train",
    picture: RunPicture = None,
    data_dir: options.DataDir = None,
    plugin: options.OwnPlugin = None,
    tell: Tell = silent,
) -> Path:
    """Draw the brightness of images at each site.

    The left panel has the histogram of the stored pixels, and the right one that after
    preprocessing. Background pixels are left out. ``tell`` gets a line for each site without
    images.

    Returns:
        The path of the picture.

    Raises:
        FedsiloError: the run or its data cannot be used, or no site has images.
    """
    from fedsilo.explanations import intensity_histograms as intensity
    from fedsilo.pictures.picture_files import picture_path, write_picture
    from fedsilo.runs.finished_run import FinishedRun

    drawing = picture_path(picture)
    name_plugins(plugin_texts(plugin))
    run = FinishedRun.open(folder_of(run_dir))
    common = run.local_settings(path_of(data_dir)).common
    # Histograms need the images but no network, so the sites' private states are not opened
    silos = intensity.open_silos(run, common, run.chosen_sites(several(site)), split)
    for name, silo in silos.items():
        if not len(silo.splits()[split]):
            tell(f"site {name} has no {split} images")
    measured = intensity.site_histograms(common.dataset, silos, split)
    path = drawing or run.path / "histograms.png"
    write_picture(path, intensity.draw_histograms(measured))
    return path


@options.command
def embeddings(
    run_dirs: options.RunDirs,
    *,
    site: options.Sites = (),
    split: options.SplitOfSamples = "test",
    picture: RunPicture = None,
    data_dir: options.DataDir = None,
    layer: Annotated[options.Layer, "the layer whose output is drawn"] = "embedding",
    limit: Annotated[
        int | None, options.Option("samples per site (default: all)", value="N")
    ] = None,
    seed: Annotated[int, "seed of t-SNE and of the folds"] = 0,
    state_dir: options.StateDir = None,
    csv: Annotated[options.MaybePath, "also write the numbers as CSV"] = None,
    plugin: options.OwnPlugin = None,
    tell: Tell = silent,
) -> Iterator[Path | str]:
    """Draw the embeddings of all sites' samples.

    An embedding is a sample's values at a layer of its site's network. Each run gets a panel, in
    which t-SNE places every sample in the plane.

    Yields:
        For each run, a text with its numbers. Then the path of the picture, and of any CSV file.

    Raises:
        FedsiloError: an argument or a run cannot be used.
    """
    import pandas as pd

    from fedsilo.comparison.tables import csv_text
    from fedsilo.core.files.atomic_files import write_atomically
    from fedsilo.explanations import embedding_pictures as embedding
    from fedsilo.pictures.panel_grids import refuse_shared_state
    from fedsilo.pictures.picture_files import picture_path, write_picture
    from fedsilo.runs.finished_run import FinishedRun
    from fedsilo.server_app.records.run_directory import RunDirectory

    drawing = picture_path(picture)
    name_plugins(plugin_texts(plugin))
    refuse_below(1, "limit", limit)
    if not 0 <= seed <= _LARGEST_SEED:
        raise SettingError(f"--seed must be from 0 to {_LARGEST_SEED}, but is {seed}")
    data, state = path_of(data_dir), path_of(state_dir)
    # All runs are opened first: an unfinished one ends the command before the long computation
    folders = _named_folders(run_dirs)
    refuse_shared_state(state, folders, 1)
    runs = [FinishedRun.open(folder) for folder in folders]
    for run in runs:
        run.require_classes("embeddings")
    selection = embedding.Selection(several(site), split, layer, limit, seed)
    panels = [embedding.embed_run(run, selection, data, state, tell) for run in runs]
    rows = []
    # Nothing is written before all runs are embedded, so an error leaves no partial result
    for run, panel in zip(runs, panels, strict=True):
        document = embedding.document(panel, selection)
        RunDirectory(run.path).write_json("embeddings.json", document)
        yield "\n  ".join([str(run.path / "embeddings.json"), *panel.lines()])
        rows.append({"run": run.path.name} | panel.numbers)
    path = drawing or runs[0].path / "embeddings.png"
    write_picture(path, embedding.draw_panels(panels, f"{split} samples, {layer} layer"))
    yield path
    if csv:
        write_atomically(Path(csv), csv_text(pd.DataFrame(rows)))
        yield Path(csv)


@options.command
def gradcam(
    run_dirs: options.RunDirs,
    *,
    site: Annotated[str, "the site of the images"],
    rows: Annotated[str, "rows of the split, counted from 0, as 0,3,7"] = "",
    scenarios: Annotated[
        int | None,
        "instead of --rows: this many images per class that all runs, no run, only the first "
        "run, or the second but not the first run predict correctly",
    ] = None,
    split: options.SplitOfSamples = "test",
    picture: RunPicture = None,
    data_dir: options.DataDir = None,
    label: Annotated[
        str | None,
        options.Option(
            "the class (default: each network's prediction)", name="--class", value="NAME"
        ),
    ] = None,
    state_dir: options.StateDir = None,
    plugin: options.OwnPlugin = None,
) -> Path:
    """Draw the image regions by which convolutional networks find a class (Grad-CAM).

    The picture has a row per image and a column per run. ``rows`` names the images. ``scenarios``
    instead chooses images by which runs are right, up to this number per class and scenario.

    Returns:
        The path of the picture.

    Raises:
        FedsiloError: an argument or a run cannot be used.
    """
    from fedsilo.explanations import gradcam_pictures as grad_cam
    from fedsilo.pictures.panel_grids import refuse_shared_state
    from fedsilo.pictures.picture_files import picture_path, write_picture
    from fedsilo.runs.finished_run import FinishedRun

    drawing = picture_path(picture)
    name_plugins(plugin_texts(plugin))
    # Equal if both options are given, or if both are missing
    if bool(rows) == (scenarios is not None):
        raise SettingError("choose images either by --rows or by --scenarios")
    refuse_below(1, "scenarios", scenarios)
    chosen = []
    if rows:
        chosen = [(row, "") for row in parse_rows(rows)]
    folders, state = _named_folders(run_dirs), path_of(state_dir)
    refuse_shared_state(state, folders, 1)
    if scenarios and len(folders) < 2:
        raise SettingError("--scenarios compares runs by which is right: name two runs or more")
    # All runs are opened first: an unfinished one ends the command before the long computation
    runs = [FinishedRun.open(folder) for folder in folders]
    for run in runs:
        run.require_classes("gradcam")
    opened = grad_cam.open_networks(runs, site, split, path_of(data_dir), state)
    if scenarios:
        chosen = grad_cam.choose_by_scenario(opened, scenarios, split)
    sheet = grad_cam.gradcam_sheet(opened, chosen, split, label)
    path = drawing or folders[0] / f"gradcam-{folder_name(site)}.png"
    write_picture(path, grad_cam.draw_sheet(sheet))
    return path


@options.command
def report(
    run_dirs: Annotated[Sequence[AnyRun], "run directories, or folders with run directories"],
    out: Annotated[AnyPath, options.Option("HTML file to write", name="--out")] = "report.html",
    *,
    reader: Annotated[
        options.Reader,
        options.Option(
            "research: settings, curves, tests, cost; clinic: hits and misses by class; dpo: "
            "the data that left each site",
            name="--for",
        ),
    ] = "research",
    audit_log: Annotated[options.MaybePath, "for dpo: the hospital's own audit log"] = None,
    site_file: Annotated[options.MaybePath, "for dpo: the hospital's own site file"] = None,
    overwrite: Annotated[bool, "replace an existing file"] = False,
    by: Annotated[
        Sequence[str],
        "for clinic, on a machine with the data: results by this column, such as age; may be "
        "repeated",
    ] = (),
    decisions: Annotated[
        bool, "for clinic, on a machine with the data: the decision curve of two classes"
    ] = False,
    data_dir: options.DataDir = None,
    plugin: options.OwnPlugin = None,
) -> list[Path]:
    """Write a page about finished runs.

    For the ``reader`` 'research' it has settings, curves, tests and cost. For 'clinic' it has hits
    and misses by class. For 'dpo' it has the data that left each site.

    Returns:
        A list with the path of the HTML file.

    Raises:
        FedsiloError: an option belongs to another ``reader``, a run cannot be read, or the file
            exists.
    """
    from fedsilo.pages.page import write_page
    from fedsilo.reports import report as reports

    for option, file in (("audit-log", audit_log), ("site-file", site_file)):
        if file and reader != "dpo":
            raise SettingError(f"--{option} belongs to a report '--for dpo': leave it out")
    if (by or decisions) and reader != "clinic":
        raise SettingError("--by and --decisions belong to a report '--for clinic'")
    name_plugins(plugin_texts(plugin))
    runs = _named_folders(run_dirs)

    # Reports cannot predict, so they get this function if the test samples must be predicted
    def examine_run(run: Shown) -> Sequence[Examination]:
        from fedsilo.inference.monitor.examined import examine

        return examine(run, several(by), decisions, path_of(data_dir))

    def build() -> str:
        return reports.report(
            runs,
            reader,
            examine=examine_run if by or decisions else None,
            audit_log=path_of(audit_log),
            site_file=path_of(site_file),
        )

    return [write_page(Path(out), build, overwrite=overwrite)]


def _named_folders(run_dirs: Sequence[AnyRun]) -> list[Path]:
    """Convert the runs that a command names to the paths of their directories, in the given order.

    Whether the directories exist is not checked.

    Raises:
        SettingError: no run is named.
    """
    folders = folders_of(run_dirs)
    if not folders:
        raise SettingError("no run is named: name at least one run directory")
    return folders


def parse_rows(text: str) -> list[int]:
    """Parse the value of ``--rows``, such as '0,3,7', into row numbers.

    Rows are counted from 0 and keep the given order. Duplicates are kept. Spaces around a number
    are ignored.

    Raises:
        SettingError: a part between commas is empty or is not a whole number of 0 or more.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(
            f"--rows must be row numbers counted from 0, such as 0,3,7, but is '{text}'"
        )
    return [int(part) for part in parts]
