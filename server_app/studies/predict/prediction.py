"""``fedsilo predict``: a finished run's model on new cases, or on a site's own rows.

It computes as the run's final evaluation does, with the same decoding, batches and dropout
samples: the rows of a run's test split have the metrics of its ``metrics.csv`` to the last digit.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import figures_of, predict_batches
from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.messages import INCOMING
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, keys_with
from fedsilo.models.contract.versions import installed_software
from fedsilo.models.maths.mc_dropout import predictive_entropy
from fedsilo.server_app.studies.predict.calibration import Calibration, open_calibration
from fedsilo.server_app.studies.predict.inputs import Inputs, Watch, open_inputs
from fedsilo.server_app.studies.predict.model import SiteModel, open_model
from fedsilo.server_app.studies.predict.request import PredictRequest, document_path

_LISTED = 10  # faults on a terminal
_SEPARATOR = "|"  # between the classes of a set
_COLUMNS = {
    "id": "of the column that --id names",
    "predicted": "the class of the largest probability",
    "p.<class>": "probability, at the calibration's temperature if one was applied",
    "entropy": "of the model's own probabilities, the mean over its dropout passes, in nats",
    "vacuity": "for an evidential model, 0 to 1; 1 means no evidence",
    "weight.<site>": "for a mixture, the router's weight of that site's expert",
    "set": f"classes of the prediction set, '{_SEPARATOR}' between them; it may be empty",
    "truth": "the row's own class, if it is known",
    "fault": "why nothing was predicted",
}


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for inputs, in their order; k of them could be read."""

    inputs: Inputs
    classes: tuple[str, ...]
    own: Tensor  # (k, classes) float64, the model's own probabilities
    probabilities: Tensor  # the same, at the calibration's temperature if one was applied
    statistics: Mapping[str, Tensor]  # what else the method says about each input, (k,) by name
    sets: Tensor | None  # (k, classes) bool, the prediction sets, or None if none were asked for
    document: Mapping[str, Any] = field(default_factory=dict)  # the JSON beside the CSV file

    @property
    def faults(self) -> Mapping[int, str]:
        """Place of an input -> why it has no prediction."""
        return self.inputs.faults

    def predicted(self) -> list[str]:
        """Return the predicted class of each input without a fault."""
        return [self.classes[place] for place in self.probabilities.argmax(dim=1).tolist()]

    def frame(self) -> pd.DataFrame:
        """Return a row for each input; of an input with a fault all else is missing."""
        columns: dict[str, list[Any]] = {"predicted": self.predicted()}
        for name, values in zip(self.classes, self.probabilities.T.tolist(), strict=True):
            columns[f"p.{name}"] = values
        columns["entropy"] = predictive_entropy(self.own).tolist()
        columns |= {name: values.double().tolist() for name, values in self.statistics.items()}
        if self.sets is not None:
            columns["set"] = [_SEPARATOR.join(compress(self.classes, row)) for row in self.sets]
        if self.inputs.truth is not None:
            columns["truth"] = [self.classes[label] for label in self.inputs.truth.tolist()]
        places = range(len(self.inputs.names))
        frame = pd.DataFrame(columns, index=self.inputs.kept()).reindex(places)
        frame.insert(0, self.inputs.key, list(self.inputs.names))
        if self.inputs.ids:
            frame.insert(0, "id", list(self.inputs.ids))
        frame["fault"] = [self.inputs.faults.get(place) for place in places]
        return frame

    def text(self) -> str:
        """Return the CSV file, numbers with all their digits."""
        return self.frame().to_csv(index=False)

    def lines(self) -> list[str]:
        """Return a summary for a terminal."""
        answers = self.predicted()
        counts = ", ".join(f"{answers.count(name)} {name}" for name in self.classes)
        lines = [f"{len(answers)} predicted: {counts}"]
        lines += [*self.inputs.notes, *self._faults()]
        if self.sets is not None:
            sizes = self.sets.sum(dim=1).double()
            lines.append(f"classes in a set: {sizes.mean().item():.2f} on average")
        metrics = self.document.get("figures", {})
        return [*lines, *(f"{name}: {value:.4f}" for name, value in metrics.items())]

    def _faults(self) -> list[str]:
        """Return how many inputs have no prediction, and why the first of them have none."""
        faults, inputs = self.inputs.faults, self.inputs
        if not faults:
            return []
        shown = [
            f"  {inputs.key} {inputs.names[place]}{f' (id {inputs.ids[place]})' * bool(inputs.ids)}"
            f": {one_line(faults[place], 200)}"
            for place in sorted(faults)[:_LISTED]
        ]
        return [f"{len(faults)} without a prediction: column 'fault' says why", *shown]


class _SampleStatistics:
    """A probe that collects what a method says about each sample apart from its probabilities."""

    def __init__(self, of_samples: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self._of_samples = of_samples
        self._parts: list[dict[str, Tensor]] = []

    def see(self, tokens: Tensor) -> None:
        """Collect a batch."""
        self._parts.append(self._of_samples(tokens))

    def values(self) -> dict[str, float]:
        """Return nothing: it says nothing about all of the split."""
        return {}

    def columns(self) -> dict[str, Tensor]:
        """Return the values of all batches, (k,) by name."""
        names = self._parts[0] if self._parts else {}
        return {name: torch.cat([part[name] for part in self._parts]) for name in names}


def predict(request: PredictRequest, watch: Watch = lambda done, total: None) -> Predictions:
    """Predict what a request names; if it names a file, write it and the JSON next to it.

    Raises:
        FedsiloError: the model or the inputs cannot be opened, or the output exists already; then
            nothing is written.
    """
    request.check()
    folders = request.data_dir, request.state_dir
    model = open_model(request.run_dir, request.site, *folders, request.best)
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
    """Return what a model predicts, with sets if there are a calibration and a coverage.

    Raises:
        FedsiloError: no input can be read, or the calibration's rows are too few.
    """
    if calibration and coverage is not None:
        calibration.threshold(coverage)  # refused before the work
    lab, split = model.lab, str(inputs.source.get("split", "test"))
    key = (model.round, model.site, INCOMING, split)
    statistics = _SampleStatistics(model.measured.of_samples or (lambda tokens: {}))
    batches = inputs.watched(watch)
    own = predict_batches(model.network, batches, lab.sampling, lab.compute, key, statistics)
    sets = calibration.sets(own, coverage) if calibration and coverage is not None else None
    return Predictions(
        inputs,
        model.classes,
        own,
        calibration.tempered(own) if calibration else own,
        statistics.columns(),
        sets,
        _document(model, inputs, calibration, coverage) | _metrics(inputs, own, sets),
    )


def _metrics(inputs: Inputs, own: Tensor, sets: Tensor | None) -> dict[str, Any]:
    """Return the metrics of rows whose classes are known, named as in metrics.csv."""
    if inputs.truth is None:
        return {}
    metrics = figures_of(own, inputs.truth)
    if sets is not None:
        metrics["covered"] = sets.gather(1, inputs.truth[:, None]).double().mean().item()
    return {"figures": metrics}


def _document(
    model: SiteModel, inputs: Inputs, calibration: Calibration | None, coverage: float | None
) -> dict[str, Any]:
    common = model.common
    settings = as_mapping(common) | as_mapping(model.lab.session.method.settings)
    circumstances = keys_with(CommonSettings, "circumstance")  # where and when it ran
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
        "calibration": calibration
        and {
            "rows": calibration.rows,
            "temperature": calibration.temperature,
            "coverage": coverage,
            "threshold": None if coverage is None else calibration.threshold(coverage),
        },
        "columns": _COLUMNS,
        "settings": {k: v for k, v in settings.items() if k not in circumstances},
        "software": installed_software(),
    }
