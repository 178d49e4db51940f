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

    Each entry of ``weights`` names a starting point:

    - a run directory, for the run's model
    - a file of a ViT's weights
    - 'timm:NAME', for weights of the package timm
    - 'scratch', for random weights

    From each starting point, one network per seed is trained on the pooled training images of the
    sites, and measured on the test images after its best epoch. The validation metric decides which
    epoch is best. With ``distil_epochs``, an encoder first learns to predict the tokens (patch
    features) of the run's ViT. Metrics, curves and the best network of the first starting point are
    written to ``out``, unless a training fails.

    Returns:
        The study and the result of each starting point, in the order of ``weights``.

    Raises:
        FedsiloError: a starting point, setting or site is unknown, a number is too small, ``out``
            exists, weights do not fit the network, images are missing, or training diverged.
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

    Give exactly one source of cases: ``images``, ``manifest``, ``table`` or ``split``. A case that
    is farther from the training samples than a limit gets no answer, unless ``answer_all`` is set.
    Held-out samples set the limit. ``out`` and ``html`` name files to write. ``watch`` is called
    with two numbers: the cases done so far, and all cases.

    For segmentation, ``out`` must name a new folder, which gets a mask (PNG) for each image.
    Options that do not apply to masks are refused. ``run_dir`` may then also be a folder of
    ``finetune``.

    Returns:
        The predictions. For segmentation, this is a ``MaskPredictions``. For other tasks,
        ``frame()`` has a row for each case, as in the CSV file. If the run predicts classes, the
        columns include ``predicted``, ``p.<class>`` and ``entropy``.

    Raises:
        FedsiloError: not exactly one source is given, ``id`` is given without ``table``, an option
            does not apply to the run's task, the model or the cases cannot be opened, or a file to
            write already exists. Also raised if ``coverage`` is given, but the model has no
            calibration.
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
    """Refuse options of ``predict`` that need classes if the run does not predict classes.

    Args:
        run: the finished run.
        of_classes: name of each option that needs classes -> its value. None means that the option
            is not given.

    Raises:
        SettingError: an option is given, but the run does not predict classes. The message names
            the first such option.
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

    Calibration makes predicted probabilities match observed frequencies. The model's logits are
    divided by a temperature, which is fitted on the site's validation rows. The calibration also
    stores a score of each row, from which ``predict`` makes prediction sets. ``coverage`` is the
    share of these sets that shall contain the true class. A higher coverage needs more validation
    rows, and at least ten are always needed.

    Returns:
        The calibration, which is also written to ``out``. Without ``out`` it is written to the run
        directory, where it replaces an earlier calibration of the site.

    Raises:
        FedsiloError: ``coverage`` is not between 0 and 1, the run has not ended or does not predict
            classes, the site has too few validation rows, the rows have changed since the run, or
            the file ``out`` already exists.
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

    The feature distributions of the new cases are compared with those of the site's training data.
    If enough cases have labels, predictions are checked too: accuracy, calibration and coverage of
    prediction sets for classes, or the mean absolute error for a predicted number. Each check needs
    as many cases as the run's setting 'privacy.sums-min-count'.

    Returns:
        The checks. ``alarms`` has the checks whose value is beyond the limit for an alarm, which
        each check states. ``missing`` has a line with the reason for each check that was not
        possible.

    Raises:
        FedsiloError: ``data`` does not exist or has too few readable cases, ``coverage`` is not
            between 0 and 1, or the run or the calibration cannot be opened.
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

    The program and fedsilo first predict made-up test vectors, and their predictions must agree to
    0.0001. Then the program, the test vectors and a model card are written to a new folder. By
    default, this is ``export-<form>`` in the run directory. ``site`` exports the model of that
    site, by default into ``export-<form>-<site>``.

    Returns:
        The folder, the largest difference between the predictions of the program and of fedsilo,
        and the types and shapes of the inputs and outputs.

    Raises:
        FedsiloError: the run cannot be opened, the folder exists, the model cannot be written in
            this format, or the predictions differ.
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
    metrics over fewer patients than the setting 'privacy.sums-min-count'. With ``site`` it
    describes that site's own model.

    Returns:
        The path of the file.

    Raises:
        FedsiloError: the site is not in the run, the run has not ended, or the file exists.
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
