"""``fedsilo predict``: a finished run's model on new cases, or on rows of the site's own.

It computes as the run's final evaluation does: the same decoding, batches and dropout draws. So
the rows of a run's test split have the figures of its ``metrics.csv``, to the last digit.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import figures_of, predict_batches
from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.messages import INCOMING
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, as_mapping, keys_with
from fedsilo.models.contract.versions import installed_software
from fedsilo.models.maths.mc_dropout import predictive_entropy
from fedsilo.server_app.studies.predict.calibration import Calibration, open_calibration
from fedsilo.server_app.studies.predict.inputs import Inputs, Watch, counted, open_inputs
from fedsilo.server_app.studies.predict.model import SiteModel, open_model
from fedsilo.server_app.studies.predict.request import PredictRequest, document_path

_BETWEEN = "|"  # the classes of a set
_COLUMNS = {
    "predicted": "the class of the largest probability",
    "p.<class>": "probability; at the calibration's temperature where one was applied",
    "entropy": "of the model's own mean probabilities over its dropout passes, nats",
    "vacuity": "of an evidential model, 0 to 1; 1 is no evidence",
    "weight.<site>": "of a mixture, the router's weight of that site's expert",
    "set": f"classes of the prediction set, '{_BETWEEN}' between them; it may be empty",
    "truth": "the row's own class, where it is known",
    "fault": "why nothing was predicted",
}


@dataclass(frozen=True)
class Predictions:
    """What a model says of inputs, in their order.

    Attributes:
        inputs: what was predicted, with its faults.
        classes: the names of the classes.
        own: (k, classes) float64, the model's own probabilities of the inputs without a fault.
        probabilities: the same, at the calibration's temperature where one was applied.
        figures: what else is said of each, (k,) by name.
        sets: (k, classes) bool, the classes of the prediction sets; None: none were asked for.
        document: what they were made of and by.
    """

    inputs: Inputs
    classes: tuple[str, ...]
    own: Tensor
    probabilities: Tensor
    figures: Mapping[str, Tensor]
    sets: Tensor | None
    document: Mapping[str, Any] = field(default_factory=dict)

    def entropy(self) -> Tensor:
        """Return the entropy (k,) in nats of the model's own probabilities."""
        return predictive_entropy(self.own)

    def predicted(self) -> list[str]:
        """Return the predicted class of each input without a fault."""
        return [self.classes[place] for place in self.probabilities.argmax(dim=1).tolist()]

    def header(self) -> list[str]:
        """Return the columns of the CSV file."""
        names = [self.inputs.key, "predicted", *(f"p.{name}" for name in self.classes), "entropy"]
        names += [*self.figures]
        names += ["set"] if self.sets is not None else []
        names += ["truth"] if self.inputs.truth is not None else []
        return [*names, "fault"]

    def rows(self) -> Iterator[list[str | float]]:
        """Yield the rows of the CSV file, a number with all its digits."""
        told = iter(self._told())
        blank: list[str | float] = [""] * (len(self.header()) - 2)
        for place, name in enumerate(self.inputs.names):
            fault = self.inputs.faults.get(place)
            yield [name, *next(told), ""] if fault is None else [name, *blank, fault]

    def _told(self) -> Iterator[list[str | float]]:
        """Yield what is said of each input without a fault."""
        columns: list[Sequence[str | float]] = [
            self.predicted(),
            *self.probabilities.T.tolist(),
            self.entropy().tolist(),
            *(values.double().tolist() for values in self.figures.values()),
        ]
        if self.sets is not None:
            columns.append([_BETWEEN.join(self._named(held)) for held in self.sets.tolist()])
        if self.inputs.truth is not None:
            columns.append([self.classes[label] for label in self.inputs.truth.tolist()])
        for row in zip(*columns, strict=True):
            yield list(row)

    def _named(self, held: Sequence[bool]) -> list[str]:
        return [name for name, inside in zip(self.classes, held, strict=True) if inside]

    def frame(self) -> pd.DataFrame:
        """Return the CSV file as a frame; of an input with a fault all else is missing."""
        frame = pd.DataFrame(list(self.rows()), columns=self.header()).replace({"": None})
        words = {self.inputs.key, "predicted", "set", "truth", "fault"}
        numbers = [name for name in frame.columns if name not in words]
        return frame.astype(dict.fromkeys(numbers, float))

    def text(self) -> str:
        """Return the CSV file."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header())
        writer.writerows(self.rows())
        return text.getvalue()

    def lines(self) -> list[str]:
        """Return a summary for a terminal."""
        unread, answers = len(self.inputs.faults), self.predicted()
        counts = ", ".join(f"{answers.count(name)} {name}" for name in self.classes)
        lines = [f"{len(answers)} predicted: {counts}"]
        if unread:
            lines.append(f"{unread} without a prediction: column 'fault' says why")
        if self.sets is not None:
            sizes = self.sets.sum(dim=1).double()
            lines.append(f"classes in a set: {sizes.mean().item():.2f} in the mean")
        figures = self.document.get("figures", {})
        lines += [f"{name}: {value:.4f}" for name, value in figures.items()]
        return lines


class _Figures:
    """What a method says of each sample beside its probabilities, over all batches."""

    def __init__(self, of_samples: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self._of_samples = of_samples
        self._parts: list[dict[str, Tensor]] = []

    def see(self, tokens: Tensor) -> None:
        """Take note of a batch."""
        self._parts.append(self._of_samples(tokens))

    def values(self) -> dict[str, float]:
        """Return nothing: what is said is of samples."""
        return {}

    def columns(self) -> dict[str, Tensor]:
        """Return all batches' together, (k,) by name."""
        names = self._parts[0] if self._parts else {}
        return {name: torch.cat([part[name] for part in self._parts]) for name in names}


def predict(request: PredictRequest, watch: Watch = lambda done, total: None) -> Predictions:
    """Predict what a request names and, where it names a file, write it and the JSON beside it.

    Args:
        request: what is asked.
        watch: is told how many inputs have been read, and of how many, each time that some were.

    Raises:
        FedsiloError: the model or the inputs cannot be opened, or the output is there already;
            then nothing is written.
    """
    request.check()
    model = open_model(request.run_dir, request.site, request.data_dir, request.state_dir)
    calibration = None
    if request.coverage is not None or request.calibration is not None:
        calibration = open_calibration(model, request.calibration)
    found = predicted(model, open_inputs(model, request), calibration, request.coverage, watch)
    if request.out is not None:
        content = json.dumps(found.document, indent=2, allow_nan=False) + "\n"
        write_atomically(document_path(request.out), content)
        write_atomically(request.out, found.text())
    return found


def predicted(
    model: SiteModel,
    inputs: Inputs,
    calibration: Calibration | None = None,
    coverage: float | None = None,
    watch: Watch = lambda done, total: None,
) -> Predictions:
    """Return what a model says of inputs; with a calibration and a coverage also sets.

    Raises:
        FedsiloError: no input can be read, or the calibration's rows are too few.
    """
    if calibration and coverage is not None:
        calibration.threshold(coverage)  # refused before the work
    lab, split = model.lab, str(inputs.source.get("split", "test"))
    key = (model.round, model.site, INCOMING, split)
    figures = _Figures(model.measured.of_samples or (lambda tokens: {}))
    batches = inputs.batches(counted(watch, len(inputs.names)))
    own = predict_batches(model.network, batches, lab.sampling, lab.compute, key, figures)
    sets = calibration.sets(own, coverage) if calibration and coverage is not None else None
    return Predictions(
        inputs,
        model.classes,
        own,
        calibration.tempered(own) if calibration else own,
        figures.columns(),
        sets,
        _document(model, inputs, calibration, coverage) | _judged(inputs, own, sets),
    )


def _judged(inputs: Inputs, own: Tensor, sets: Tensor | None) -> dict[str, Any]:
    """Return the figures of rows whose classes are known, as metrics.csv has them."""
    if inputs.truth is None:
        return {}
    figures = figures_of(own, inputs.truth)
    if sets is not None:
        covered = sets.gather(1, inputs.truth[:, None])
        figures["covered"] = covered.double().mean().item()
    return {"figures": figures}


def _document(
    model: SiteModel, inputs: Inputs, calibration: Calibration | None, coverage: float | None
) -> dict[str, Any]:
    common = model.common
    return {
        "run": model.run.path.resolve().name,
        "method": common.method,
        "dataset": common.dataset,
        "site": model.site,
        "model": "the site's own" if model.own else "of all sites",
        "weights": model.weights_digest(),
        "source": dict(inputs.source),
        "inputs": len(inputs.names),
        "without a prediction": len(inputs.faults),
        "classes": list(model.classes),
        "dropout passes": common.mc_passes,
        "calibration": calibration and _of_calibration(calibration, coverage),
        "columns": _COLUMNS,
        "settings": _settings(model),
        "software": installed_software(),
    }


def _settings(model: SiteModel) -> dict[str, Value]:
    """Return the run's settings, but for those that say where and when it ran."""
    values = as_mapping(model.common) | as_mapping(model.lab.session.method.settings)
    idle = {*keys_with(CommonSettings, "circumstance")}
    return {key: value for key, value in values.items() if key not in idle}


def _of_calibration(calibration: Calibration, coverage: float | None) -> dict[str, Any]:
    return {
        "rows": calibration.rows,
        "temperature": calibration.temperature,
        "coverage": coverage,
        "threshold": None if coverage is None else calibration.threshold(coverage),
    }
