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

    All other pictures of the run are drawn again too: its survival curves, and any that its method
    adds. Pictures in the run directory are replaced. Each is written as a PNG and as a PDF.

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

    The patient is row ``row`` of the site's ``split``. A new patient is row ``row`` of the file
    ``table``, or the image file ``image``. The form of the explanation depends on the model:

    - PICSR, which mixes the sites' networks: the weight of each network.
    - Any other model of tables: the Shapley values of the columns.
    - Any other model of images: a map over the image.

    Returns:
        The explanation. ``lines()`` has its text, ``document()`` its JSON and ``figure()`` its
        picture.

    Raises:
        FedsiloError: ``table`` and ``image`` are both given, the row does not exist, the run does
            not predict classes, or the run or the new case cannot be opened.
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

    A picture shows a site's images with the attention of all layers together (attention rollout).
    For each class, it has the ``images`` images with the most certain predictions. Without
    ``site``, all sites of the run are drawn. Without ``pictures``, the files are written to the run
    directory.

    Yields:
        For each site the path of its picture, ``attention-<site>.png``. If the site has no images
        in the split, a line of text is yielded for it.

    Raises:
        FedsiloError: ``images`` is below 1, the run has not ended or does not predict classes, the
            network is not a ViT, a site is unknown, or its data cannot be opened.
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

    Images are ranked by their Dice score, which is the mean over the classes in the true or the
    predicted mask. Each chosen image is shown with the outlines of both masks. Without ``site``,
    all sites of the run are drawn. Without ``pictures``, the files are written to the run
    directory. These files contain patients' images.

    Yields:
        For each site the path of its picture, ``overlays-<site>.png``. If all true and predicted
        masks of the split are empty, a line of text is yielded for the site.

    Raises:
        FedsiloError: the run has not ended, its task is not segmentation, a site is unknown, or its
            data cannot be opened.
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

    Args:
        path: the picture's file.
        sheet: the picture; None if the site has no images for it.
        lacking: the line of text to return if ``sheet`` is None.
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

    The picture has two panels with a line for each site. The left panel shows the histogram of the
    stored pixels. The right panel shows the histogram of the same images after preprocessing for
    the network. Background pixels are left out. For each site without images in the split, ``tell``
    is called with a line of text.

    Returns:
        The path of the picture, by default ``histograms.png`` in the run directory.

    Raises:
        FedsiloError: the run or its data cannot be opened, the data are a table, the data have
            changed since the run, or no site has images in the split.
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
    which t-SNE places every sample as a point in the plane. The panel also shows how well
    classifiers predict a sample's site (accuracy) and its class (AUC) from the embedding. For each
    site without samples in the split, ``tell`` is called with a line of text.

    Yields:
        For each run, a text with the path of ``embeddings.json`` in its directory, the accuracy and
        the AUC. Then the path of the picture, by default ``embeddings.png`` in the first run's
        directory. Last, the path of the CSV file if ``csv`` is given.

    Raises:
        FedsiloError: no run is named, ``state_dir`` is given for several runs or sites, or another
            argument is out of range. Also raised if a run has not ended, does not predict classes,
            has fewer than four samples, or has a mixture of several networks as its model.
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
    instead is the largest number of images per class in each of four scenarios:

    - all runs are right
    - no run is right
    - only the first run is right
    - the second run is right, and the first is not

    By default, the picture is ``gradcam-<site>.png`` in the first run's directory.

    Returns:
        The path of the picture.

    Raises:
        FedsiloError: not exactly one of ``rows`` and ``scenarios`` is given, ``scenarios`` is given
            for a single run, a row or the class does not exist, no image fits a scenario, a run's
            network is not convolutional, or the runs have different images.
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

    The content depends on ``reader``:

    - 'research': settings, curves, tests and cost.
    - 'clinic': hits and misses by class. ``by`` and ``decisions`` belong here. They need the sites'
      data on this machine.
    - 'dpo': the data that left each site. ``audit_log`` and ``site_file`` belong here.

    Returns:
        A list with the path of the HTML file.

    Raises:
        FedsiloError: no run is named, an option belongs to another ``reader``, a run cannot be
            read, or the file exists and ``overwrite`` is False.
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
