"""``fedsilo monitor``: check new cases against a finished run, where the site's data are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsilo.core.errors import DataError
from fedsilo.core.settings.common_settings import NOBODY
from fedsilo.core.tasks import CLASSIFICATION, REGRESSION
from fedsilo.core.versions import FEDSILO
from fedsilo.inference.monitor.checks import (
    CaseCheck,
    accuracy_check,
    certainty_check,
    coverage_check,
    drift_checks,
    error_check,
)
from fedsilo.inference.monitor.new_data import NewData, open_new_data
from fedsilo.inference.predict.calibration import (
    Calibration,
    calibration_path,
    open_calibration,
)
from fedsilo.inference.predict.prediction import predict_inputs
from fedsilo.pages.page import render_page
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel
from fedsilo.server_app.records.summary import join_names

ALARM = 3  # exit status of the command if a check is an alarm
_IMAGE_FEATURES = ("brightness", "contrast")  # the features that are checked for images
# Task -> the checks that need labels
_OF_LABELS = {CLASSIFICATION: "coverage, calibration and accuracy", REGRESSION: "MAE"}


@dataclass(frozen=True)
class Monitored:
    """The result of all checks of new cases."""

    facts: Sequence[tuple[str, str]]  # run, method, data and new cases, for the page
    checks: Sequence[CaseCheck]
    missing: Sequence[str]  # a line for each check that was not possible, with the reason

    @property
    def alarms(self) -> list[CaseCheck]:
        """The checks that are beyond their limit."""
        return [check for check in self.checks if check.alarm]

    def verdict(self) -> str:
        """Summarise the checks in one sentence.

        If some checks are alarms, the sentence names them. Otherwise it says that all checks are
        within their limits, or that nothing could be checked.
        """
        if not self.checks:
            return "Nothing could be checked."
        if not self.alarms:
            return f"No alarm: {len(self.checks)} checks are within their limits."
        names = "; ".join(check.name for check in self.alarms)
        return f"{len(self.alarms)} of {len(self.checks)} checks are beyond their limit: {names}."

    def lines(self) -> list[str]:
        """Return the lines for a terminal: each check, each missing check, and the verdict."""
        lines = [check.line() for check in self.checks]
        for why in self.missing:
            lines.append(f"not checked: {why}")
        return [*lines, self.verdict()]

    def document(self) -> dict[str, Any]:
        """Return the verdict, each check, and the lines of the missing checks, for JSON."""
        checks = [vars(check) for check in self.checks]
        return {"verdict": self.verdict(), "checks": checks, "missing": list(self.missing)}

    def page(self) -> str:
        """Build the HTML page: the verdict, a table of the checks, and reasons for missing checks.

        The table shows the name, the value and the limit of each check, and "ok" or "ALARM".
        """
        rows = []
        for check in self.checks:
            status = "ok"
            if check.alarm:
                status = "ALARM"
            rows.append((check.name, check.value, check.limit, status))
        return render_page(
            "monitor.html",
            "Does the model still suit these cases?",
            {
                "verdict": self.verdict(),
                "alarm": bool(self.alarms),
                "facts": self.facts,
                "checks": rows,
                "missing": self.missing,
            },
            foot="Not for clinical use. Written by fedsilo, research software.",
        )


def check_new_cases(
    run: FinishedRun,
    model: TrainedModel,
    data: Path,
    coverage: float = 0.9,
    calibration: Path | None = None,
) -> Monitored:
    """Check whether a finished run's model still suits the new cases at one site.

    The features of all readable cases are compared with the site's training data to detect drift.
    Predictions are compared with labels if enough cases have one. The number needed is the run's
    setting 'privacy.sums-min-count', its floor. For classification, coverage, calibration and
    accuracy are checked, and for regression the mean absolute error. Other tasks have no checks of
    labels. The result explains each check that is not possible.

    Args:
        run: the run of the model.
        model: the model, opened at the site.
        data: the new cases: a table, a manifest of images or a folder of images. Labels are
            optional.
        coverage: the share of prediction sets that should contain the true class, between 0 and 1.
        calibration: the file that ``calibrate`` wrote. None means the one in the run directory.

    Raises:
        FedsiloError: the cases cannot be opened, the readable cases are fewer than the floor, or
            the calibration file cannot be used.
    """
    new, floor = open_new_data(model, data), run.floor
    # Reading all files also finds those that cannot be used
    features = new.features()
    if len(features) < floor:
        raise DataError(
            f"{data} has {len(features)} cases that can be used, but a check needs {floor} "
            "('privacy.sums-min-count'): collect more cases"
        )
    checks = [*_drift(model, features, floor)]
    missing = [*_unchecked_features(model, checks, floor)]
    of_labels, reasons = _check_labels(run, model, new, coverage, calibration)
    facts = _facts(model, data, len(features), len(new.inputs.faults))
    return Monitored(facts, [*checks, *of_labels], [*missing, *reasons])


def _check_labels(
    run: FinishedRun, model: TrainedModel, new: NewData, coverage: float, calibration: Path | None
) -> tuple[list[CaseCheck], list[str]]:
    """Run the checks that compare predictions with labels, for the new cases that have a label.

    Only classification and regression have such checks. Fewer labels than ``run.floor`` are too
    few. ``new`` are the opened cases. The other arguments are those of ``check_new_cases``.

    Returns:
        The checks, and a sentence for each check that was not possible. For other tasks or with too
        few labels, no checks and one sentence.

    Raises:
        FedsiloError: the calibration file cannot be used, or no case can be read.
    """
    if run.task not in _OF_LABELS:
        return [], [f"labels: of task '{run.task}' only the distribution of features is checked"]
    known, floor = new.labelled_places(), run.floor
    if len(known) < floor:
        lacking = f"{len(known)} cases have a label, but {floor} are needed"
        return [], [f"{_OF_LABELS[run.task]}: {lacking}"]
    # An input that could not be read may have a label, but lacks a prediction
    labels = new.labels[new.inputs.kept()][known]
    own = predict_inputs(model, new.inputs).own[known]
    # shown() hides metrics of too few patients
    before = run.shown().summary["sites"].get(model.site, {})
    if run.task == REGRESSION:
        return _number_checks(own[:, 0], labels, before.get("mae"), model.site)
    chosen, why = _calibration(model, calibration)
    missing = [why] if why else []
    if "accuracy" not in before:
        missing.append(f"accuracy: the run has none of {model.site} that may be shown")
    return [*_label_checks(own, labels, chosen, coverage, before.get("accuracy"))], missing


def _number_checks(
    predicted: Tensor, outcomes: Tensor, before: float | None, site: str
) -> tuple[list[CaseCheck], list[str]]:
    """Check that the mean absolute error of new predictions has not risen above the run's.

    ``error_check`` decides whether the check is an alarm.

    Args:
        predicted: the predictions (n,).
        outcomes: the outcomes (n,), in the same unit.
        before: the mean absolute error on the run's test samples of ``site``. None if it is
            unknown, or hidden because of too few patients.
        site: the name of the site.

    Returns:
        A list of checks, and a list of sentences on checks that were not possible. One list has one
        entry, and the other is empty. If ``before`` is None, there is no check but a sentence.
    """
    if before is None:
        return [], [f"MAE: the run has none of {site} that may be shown"]
    return [error_check((predicted - outcomes).abs(), before)], []


def _drift(model: TrainedModel, now: Tensor, floor: int) -> Iterator[CaseCheck]:
    """Check whether the features of new cases are distributed as in the site's training data.

    A check is yielded for each column for which ``drift_checks`` finds enough training samples.
    Images are compared only by their brightness and contrast. If the run's setting 'trust' is
    ``nobody``, nothing is yielded, because distributions of training data may not be used.

    Args:
        model: the model, opened at the site.
        now: the features of the new cases.
        floor: the smallest number of training samples in a cell of a histogram.
    """
    if model.common.trust == NOBODY:
        return
    training = model.lab.session.silo.train.inputs
    if not model.silo.features:
        training, now = _pixel_statistics(training), _pixel_statistics(now)
    yield from drift_checks(model.silo.features or _IMAGE_FEATURES, training, now, floor)


def _pixel_statistics(images: Tensor) -> Tensor:
    """Return the mean and standard deviation of the pixels (n, 2) of images (n, channels, h, w)."""
    flat = images.flatten(1).double()
    return torch.stack([flat.mean(dim=1), flat.std(dim=1)], dim=1)


def _unchecked_features(
    model: TrainedModel, drift: Sequence[CaseCheck], floor: int
) -> Iterator[str]:
    """Yield a sentence on the columns that could not be checked for drift, if there are any.

    If the run's setting 'trust' is ``nobody``, the sentence says that no distribution may be
    compared. Otherwise it names the columns that have no check in ``drift``. It gives the reason: a
    histogram of their training values does not have two cells with at least ``floor`` samples each.
    The columns of images are brightness and contrast.
    """
    if model.common.trust == NOBODY:
        yield (
            "the distribution of features: at 'trust: nobody' no distribution of training data "
            "may be kept or compared with"
        )
        return
    checked = {check.name for check in drift}
    unchecked: list[str] = []
    for name in model.silo.features or _IMAGE_FEATURES:
        column = name.partition("=")[0]
        if f"distribution of {column}" not in checked and column not in unchecked:
            unchecked.append(column)
    if unchecked:
        said = join_names(unchecked)
        yield f"the distribution of {said}: no two cells with {floor} training samples"


def _calibration(model: TrainedModel, path: Path | None) -> tuple[Calibration | None, str]:
    """Open the model's calibration from ``path``, or from the run directory if ``path`` is None.

    Returns:
        The calibration and an empty string. If ``path`` is None and the run directory does not
        contain a calibration, the result is None and a sentence with the command that makes one.

    Raises:
        FedsiloError: the calibration cannot be used, or the file ``path`` is missing.
    """
    if path is None and not calibration_path(model.run_dir, model.site).is_file():
        command = f"fedsilo calibrate {model.run_dir} --site {model.site}"
        return None, f"coverage of prediction sets: there is no calibration; run '{command}'"
    return open_calibration(model, path), ""


def _label_checks(
    own: Tensor,
    labels: Tensor,
    calibration: Calibration | None,
    coverage: float,
    before: float | None,
) -> Iterator[CaseCheck]:
    """Yield the checks that need labels: coverage, certainty and accuracy.

    Coverage is checked only if ``calibration`` is given. The certainty check compares the mean
    confidence with the accuracy. It uses the probabilities at the calibration's temperature, or
    ``own`` if ``calibration`` is None.

    Args:
        own: the model's own probabilities (n, classes), before calibration.
        labels: the true classes (n,).
        calibration: the model's calibration, or None if there is none.
        coverage: the share of prediction sets that should contain the true class.
        before: the accuracy on the run's test samples. None skips the check of accuracy.
    """
    probabilities = own
    if calibration:
        probabilities = calibration.apply_temperature(own)
        # Sets are built from the model's own probabilities, as the calibration's scores were
        yield coverage_check(calibration.sets(own, coverage), labels, coverage)
    yield certainty_check(probabilities, labels)
    if before is not None:
        yield accuracy_check(probabilities.argmax(dim=1), labels, before)


def _facts(model: TrainedModel, data: Path, cases: int, unread: int) -> list[tuple[str, str]]:
    skipped = ""
    if unread:
        skipped = f", {unread} more could not be used"
    return [
        ("run", model.run_dir.resolve().name),
        ("method", f"{model.title} ({model.common.method})"),
        ("data", f"{model.common.dataset}, training samples of {model.site}"),
        ("new cases", f"{cases} of {data.name}{skipped}"),
        ("version", f"fedsilo {FEDSILO}"),
    ]
