"""Applies the model of a finished run: fine-tune, predict, calibrate, monitor, export, card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from fedsilo.api import options
from fedsilo.core.arguments import (
    AnyPath,
    Settings,
    Tell,
    Watch,
    folder_of,
    path_of,
    plugin_texts,
    refuse_below,
    refuse_target,
    several,
    silent,
    texts_of,
)
from fedsilo.core.errors import DataError
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.tasks import SEGMENTATION
from fedsilo.server_app.config.trusted_plugins import name_plugins

if TYPE_CHECKING:
    from fedsilo.finetuning.finetune_results import FinetuneResult
    from fedsilo.inference.export.export import Export
    from fedsilo.inference.monitor.monitor import Monitored
    from fedsilo.inference.predict.answers import Predictions
    from fedsilo.inference.predict.calibration import Calibration
    from fedsilo.inference.predict.predicted_masks import MaskPredictions
    from fedsilo.runs.finished_run import FinishedRun


# Parameters with a long help; those that several commands have are in ``options``
StartingPoints = Annotated[
    Sequence[str],
    "a starting point: a run directory, scratch, a ViT's file, or timm:NAME; may be repeated for "
    "a table with a row for each",
]
TrainedNetwork = Annotated[
    str | None,
    "segmentation: unet, vit, swin, transunet, swinunet; classification: conv, vgg16-bn, "
    "resnet22, vit (default: the one that takes the run's weights)",
]
TrainingSettings = Annotated[
    Settings | None,
    options.Option(
        "a setting of data, network or training that replaces the run's",
        name="--set",
        value="KEY=VALUE",
    ),
]

PredictionsFile = Annotated[
    options.MaybePath,
    options.Option("CSV file to write, with a JSON file next to it; must not exist", required=True),
]
CasesTable = Annotated[
    options.MaybePath,
    "predict the rows of a CSV, Excel or Parquet file; columns by name, in any order",
]
SetCoverage = Annotated[
    float | None, "also give prediction sets of this coverage; needs 'calibrate'"
]
CasesPage = Annotated[
    options.MaybePath, "also write a page of the cases, the most doubtful first; must not exist"
]
BestRound = Annotated[
    bool, "use the model of the best round ('server.early-stopping-metric'), not of the last"
]


@options.command
def finetune(
    *,
    task: Annotated[Literal["classification", "segmentation"], "the task to learn"],
    weights: StartingPoints,
    out: Annotated[AnyPath, "folder to write; must not exist"],
    dataset: Annotated[str | None, "the data set (default: the first run's)"] = None,
    site: options.Sites = (),
    network: TrainedNetwork = None,
    epochs: Annotated[int, "passes over the training data"] = 20,
    seeds: Annotated[int, "number of seeds"] = 3,
    distil_epochs: Annotated[
        int, "epochs in which unet, swin or swinunet first learns the tokens of a run's ViT"
    ] = 0,
    settings: TrainingSettings = None,
    device: Annotated[str | None, "auto, cpu, cuda or cuda:N (default: auto)"] = None,
    data_dir: options.DataDir = None,
    from_site: Annotated[
        str | None, options.Option("start from a site's own model of the run", value="SITE")
    ] = None,
    state_dir: options.StateDir = None,
    images: Annotated[int, "test images to draw"] = 4,
    plugin: options.OwnPlugin = None,
    tell: Tell = silent,
) -> FinetuneResult:
    """Fine-tune a finished run's model for a task.

    Each entry of ``weights`` is a run directory, a file of a ViT's weights, 'timm:NAME', or
    'scratch' for random weights. From each, one network per seed is trained on all sites' images.

    Returns:
        The study, and a result per entry.

    Raises:
        FedsiloError: an argument is wrong, ``out`` exists, or training diverged.
    """
    from fedsilo.finetuning.finetune import open_study, train_starts
    from fedsilo.finetuning.finetune_request import check_starts, open_starts
    from fedsilo.finetuning.finetune_settings import build_settings, choose_network, read_changes

    name_plugins(plugin_texts(plugin))
    for option, number in {"seeds": seeds, "epochs": epochs, "images": images}.items():
        refuse_below(1, option, number)
    refuse_below(0, "distil-epochs", distil_epochs)
    # Cheap checks first: opening the starting points may read large files
    names, folder, data = several(weights), Path(out), path_of(data_dir)
    check_starts(names, from_site)
    refuse_target(folder, "another --out")
    starts = open_starts(names, data, from_site, path_of(state_dir))
    # The weights decide the network, the network decides which settings are inherited
    chosen = choose_network(task, network, starts.sources, distil=distil_epochs > 0)
    changes = read_changes(texts_of(settings), device, data)
    common = build_settings(task, chosen, starts.run_models, dataset, changes)
    study = open_study(task, chosen, common, several(site), seeds, epochs, distil_epochs)
    return train_starts(study, starts, folder, images, tell)


@options.command
def predict(
    run_dir: options.RunDir,
    *,
    out: PredictionsFile = None,
    site: options.ModelSite = None,
    images: Annotated[options.MaybePath, "predict the image files in this folder"] = None,
    manifest: Annotated[
        options.MaybePath, "predict the files in the column 'path' of this table"
    ] = None,
    table: CasesTable = None,
    id: Annotated[str | None, "the table's column with the patients' ids"] = None,
    split: Annotated[options.Split | None, "predict this split of the site"] = None,
    coverage: SetCoverage = None,
    calibration: options.CalibrationFile = None,
    answer_all: Annotated[bool, "also answer cases that are unlike the training samples"] = False,
    html: CasesPage = None,
    data_dir: options.DataDir = None,
    state_dir: options.StateDir = None,
    best: BestRound = False,
    plugin: options.OwnPlugin = None,
    watch: Watch = lambda done, total: None,
) -> Predictions | MaskPredictions:
    """Predict new cases with a finished run's model.

    Give exactly one of ``images``, ``manifest``, ``table`` and ``split``. A case unlike the
    training samples gets no answer, unless ``answer_all`` is set. Masks of a segmentation are
    written to ``out``.

    Returns:
        The predictions, or a ``MaskPredictions`` for segmentation.

    Raises:
        FedsiloError: an option does not apply, or a file cannot be used.
    """
    from fedsilo.inference.predict import predicted_masks as masks
    from fedsilo.inference.predict import prediction
    from fedsilo.inference.predict.calibration import check_coverage, open_calibration
    from fedsilo.inference.predict.inputs import choose_source, open_inputs
    from fedsilo.inference.predict.novelty_reference import reference_of
    from fedsilo.inference.predict.run_masks import predict_run_masks
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    folder, written, page = folder_of(run_dir), path_of(out), path_of(html)
    files = {"images": path_of(images), "manifest": path_of(manifest), "table": path_of(table)}
    source = choose_source(id, **files, split=split)
    of_classes = {"coverage": coverage, "calibration": calibration}
    # Options for sites, calibration and rounds do not apply to a fine-tuned segmentation model
    if masks.is_finetuned(folder):
        others = {"site": site, "state-dir": state_dir, "answer-all": answer_all, "best": best}
        masks.refuse_options(folder, {**of_classes, **others, "html": html})
        return masks.predict_masks(folder, source, written, path_of(data_dir), watch)
    check_coverage(coverage)
    run = FinishedRun.open(folder)
    if run.settings.common.task == SEGMENTATION:
        # Options for class probabilities and for novelty do not apply to masks
        masks.refuse_options(folder, {**of_classes, "answer-all": answer_all})
        model = run.model(site, data_dir=data_dir, state_dir=state_dir, best=best)
        return predict_run_masks(run, model, source, written, page, watch)
    _refuse_without_classes(run, of_classes)
    prediction.check_outputs(written, page)
    model = run.model(site, data_dir=data_dir, state_dir=state_dir, best=best)
    calibrated = None
    if coverage is not None or calibration is not None:
        calibrated = open_calibration(model, path_of(calibration))
    # The reference describes the training samples, so that unlike cases can be left unanswered
    inputs, reference = open_inputs(model, source), reference_of(model, site)
    found = prediction.predict_inputs(
        model, inputs, calibrated, coverage, reference, answer_all, watch
    )
    prediction.write_predictions(run, model, found, written, page)
    return found


def _refuse_without_classes(run: FinishedRun, of_classes: Mapping[str, object]) -> None:
    """Refuse options of ``predict`` that need classes if the run predicts none.

    ``of_classes`` maps each such option to its value. None means that the option is not given.

    Raises:
        SettingError: an option is given, but the run does not predict classes.
    """
    for name, value in of_classes.items():
        if value is not None:
            run.require_classes(f"predict --{name}")


@options.command
def calibrate(
    run_dir: options.RunDir,
    site: Annotated[str, options.Option("the site whose validation rows are used", name="--site")],
    *,
    coverage: Annotated[float, "coverage of the prediction sets"] = 0.9,
    out: Annotated[options.MaybePath, "JSON file to write (default: in the run directory)"] = None,
    data_dir: options.DataDir = None,
    state_dir: options.StateDir = None,
    plugin: options.OwnPlugin = None,
) -> Calibration:
    """Calibrate a finished run's model at a site.

    The model's logits are divided by a temperature, which is fitted on at least ten validation
    rows. The share ``coverage`` of later prediction sets shall contain the true class.

    Returns:
        The calibration, which is also written to a file.

    Raises:
        FedsiloError: the run or its rows cannot be used, or ``out`` exists.
    """
    from fedsilo.inference.predict.calibration import (
        calibrate_model,
        calibration_path,
        check_coverage,
        write_calibration,
    )
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    run, target = folder_of(run_dir), path_of(out)
    check_coverage(coverage)
    if target is not None:
        refuse_target(target, "another --out")
    finished = FinishedRun.open(run)
    finished.require_classes("calibrate")
    model = finished.model(site, data_dir=data_dir, state_dir=state_dir)
    found = calibrate_model(model, coverage)
    write_calibration(found, target or calibration_path(run, site))
    return found


@options.command
def monitor(
    run_dir: options.RunDir,
    *,
    data: Annotated[
        AnyPath,
        "new cases: a table, a manifest of images, or a folder of images; with labels or without",
    ],
    site: Annotated[
        str | None,
        "the site with the model and the training data to compare with (default: the first)",
    ] = None,
    coverage: Annotated[float, "promised coverage of the prediction sets; needs 'calibrate'"] = 0.9,
    calibration: options.CalibrationFile = None,
    data_dir: options.DataDir = None,
    plugin: options.OwnPlugin = None,
) -> Monitored:
    """Check whether new cases still resemble the training data of a run.

    The features of the new cases are compared with the site's training data. If enough cases have
    labels, the predictions are checked too.

    Returns:
        The checks. ``alarms`` lists those beyond their limit, and ``missing`` those that were not
        possible.

    Raises:
        FedsiloError: ``data``, the run or the calibration cannot be used.
    """
    from fedsilo.inference.monitor.monitor import check_new_cases
    from fedsilo.inference.predict.calibration import check_coverage
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    check_coverage(coverage)
    cases = Path(data)
    if not cases.exists():
        raise DataError(f"{cases} does not exist: name new cases by --data")
    run = FinishedRun.open(folder_of(run_dir))
    model = run.model(site, data_dir=data_dir)
    return check_new_cases(run, model, cases, coverage, path_of(calibration))


@options.command
def export(
    run_dir: options.RunDir,
    form: Annotated[
        Literal["pt2", "onnx"], options.Option("pt2 (torch.export) or onnx", name="--format")
    ] = "pt2",
    *,
    site: options.ModelSite = None,
    out: Annotated[options.MaybePath, "folder to write (default: in the run directory)"] = None,
    data_dir: options.DataDir = None,
    state_dir: options.StateDir = None,
    plugin: options.OwnPlugin = None,
) -> Export:
    """Write a run's model as a program that needs no fedsilo.

    The program's predictions for made-up inputs must agree with fedsilo's to 0.0001. A model card
    and these test inputs are written beside the program.

    Returns:
        The folder, the largest difference of predictions, and the inputs and outputs.

    Raises:
        FedsiloError: the run cannot be exported, predictions differ, or the folder exists.
    """
    from fedsilo.inference.export.export import export_model
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    folder = folder_of(run_dir)
    # Named by format and site, so that several exports of a run fit in its directory
    of_site = f"-{folder_name(site)}" if site else ""
    target = path_of(out) or folder / f"export-{form}{of_site}"
    refuse_target(target, "another --out")
    run = FinishedRun.open(folder)
    model = run.model(site, data_dir=data_dir, state_dir=state_dir)
    return export_model(run, model, form, target)


@options.command
def card(
    run_dir: options.RunDir,
    *,
    site: Annotated[str | None, "the site, for its own model"] = None,
    out: Annotated[
        options.MaybePath, "file to write (default: model-card.md in the run directory)"
    ] = None,
    plugin: options.OwnPlugin = None,
) -> Path:
    """Write the model card of a run.

    The card is a Markdown file about the model, its data, its results and its limits. It leaves out
    metrics over fewer patients than 'privacy.sums-min-count'.

    Returns:
        The path of the file.

    Raises:
        FedsiloError: the site is unknown, the run has not ended, or the file exists.
    """
    from fedsilo.core.files.atomic_files import write_atomically
    from fedsilo.inference.export.card import card_text
    from fedsilo.runs.finished_run import FinishedRun

    name_plugins(plugin_texts(plugin))
    run = FinishedRun.open(folder_of(run_dir))
    if site is not None:
        run.chosen_sites([site])  # raises an error if the site is unknown
    target = path_of(out) or run.path / "model-card.md"
    refuse_target(target, "another --out")
    write_atomically(target, card_text(run, site))
    return target
