"""The answers of a page of cases: the base class of all tasks, and the answers of classes.

``task_case_answers.py`` has the answers of the other tasks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import ClassVar, NamedTuple

import numpy as np

from fedsilo.core.metric_names import CONFIDENCE
from fedsilo.inference.predict.answers import Predictions
from fedsilo.models.measures.intervals import Interval, wilson
from fedsilo.models.measures.outcome_counts import Bin, bins, merge_bins
from fedsilo.reports.clinic import final_metrics
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel

UNSURE = 0.8  # a case whose answer has a lower probability needs a look


class Bar(NamedTuple):
    """A line of a case: a name, a bar and a text.

    The bar shows ``share``, from 0 to 1, and the interval from ``low`` to ``high`` unless these are
    None. If ``is_point`` is true, it shows a point on a scale instead, such as for a number.
    """

    name: str
    share: float
    text: str
    low: float | None = None
    high: float | None = None
    is_point: bool = False


@dataclass(frozen=True)
class CaseAnswers(ABC):
    """The answers of a page of cases.

    The methods take the index of a case among the readable inputs.

    Class attributes:
        columns: the titles of the answer's cells in the overview table.
        last: the words for the cases that come last in the overview, which end a sentence.
        has_sets: whether there can be prediction sets.
    """

    run: Shown
    model: TrainedModel
    predictions: Predictions

    columns: ClassVar[tuple[str, ...]] = ("answer",)
    last: ClassVar[str] = "the others in their order"
    has_sets: ClassVar[bool] = False

    @abstractmethod
    def question(self) -> str:
        """Return the words for the model's question, which the page ends with "each of 5 cases".

        An example is "which of a, b applies to".
        """

    @abstractmethod
    def cells(self, index: int) -> list[str]:
        """Return the answer's cells in the overview table, one for each of ``columns``."""

    @abstractmethod
    def bars(self, index: int) -> list[Bar]:
        """Return the lines with bars that show the answer."""

    @abstractmethod
    def explained_number(self, index: int) -> str:
        """Name the number that a table's columns add to, such as "the probability of ill"."""

    def notes(self, index: int) -> list[str]:
        """Return further sentences about the answer, by default none."""
        return []

    def is_unsure(self, index: int) -> bool:
        """Tell whether the model is unsure about a case, by default never."""
        return False

    def rank(self, index: int) -> float:
        """Return the number that sorts cases of one state, the smallest first; by default 0."""
        return 0.0

    def limits(self) -> list[str]:
        """Return sentences on how to read the answers, and on what is missing; by default none."""
        return []


class ClassAnswers(CaseAnswers):
    """One of several classes: its probability, and how often such answers were right."""

    columns = ("answer", "probability")
    last = "those of which the model is least sure"
    has_sets = True

    @cached_property
    def reliability(self) -> list[Bin]:
        """The bins of the test samples by confidence, the same as in the clinic report.

        Other bins over the same samples would reveal counts, by the difference between the pages.
        """
        return merge_bins(bins(final_metrics(self.run).values(), CONFIDENCE), self.run.floor)

    def question(self) -> str:
        """Name the classes."""
        return f"which of {', '.join(self.predictions.classes)} applies to"

    def cells(self, index: int) -> list[str]:
        """Return the most probable class and its probability."""
        share = float(self.predictions.probabilities[index].max())
        return [self._answers[index], f"{share:.2f}"]

    @cached_property
    def _answers(self) -> Sequence[str]:
        return self.predictions.predicted()

    def explained_number(self, index: int) -> str:
        """Name the probability of the answer."""
        return f"the probability of {self._answers[index]}"

    def is_unsure(self, index: int) -> bool:
        """Tell whether an answer is uncertain, so that a person should look at the case.

        An answer is uncertain if its probability, after any calibration, is below 0.8. It is also
        uncertain if there are prediction sets and the case's set does not have exactly one class.
        ``index`` is the case's index among the readable inputs.
        """
        sets = self.predictions.sets
        if sets is not None and int(sets[index].sum()) != 1:
            return True
        return bool(self.predictions.probabilities[index].max() < UNSURE)

    def rank(self, index: int) -> float:
        """Return the probability of the answer, so that the least sure case comes first."""
        return float(self.predictions.probabilities[index].max())

    def bars(self, index: int) -> list[Bar]:
        """Build a bar for each class with its probability, the most probable class first.

        The first bar also has a 95 % interval: how often the run's test samples with a similar
        confidence were right. The interval is left out if ``_similar`` finds no such samples.
        ``index`` is the case's index among the readable inputs.
        """
        shares = self.predictions.probabilities[index].tolist()
        interval = self._interval(index)
        rows: list[Bar] = []
        for place in np.argsort(shares)[::-1]:
            bar = Bar(self.predictions.classes[place], shares[place], f"{shares[place]:.2f}")
            if interval and not rows:
                bar = bar._replace(low=interval.low, high=interval.high)
            rows.append(bar)
        return rows

    def _interval(self, index: int) -> Interval | None:
        similar = self._similar(index)
        if similar is None:
            return None
        return wilson(similar.right, similar.count)

    def _similar(self, index: int) -> Bin | None:
        """Find the run's test samples that were predicted about as confidently as a case.

        Confidence is the largest probability before calibration. The run stores test samples in
        bins by confidence. The result is the bin whose mean confidence is nearest to the case's. If
        two bins are equally near, the first one is returned. If no bin is nearer than 0.1, the
        result is None.
        """
        # Bins count the model's own confidence, without a calibration's temperature
        sure = float(self.predictions.own[index].max())
        nearest = None
        distance = 0.1
        for candidate in self.reliability:
            if abs(candidate.mean - sure) < distance:
                nearest = candidate
                distance = abs(candidate.mean - sure)
        return nearest

    def notes(self, index: int) -> list[str]:
        """List sentences about the answer to a case, each only if its numbers are available.

        - how many of the run's test samples with a similar confidence were right, with a 95 %
          interval.
        - the classes in the prediction set.
        - for a mixture of the sites' models (experts), the weight of each expert.

        ``index`` is the case's index among the readable inputs.
        """
        predictions, notes = self.predictions, []
        similar = self._similar(index)
        if similar:
            interval = wilson(similar.right, similar.count)
            before = " before calibration"
            if predictions.probabilities is predictions.own:
                before = ""
            notes.append(
                f"Of {similar.count} test samples of the run with a probability of about "
                f"{similar.mean:.2f}{before}, {similar.right / similar.count:.0%} were right (95 % "
                f"interval {interval.low:.0%} to {interval.high:.0%})."
            )
        if predictions.sets is not None:
            names = list(compress(predictions.classes, predictions.sets[index]))
            notes.append(f"Prediction set: {', '.join(names) or 'empty: no class fits'}.")
        return [*notes, *self._router(index)]

    def _router(self, index: int) -> list[str]:
        """Describe how much the expert of each site contributed to an answer.

        An expert is a site's model in a mixture, whose router gives each expert a weight. The
        description is one sentence, in which the largest weight comes first. It is returned in a
        list, which is empty if the predictions have no such weights.
        """
        weights = []
        for name, values in self.predictions.statistics.items():
            if name.startswith("weight."):
                weights.append((name.removeprefix("weight."), float(values[index])))
        if not weights:
            return []
        weights.sort(key=lambda pair: -pair[1])
        said = ", ".join(f"{site} {share:.0%}" for site, share in weights)
        return [f"The router's share of each site's expert: {said}."]

    def limits(self) -> list[str]:
        """List sentences on the meaning of the bars and their intervals.

        If the run did not count the right answers on test samples by probability, the last sentence
        says that the bars have no interval.
        """
        said = [
            "A probability is the model's. The black line on the bar of the answer is the share of "
            "right answers that the run's test samples had at about this probability, with its "
            "95 % interval."
        ]
        if not self.reliability:
            said.append(
                f"The run, made for trust {self.model.common.trust}, has recorded no counts of "
                "right answers by probability: the bars have no interval."
            )
        return said
