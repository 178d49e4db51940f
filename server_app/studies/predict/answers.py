"""What a model predicts for inputs: a table of answers, and a summary for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import pandas as pd
from torch import Tensor

from fedsilo.models.contract.one_line import one_line
from fedsilo.models.maths.mc_dropout import predictive_entropy
from fedsilo.server_app.studies.predict.inputs import Inputs
from fedsilo.server_app.studies.predict.novelty import CaseNovelty

_LISTED = 10  # faults on a terminal
_SEPARATOR = "|"  # between the classes of a set
COLUMNS = {
    "id": "of the column that --id names",
    "predicted": "the class of the largest probability",
    "p.<class>": "probability, at the calibration's temperature if one was applied",
    "entropy": "of the model's own probabilities, the mean over its dropout passes, in nats",
    "vacuity": "for an evidential model, 0 to 1; 1 means no evidence",
    "weight.<site>": "for a mixture, the router's weight of that site's expert",
    "set": f"classes of the prediction set, '{_SEPARATOR}' between them; it may be empty",
    "imputed": "columns of the table whose value is missing, and replaced by the mean",
    "novelty": "how far the case is from the training samples; above 1 it is unusual",
    "unusual": "why it is unusual, and therefore not answered unless --answer-all is given",
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
    features: Sequence[str] = ()  # of a table
    novelty: CaseNovelty | str = ""  # how new each input is, or why that is not known
    answers_all: bool = True  # whether inputs that are unlike the training samples are answered
    document: Mapping[str, Any] = field(default_factory=dict)  # the JSON beside the CSV file

    @property
    def faults(self) -> Mapping[int, str]:
        """Place of an input -> why it has no prediction."""
        return self.inputs.faults

    def answered(self) -> list[bool]:
        """Return whether each input without a fault is answered, as unusual ones are not."""
        if self.answers_all or isinstance(self.novelty, str):
            return [True] * len(self.own)
        return [not unusual for unusual in self.novelty.unusual().tolist()]

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
        columns |= self._marks()
        if self.sets is not None:
            columns["set"] = [_SEPARATOR.join(compress(self.classes, row)) for row in self.sets]
        if self.inputs.truth is not None:
            columns["truth"] = [self.classes[label] for label in self.inputs.truth.tolist()]
        frame = pd.DataFrame(columns, index=self.inputs.kept())
        answers = [n for n in columns if n in ("predicted", "set") or n.startswith("p.")]
        frame.loc[[not answered for answered in self.answered()], answers] = None
        places = range(len(self.inputs.names))
        frame = frame.reindex(places)
        frame.insert(0, self.inputs.key, list(self.inputs.names))
        if self.inputs.ids:
            frame.insert(0, "id", list(self.inputs.ids))
        frame["fault"] = [self.inputs.faults.get(place) for place in places]
        return frame

    def _marks(self) -> dict[str, list[Any]]:
        """Return the columns that say what is imputed and what is unlike the training samples."""
        marks: dict[str, list[Any]] = {}
        if any(imputed := self.inputs.imputed(self.features)):
            marks["imputed"] = [", ".join(names) for names in imputed]
        if not isinstance(self.novelty, str):
            marks["novelty"] = self.novelty.scores().tolist()
            marks["unusual"] = self.novelty.reasons(self.features)
        return marks

    def text(self) -> str:
        """Return the CSV file, numbers with all their digits."""
        return self.frame().to_csv(index=False)

    def lines(self) -> list[str]:
        """Return a summary for a terminal."""
        answers = list(compress(self.predicted(), self.answered()))
        counts = ", ".join(f"{answers.count(name)} {name}" for name in self.classes)
        lines = [f"{len(answers)} predicted: {counts}", *self._novelty(len(answers))]
        lines += [*self.inputs.notes, *self._faults()]
        if self.sets is not None:
            sizes = self.sets.sum(dim=1).double()
            lines.append(
                f"classes in a set: {sizes.mean().item():.2f} on average; their coverage holds for "
                "cases like the calibration's, not for unusual ones"
            )
        metrics = self.document.get("figures", {})
        return [*lines, *(f"{name}: {value:.4f}" for name, value in metrics.items())]

    def _novelty(self, answered: int) -> list[str]:
        """Return how many cases are unlike the training samples, and by what that is known."""
        if isinstance(self.novelty, str):
            return [f"whether a case is like the training samples is not known: {self.novelty}"]
        count = int(self.novelty.unusual().sum())
        back = "" if answered == len(self.own) else ", not answered: --answer-all does"
        marked = [f"{count} unlike the training samples{back}; column 'unusual' says why"]
        return [*(marked if count else []), *self.novelty.reference.lines()]

    def _faults(self) -> list[str]:
        """Return how many inputs have no prediction, and why the first of them have none."""
        faults, inputs = self.inputs.faults, self.inputs
        if not faults:
            return []
        ids = [f" (id {one})" for one in inputs.ids] or [""] * len(inputs.names)
        shown = [
            f"  {inputs.key} {inputs.names[place]}{ids[place]}: {one_line(faults[place], 200)}"
            for place in sorted(faults)[:_LISTED]
        ]
        return [f"{len(faults)} without a prediction: column 'fault' says why", *shown]
