"""The predictions of a model, as a table for a CSV file and as a summary for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import pandas as pd
import torch
from rich.table import Table
from torch import Tensor

from fedsilo.core.one_line import one_line
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.inference.predict.case_novelty import CaseNovelty
from fedsilo.inference.predict.inputs import Inputs
from fedsilo.models.maths.mc_dropout import predictive_entropy
from fedsilo.models.tasks.task import Task, task_named
from fedsilo.pages.notebook import html_of_lines

_LISTED = 10  # largest number of faults that a terminal shows
_SEPARATOR = "|"  # separates the classes of a prediction set
COLUMNS = {
    "id": "the value of the column that --id names",
    "predicted": "the class with the largest probability",
    "p.<class>": "probability, at the calibration's temperature if one was applied",
    "entropy": "entropy in nats of the model's own probabilities, the mean over dropout passes",
    "vacuity": "for an evidential model, 0 to 1; 1 means no evidence",
    "weight.<site>": "for a mixture, the router's weight of that site's expert",
    "set": f"classes of the prediction set, '{_SEPARATOR}' between them; it may be empty",
    "imputed": "columns of the table whose missing value was replaced by the mean",
    "novelty": "distance of the case from the training samples; above 1 it is unusual",
    "unusual": "the reason why it is unusual, and so not answered unless --answer-all is given",
    "doubtful": "the reason why an answer needs a look although the case is not unusual",
    "truth": "the true class, if it is known",
    "fault": "the reason why nothing was predicted",
}


_OF_CLASSES = ("predicted", "p.<class>", "entropy", "vacuity", "weight.<site>", "set", "truth")


def columns_of(task: Task) -> dict[str, str]:
    """Return title -> meaning of each column that a table of the task's predictions may have.

    By default these are ``COLUMNS``, the columns for a classification. If the task declares columns
    for its answers (``answer_words``), they replace the columns that only a classification has.
    """
    if not task.answer_words:
        return dict(COLUMNS)
    columns = {title: words for title, words in COLUMNS.items() if title not in _OF_CLASSES}
    return {**columns, **task.answer_words}


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model for n inputs, in order; k of them could be read."""

    inputs: Inputs
    classes: tuple[str, ...]
    own: Tensor  # (k, classes) float64, the model's own probabilities
    probabilities: Tensor  # the same, at the calibration's temperature if one was applied
    statistics: Mapping[str, Tensor]  # further numbers of the method: name -> (k,)
    sets: Tensor | None  # (k, classes) bool, the prediction sets, or None if none were asked for
    features: Sequence[str] = ()  # names of a table's features; empty for images
    novelty: CaseNovelty | str = ""  # novelty of each input, or the reason why it is unknown
    answers_all: bool = True  # whether inputs that are unlike the training samples are answered
    document: Mapping[str, Any] = field(
        default_factory=dict
    )  # the content of the JSON next to the CSV file
    # The task that says what a prediction is, with the scale of a numeric outcome
    task: Task = field(default_factory=partial(task_named, CLASSIFICATION))

    @property
    def faults(self) -> Mapping[int, str]:
        """Place of an input -> the reason why its prediction is missing."""
        return self.inputs.faults

    def answered(self) -> list[bool]:
        """Tell for each readable input whether its prediction is given as an answer.

        An input is unusual if it is unlike the training samples. Unusual inputs get no answer if
        the attribute ``answers_all`` is False. If novelty is unknown, every input gets an answer.

        Returns:
            A list of bool (k), in the order of the readable inputs.
        """
        # If novelty is unknown, every case is answered, but the page marks it as doubtful
        if self.answers_all or isinstance(self.novelty, str):
            return [True] * len(self.own)
        return [not unusual for unusual in self.novelty.unusual().tolist()]

    def predicted(self) -> list[Any]:
        """Return the answer for each readable input (k), such as the name of a class."""
        answers = self.task.answer_columns(self.probabilities, self.classes)
        return next(iter(answers.values()))

    def _repr_html_(self) -> str:
        """Build HTML for a notebook: a table that counts the answers of each class, then text.

        The text is the summary for a terminal (``lines``) without its first line, which the table
        replaces. For a task that does not predict one class, there is no table, and all lines are
        shown.
        """
        if self.task.label_noun != "class":
            return html_of_lines(self.lines())
        answers = list(compress(self.predicted(), self.answered()))
        table = Table("class", "cases", title=f"{len(answers)} predicted")
        for name in self.classes:
            table.add_row(name, str(answers.count(name)))
        return html_of_lines([table, *self.lines()[1:]])

    def frame(self) -> pd.DataFrame:
        """Arrange the predictions as a data frame, with a row for each input, in order.

        If an input could not be read, its row has only the name, the patient's id if known, and the
        reason in column ``fault``. An unusual input may get no answer (see ``answered``). Its row
        then lacks the answer, the answer's probabilities and the prediction set. Entropy and
        novelty stay.
        """
        columns = self._columns()
        # k rows, each at the place of its input among all
        frame = pd.DataFrame(columns, index=self.inputs.kept())
        # Cases that are not answered keep their entropy and novelty, but not what they predict
        answers = self.task.answer_columns(self.probabilities, self.classes)
        withheld = [name for name in columns if name in answers or name == "set"]
        frame.loc[[not answered for answered in self.answered()], withheld] = None
        # Reindexing adds an empty row for each input that could not be read
        places = range(len(self.inputs.names))
        frame = frame.reindex(places)
        frame.insert(0, self.inputs.key, list(self.inputs.names))
        if self.inputs.ids:
            frame.insert(0, "id", list(self.inputs.ids))
        frame["fault"] = [self.inputs.faults.get(place) for place in places]
        return frame

    def _columns(self) -> dict[str, list[Any]]:
        """Build the columns of the table of predictions: title -> a value per readable input (k).

        The columns come in this order:

        - the answer, with its probabilities.
        - the entropy, if the task has one.
        - further ``statistics`` of the run's method, such as the weights of a mixture's experts.
        - novelty, and the reasons why an input is unusual or doubtful.
        - the prediction set.
        - the true answer.

        Columns without data are left out.
        """
        columns = self.task.answer_columns(self.probabilities, self.classes)
        if "entropy" in self.task.always:
            columns["entropy"] = predictive_entropy(self.own).tolist()
        for name, values in self.statistics.items():
            columns[name] = values.double().tolist()
        columns |= self._marks()
        if self.sets is not None:
            columns["set"] = []
            for row in self.sets:
                columns["set"].append(_SEPARATOR.join(compress(self.classes, row)))
        if self.inputs.truth is not None:
            columns |= self.task.truth_columns(self.inputs.truth, self.classes)
        return columns

    def _marks(self) -> dict[str, list[Any]]:
        """Build the columns that help a person to judge each answer: title -> list of k values.

        Each column has a value for each of the k inputs that could be read:

        - ``imputed``: the names of the table's columns in which the input has no value.
        - ``novelty``: how far the input is from the training samples.
        - ``unusual``: the reasons why the input is unlike the training samples, or empty.
        - ``doubtful``: the reasons why a person should check an input that is not unusual, or
          empty.

        If novelty is unknown, only ``imputed`` can be present. ``imputed`` and ``doubtful`` are
        left out if all their cells are empty, but ``unusual`` is not.
        """
        marks: dict[str, list[Any]] = {}
        imputed = self.inputs.imputed_columns(self.features)
        if any(imputed):
            marks["imputed"] = [", ".join(names) for names in imputed]
        if not isinstance(self.novelty, str):
            marks["novelty"] = self.novelty.scores().tolist()
            marks["unusual"] = self.novelty.reasons(self.features)
            doubts = self.novelty.doubts(self.features)
            if any(doubts):
                marks["doubtful"] = doubts
        return marks

    def text(self) -> str:
        """Return the content of the CSV file, numbers with all their digits."""
        return self.frame().to_csv(index=False)

    def lines(self) -> list[str]:
        """Summarise the predictions in lines for a terminal.

        The first line counts the answers and summarises them, for example by class. The next lines
        are about novelty, remarks on reading the inputs, and inputs that could not be read. If
        there are prediction sets, a line has the mean number of classes in a set. If the true
        answers are known, the last lines have the metrics.
        """
        answered = torch.tensor(self.answered(), dtype=torch.bool)
        count = int(answered.sum())
        summary = self.task.summarise(self.probabilities[answered], self.classes)
        lines = [f"{count} predicted: {summary}", *self._novelty(count)]
        lines += [*self.inputs.notes, *self._faults()]
        if self.sets is not None:
            sizes = self.sets.sum(dim=1).double()
            lines.append(
                f"classes per prediction set: {sizes.mean().item():.2f} on average; the coverage "
                "holds for cases like those of the calibration, but not for unusual ones"
            )
        for name, value in self.document.get("figures", {}).items():
            lines.append(f"{name}: {value:.4f}")
        return lines

    def _novelty(self, answered: int) -> list[str]:
        """Describe in lines how many inputs are unlike the training samples.

        If novelty is unknown, the only line has the reason. Otherwise a line counts the unusual
        inputs, and another line the doubtful ones. Each is left out for a count of 0. The last
        lines say which training samples were compared.

        Args:
            answered: the number of inputs with an answer. If some readable inputs have no answer,
                the line on unusual inputs names the option that gives one.
        """
        if isinstance(self.novelty, str):
            return [f"novelty is unknown: {self.novelty}"]
        lines = []
        count = int(self.novelty.unusual().sum())
        if count:
            back = ", so not answered (to answer: --answer-all)"
            if answered == len(self.own):
                back = ""
            lines.append(
                f"{count} unlike the training samples{back}; column 'unusual' has the reasons"
            )
        doubtful = sum(map(bool, self.novelty.doubts(self.features)))
        if doubtful:
            lines.append(f"{doubtful} need a look; column 'doubtful' has the reasons")
        return [*lines, *self.novelty.reference.lines()]

    def _faults(self) -> list[str]:
        """List the inputs that could not be read: a line with their number, then a line for each.

        Only the first ten are listed, each with the name, the patient's id if known, and the reason
        why it could not be read. If all inputs could be read, the list is empty.
        """
        faults, inputs = self.inputs.faults, self.inputs
        if not faults:
            return []
        lines = [f"{len(faults)} without a prediction; column 'fault' has the reasons"]
        for place in sorted(faults)[:_LISTED]:
            name = inputs.names[place]
            if inputs.ids:
                name += f" (id {inputs.ids[place]})"
            lines.append(f"  {inputs.key} {name}: {one_line(faults[place], 200)}")
        return lines
