"""Predicts new cases, or a site's own rows, with a finished run's model.

It computes as the run's final evaluation does, with the same decoding, batches and dropout
samples: the rows of a run's test split have the metrics of its ``metrics.csv`` to the last digit.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsilo.core.arguments import refuse_target
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings_schema import as_mapping
from fedsilo.core.versions import installed_software
from fedsilo.explanations.embeddings import penultimate
from fedsilo.inference.predict.answers import Predictions, columns_of
from fedsilo.inference.predict.calibration import Calibration
from fedsilo.inference.predict.case_novelty import CaseNovelty, Reference
from fedsilo.inference.predict.inputs import Inputs, RowInputs, Watch
from fedsilo.models.tasks.task import Task
from fedsilo.pages.page import refuse_twice
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel
from fedsilo.server_app.config.settings import CIRCUMSTANCES

_FEATURES = "features"  # the name of the image features that novelty compares


class _Collected:
    """A probe that collects the statistics of single samples while the model predicts them."""

    def __init__(self, of_samples: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self._of_samples = of_samples
        self._parts: list[dict[str, Tensor]] = []

    def see(self, tokens: Tensor) -> None:
        """Compute and keep the statistics of each sample of a batch, given the encoder's tokens."""
        self._parts.append(self._of_samples(tokens))

    def values(self) -> dict[str, float]:
        """Return no metrics, because the statistics are about single samples."""
        return {}

    def columns(self) -> dict[str, Tensor]:
        """Join the statistics of samples that ``see`` kept for each batch: name -> values (k, ...).

        If ``see`` kept nothing, the result is empty.
        """
        columns: dict[str, Tensor] = {}
        if self._parts:
            for name in self._parts[0]:
                columns[name] = torch.cat([part[name] for part in self._parts])
        return columns


def check_outputs(out: Path | None, html: Path | None) -> None:
    """Check before predicting that the table, its JSON and the page can be written.

    If ``out`` is None, the table and its JSON are not checked, and without ``html`` the page is
    not.

    Raises:
        SettingError: a file exists already, its folder cannot be written, or two files have the
            same path.
    """
    tables = []
    if out:
        tables = [out, document_path(out)]
    pages = []
    if html:
        pages = [html]
    # Checked first, because each path may be free although two are the same
    refuse_twice([*tables, *pages], "--html")
    for path in tables:
        refuse_target(path, "another --out")
    for path in pages:
        refuse_target(path, "another --html")


def document_path(out: Path) -> Path:
    """Return the path of the JSON next to a file of predictions."""
    return out.with_name(f"{out.name}.json")


def write_predictions(
    run: FinishedRun,
    model: TrainedModel,
    predictions: Predictions,
    out: Path | None,
    html: Path | None,
) -> None:
    """Write the predictions as CSV to ``out`` with a JSON file next to it, and a page to ``html``.

    If ``out`` is None, the CSV and the JSON file are skipped. If ``html`` is None, the page is
    skipped. All content is built before any file is written. Only the owner may read the files,
    because they hold patients' data. Existing files are replaced, so the caller must call
    ``check_outputs`` first.
    """
    files: dict[Path, bytes | str] = {}
    if html is not None:
        # Imported here, because only the page needs matplotlib and captum
        from fedsilo.inference.predict.cases import cases_page

        files[html] = cases_page(run.shown(), model, predictions)
    if out is not None:
        document = json.dumps(predictions.document, indent=2, allow_nan=False) + "\n"
        files |= {document_path(out): document, out: predictions.text()}
    for path, content in files.items():
        write_atomically(path, content, 0o600)


def predict_inputs(
    model: TrainedModel,
    inputs: Inputs,
    calibration: Calibration | None = None,
    coverage: float | None = None,
    reference: Reference | str = "",
    answer_all: bool = False,
    watch: Watch = lambda done, total: None,
) -> Predictions:
    """Predict inputs with a model, and measure how unlike the training samples each one is.

    All inputs are predicted. Whether a prediction is given as an answer is decided later, by
    ``Predictions.answered``.

    Args:
        model: the model.
        inputs: the inputs, which are read batch by batch. If their true answers are known, every
            prediction is an answer, and metrics are computed.
        calibration: the model's calibration, whose temperature corrects the probabilities. None
            leaves them uncorrected.
        coverage: the share of prediction sets that should contain the true class. None, or no
            calibration, means no sets.
        reference: the training samples to compare inputs with (novelty), or a text with the reason
            why novelty is unknown.
        answer_all: whether inputs that are unlike the training samples get an answer too.
        watch: is called with the number of inputs read so far, and the number of all inputs.

    Returns:
        The predictions. Their attribute ``document`` has the content of the JSON file about them.

    Raises:
        FedsiloError: no input can be read, or the calibration has too few rows for the coverage.
    """
    if calibration and coverage is not None:
        calibration.threshold(coverage)  # raises its error before the network computes
    split = str(inputs.source.get("split", "test"))
    compares_images = not model.silo.features and not isinstance(reference, str)

    def of_samples(tokens: Tensor) -> dict[str, Tensor]:
        statistics: dict[str, Tensor] = {}
        if model.measured.of_samples:
            statistics |= model.measured.of_samples(tokens)
        if compares_images:
            statistics[_FEATURES] = penultimate(model.network, tokens).float().cpu()
        return statistics

    # The probe sees the same batches as the model, so that no image is decoded or encoded twice
    collected = _Collected(of_samples)
    own = model.probabilities(inputs.watch_batches(watch), split, collected)
    probabilities, sets = _calibrate(own, calibration, coverage)
    statistics = collected.columns()
    features = None
    if compares_images:
        features = statistics.pop(_FEATURES)
    novelty = _novelty(inputs, reference, features)
    # The document needs the novelty of this object, so it is added below
    found = Predictions(
        inputs,
        model.classes,
        own,
        probabilities,
        statistics,
        sets,
        model.silo.features,
        novelty,
        answer_all or inputs.truth is not None,
        task=model.lab.task,
    )
    document = _document(model, inputs, calibration, coverage) | _novelty_document(found)
    return replace(found, document=document | _metrics(model.lab.task, inputs, own, sets))


def _calibrate(
    own: Tensor, calibration: Calibration | None, coverage: float | None
) -> tuple[Tensor, Tensor | None]:
    """Correct probabilities by a calibration's temperature, and build the prediction sets.

    The sets are built from the uncorrected probabilities by ``Calibration.sets``, because the
    scores in the calibration also come from uncorrected probabilities.

    Args:
        own: the model's own probabilities (k, classes).
        calibration: the model's calibration, or None if there is none.
        coverage: the share of sets that should contain the true class. None means no sets.

    Returns:
        The corrected probabilities, and the sets, bool (k, classes). Without a calibration, the
        probabilities are ``own`` itself. Without a calibration or a coverage, the sets are None.
    """
    if calibration is None:
        return own, None
    probabilities = calibration.apply_temperature(own)
    if coverage is None:
        return probabilities, None
    # The sets are built from the model's own probabilities, as the calibration's scores were
    return probabilities, calibration.sets(own, coverage)


def _novelty(
    inputs: Inputs, reference: Reference | str, features: Tensor | None
) -> CaseNovelty | str:
    """Measure how unlike the training samples the inputs are.

    Rows of a table are compared after standardisation, with missing values marked. Images are
    compared by their ``features``.

    Args:
        inputs: the inputs.
        reference: the training samples, or a text with the reason why novelty is unknown.
        features: the features of images that the network computed (k, f), or None for rows of a
            table.

    Returns:
        The novelty of each input. If ``reference`` is a text, the result is this text.
    """
    if isinstance(reference, str):
        return reference
    if features is not None:
        return reference.novelty(features)
    assert isinstance(inputs, RowInputs), "a table's inputs are rows"
    assert inputs.read is not None, "a table's rows are known as they were read"
    return reference.novelty(inputs.inputs, inputs.read.isnan())


def _novelty_document(predictions: Predictions) -> dict[str, Any]:
    if isinstance(predictions.novelty, str):
        return {"novelty": {"not known": predictions.novelty}}
    own = predictions.novelty.reference.document()
    own["beyond the limit"] = int(predictions.novelty.unusual().sum())
    own["doubtful"] = sum(map(bool, predictions.novelty.doubts(predictions.features)))
    own["not answered"] = predictions.answered().count(False)
    return {"novelty": own}


def _metrics(task: Task, inputs: Inputs, own: Tensor, sets: Tensor | None) -> dict[str, Any]:
    """Compute the metrics of predictions whose true answers are known, for the JSON file.

    ``own`` are the predictions before calibration, and ``sets`` the prediction sets, bool (k,
    classes).

    Returns:
        The key "figures" with name -> metric. If there are sets, the metric ``covered`` is the
        share of sets that contain the true class. If the true answers are unknown, the result is
        empty.
    """
    if inputs.truth is None:
        return {}
    metrics = task.metrics(own, inputs.truth)
    if sets is not None:
        metrics["covered"] = sets.gather(1, inputs.truth[:, None]).double().mean().item()
    return {"figures": metrics}


def _document(
    model: TrainedModel, inputs: Inputs, calibration: Calibration | None, coverage: float | None
) -> dict[str, Any]:
    common = model.common
    settings = as_mapping(common) | as_mapping(model.lab.session.method.settings)
    # Without folders and other settings that do not decide the predictions
    settings = {key: value for key, value in settings.items() if key not in CIRCUMSTANCES}
    answers = "of all sites"
    if model.own:
        answers = "the site's own"
    return {
        "run": model.run_dir.resolve().name,
        "method": common.method,
        "dataset": common.dataset,
        "site": model.site,
        "model": answers,
        "weights": model.weights_digest(),
        "source": dict(inputs.source),
        "inputs": len(inputs.names),
        "without a prediction": len(inputs.faults),
        "classes": list(model.classes),
        "dropout passes": common.mc_passes,
        "calibration": _calibration_document(calibration, coverage),
        "columns": columns_of(model.lab.task),
        "settings": settings,
        "software": installed_software(),
    }


def _calibration_document(
    calibration: Calibration | None, coverage: float | None
) -> dict[str, Any] | None:
    if calibration is None:
        return None
    threshold = None
    if coverage is not None:
        threshold = calibration.threshold(coverage)
    return {
        "rows": calibration.rows,
        "temperature": calibration.temperature,
        "coverage": coverage,
        "threshold": threshold,
    }
