"""``fedsilo monitor``: check new cases against a finished run, where the site's data are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import find_places
from fedsilo.core.files.text_files import read_rows, same_text
from fedsilo.core.settings.common_settings import NOBODY
from fedsilo.core.versions import FEDSILO
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.tables.parsing import BOOLEANS
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import read_table
from fedsilo.inference.monitor.checks import (
    CaseCheck,
    accuracy_check,
    certainty_check,
    coverage_check,
    drift_checks,
)
from fedsilo.inference.predict.calibration import (
    Calibration,
    calibration_path,
    open_calibration,
)
from fedsilo.inference.predict.inputs import (
    CaseSource,
    Inputs,
    as_cell,
    open_inputs,
    table_schema,
)
from fedsilo.inference.predict.prediction import predict_inputs
from fedsilo.pages.page import render_page
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel
from fedsilo.server_app.records.summary import join_names

ALARM = 3  # exit status of the command if a check is an alarm
_IMAGE_FEATURES = ("brightness", "contrast")  # the features that are checked for images


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

        If there are alarms, the sentence names these checks. Otherwise it says that all checks are
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
        """Build the HTML page: the verdict, the checks, and the checks that were not possible."""
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
    """Check new cases against the model of a finished run and the training data of its site.

    The distribution of features is checked for all cases. Coverage, calibration and accuracy need
    labels for at least as many cases as the run's floor.

    Args:
        run: the run of the model.
        model: the model.
        data: the new cases: a table, a manifest of images or a folder of images, with labels or
            without.
        coverage: the coverage that prediction sets promise, between 0 and 1.
        calibration: the file that ``calibrate`` wrote; None for the one in the run directory.

    Raises:
        FedsiloError: the cases cannot be opened, or those that can be used are fewer than the
            floor.
    """
    new, floor = open_new_data(model, data), run.floor
    found = predict_inputs(model, new.inputs)
    kept = new.inputs.kept()
    if len(kept) < floor:
        raise DataError(
            f"{data} has {len(kept)} cases that can be used, but a check needs {floor} "
            "('privacy.sums-min-count'): collect more cases"
        )
    # An input that could not be read may have a label, but lacks a prediction
    # (k,) classes in the order of found.own (k, classes)
    labels = new.labels[kept]
    checks = [*_drift(model, new, floor)]
    # A label of -1 is unknown
    known = labels >= 0
    missing = [*_missing(model, checks, int(known.sum()), floor)]
    if int(known.sum()) >= floor:
        chosen, why = _calibration(model, calibration)
        if why:
            missing.append(why)
        # shown() hides the accuracy of too few patients
        before = run.shown().summary["sites"].get(model.site, {}).get("accuracy")
        if before is None:
            missing.append(f"accuracy: the run has none of {model.site} that may be shown")
        checks += _label_checks(found.own[known], labels[known], chosen, coverage, before)
    return Monitored(_facts(model, data, len(kept), len(new.inputs.faults)), checks, missing)


def _drift(model: TrainedModel, new: NewData, floor: int) -> Iterator[CaseCheck]:
    """Yield checks of the new cases' features against the site's own training samples.

    Images are compared by brightness and contrast. At trust ``nobody`` nothing is yielded.
    """
    if model.common.trust == NOBODY:
        return
    training, now = model.lab.session.silo.train.inputs, new.features()
    if not model.silo.features:
        training, now = _pixel_statistics(training), _pixel_statistics(now)
    yield from drift_checks(model.silo.features or _IMAGE_FEATURES, training, now, floor)


def _pixel_statistics(images: Tensor) -> Tensor:
    """Return the mean and standard deviation of the pixels (n, 2) of images (n, channels, h, w)."""
    flat = images.flatten(1).double()
    return torch.stack([flat.mean(dim=1), flat.std(dim=1)], dim=1)


def _missing(
    model: TrainedModel, drift: Sequence[CaseCheck], labelled: int, floor: int
) -> Iterator[str]:
    """Yield a sentence for each kind of check that was not possible, with the reason.

    ``drift`` has the checks of features that were possible, ``labelled`` is the number of cases
    with a label.
    """
    if model.common.trust == NOBODY:
        yield (
            "the distribution of features: at 'trust: nobody' no distribution of training data "
            "may be kept or compared with"
        )
    else:
        checked = {check.name for check in drift}
        unchecked: list[str] = []
        for name in model.silo.features or _IMAGE_FEATURES:
            column = name.partition("=")[0]
            if f"distribution of {column}" not in checked and column not in unchecked:
                unchecked.append(column)
        if unchecked:
            said = join_names(unchecked)
            yield f"the distribution of {said}: no two cells with {floor} training samples"
    if labelled < floor:
        yield (
            f"coverage, calibration and accuracy: {labelled} cases have a label, but {floor} are "
            "needed"
        )


def _calibration(model: TrainedModel, path: Path | None) -> tuple[Calibration | None, str]:
    """Open the model's calibration from ``path``, or from the run directory if ``path`` is None.

    Returns:
        The calibration and an empty string. If ``path`` is None and the run directory does not
        contain a calibration, None and a sentence with the command that makes one.

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
    """Yield the checks that need labels: coverage, calibration and accuracy.

    Args:
        own: the model's own probabilities (n, classes).
        labels: the true classes (n,).
        calibration: the model's calibration; None skips the check of coverage.
        coverage: the coverage that prediction sets promise.
        before: the accuracy on the run's test samples; None skips the check of accuracy.
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


@dataclass(frozen=True)
class NewData:
    """New cases, with the class of each case; -1 if it is unknown."""

    inputs: Inputs
    labels: Tensor  # (n,) int64, of all inputs, readable or not

    def features(self) -> Tensor:
        """Return the readable inputs as they were read (k, *input_shape), NaN for a missing value.

        Images are decoded again, because ``inputs`` does not store them.
        """
        if self.inputs.read is not None:
            return self.inputs.read
        return torch.cat(list(self.inputs.batches()))


def open_new_data(model: TrainedModel, data: Path) -> NewData:
    """Open new cases from a folder of images, a table or a manifest, with the labels in the file.

    Cases from a folder are unlabelled. A file is read as a table if the run's data are a table, and
    as a manifest otherwise. A case without a known label gets -1.

    Raises:
        DataError: there are no cases, they cannot be read, or they are of another kind than the
            run's data.
    """
    by_name: dict[str, int] = {}
    if data.is_dir():
        inputs = open_inputs(model, CaseSource("images", data))
    elif model.silo.features:
        inputs = open_inputs(model, CaseSource("table", data))
        schema = table_schema(model)
        by_name = dict(_table_labels(data, schema, _class_numbers(schema.classes)))
    else:
        inputs = open_inputs(model, CaseSource("manifest", data))
        by_name = dict(_manifest_labels(data, _class_numbers(_read_class_labels(model))))
    labels = [by_name.get(name, -1) for name in inputs.names]
    return NewData(inputs, torch.tensor(labels))


def _read_class_labels(model: TrainedModel) -> Mapping[str, Sequence[str]]:
    """Return class -> the labels that the data set declares for the class.

    For data sets other than image data sets, each class has no labels.
    """
    data, common = data_set(model.common.dataset), model.common
    if isinstance(data, ImageDataSet):
        return data.classes(common, find_places(common.data_dir, common.cache_dir))
    return dict.fromkeys(model.classes, ())


def _class_numbers(classes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Map each string that a label may have to its class number.

    ``classes`` maps a class's name to the labels that the data set declares for the class. The keys
    of the result are the names and the labels. If a label equals the name of another class, the
    label decides.
    """
    numbers = {}
    for number, name in enumerate(classes):
        numbers[same_text(name)] = number
    # After all names, so that a declared label wins over the name of another class
    for number, values in enumerate(classes.values()):
        for value in values:
            numbers[same_text(value)] = number
    return numbers


def _table_labels(
    path: Path, schema: TableSchema, classes: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield (line number as a string, class number) for each row with a known label.

    ``classes`` maps a label to its class number. For a table without a label column, nothing is
    yielded.
    """
    (_, first), *rows = read_table(path, schema.delimiter, guess_delimiter=True)
    names = [name.strip().casefold() for name in first]
    if schema.label.column.casefold() not in names:
        return
    # A row may be shorter than the header, and so end before the label
    place = names.index(schema.label.column.casefold())
    for number, cells in rows:
        text = ""
        if place < len(cells):
            text = same_text(cells[place])
        label = classes.get(text, classes.get(BOOLEANS.get(text.lower(), "")))
        if label is not None:
            yield str(number), label


def _manifest_labels(path: Path, classes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for _, row in read_rows(path, ("path",), ("label", "split", "patient", "mask")):
        label = classes.get(same_text(row.get("label", "")))
        if label is not None:
            yield as_cell(row["path"]), label
