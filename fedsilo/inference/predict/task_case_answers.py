"""The answers of a page of cases for numbers, findings and risks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsilo.client_app.training.evaluation import in_batches
from fedsilo.core.errors import DataError
from fedsilo.core.one_line import format_measure
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, SURVIVAL
from fedsilo.inference.predict.answers import Predictions
from fedsilo.inference.predict.case_answers import UNSURE, Bar, CaseAnswers, ClassAnswers
from fedsilo.models.measures.finding_metrics import finding_outcomes
from fedsilo.models.measures.regression_metrics import OutcomeBin, pool_outcome_bins
from fedsilo.models.measures.survival_curves import round_times
from fedsilo.models.measures.survival_metrics import Floats, baseline_hazard
from fedsilo.reports.clinic import final_metrics
from fedsilo.reports.tasks.shared import values_of
from fedsilo.runs.finished_run import Shown
from fedsilo.runs.trained_model import TrainedModel, refuse_other_rows

_LATER = "later than "  # before a time up to which the event is less likely than not
_HORIZONS = 4  # largest number of times at which a case's survival is shown


def case_answers(run: Shown, model: TrainedModel, predictions: Predictions) -> CaseAnswers:
    """Build the object that formats the answers on a page of cases, as the run's task needs it."""
    return _ANSWERS[predictions.task.name](run, model, predictions)


def site_values(run: Shown, model: TrainedModel) -> tuple[dict[str, float], str]:
    """Return the final test metrics of the model's site as name -> value, and a phrase about them.

    The phrase names the site. Metrics of too few patients are hidden. If all metrics of the site
    are hidden, the result has the run's means over its sites, and the phrase says so.
    """
    values, where = values_of(run, model.site)
    if not values:
        values, where = values_of(run, None)
    return dict(values), where


class NumberAnswers(CaseAnswers):
    """A number: its place on a scale, and the errors of the run's test predictions."""

    columns = ("prediction", "about 19 of 20")

    @cached_property
    def _values(self) -> tuple[dict[str, float], str]:
        return site_values(self.run, self.model)

    @cached_property
    def _bins(self) -> list[OutcomeBin]:
        return pool_outcome_bins(final_metrics(self.run).values())

    @cached_property
    def _ends(self) -> tuple[float, float]:
        """Return the lowest and the highest number of the scale on which all cases are drawn.

        The scale covers the predictions of all cases. It also covers the mean predictions and
        outcomes of the groups in which the run stores test samples. On both sides, it is extended
        by twice the root mean square error on test samples. If the two ends would be equal, it is
        extended by 1.
        """
        numbers = self.predictions.probabilities[:, 0].tolist()
        for one in self._bins:
            numbers += [one.predicted, one.observed]
        # All cases share the scale, so that their points can be compared down the page
        reach = 2 * self._values[0].get("rmse", 0.0)
        low, high = min(numbers) - reach, max(numbers) + reach
        if low == high:
            return low - 1.0, high + 1.0
        return low, high

    def _interval(self, index: int) -> tuple[float, float] | None:
        """Return the ends of the range that holds about 19 of 20 outcomes of cases like this one.

        The ends are the predicted number minus and plus twice the root mean square error on test
        samples. This assumes that errors are about normally distributed. If the error is unknown,
        the result is None. ``index`` is the case's index among the readable inputs.
        """
        error = self._values[0].get("rmse")
        if error is None:
            return None
        number = float(self.predictions.probabilities[index, 0])
        return number - 2 * error, number + 2 * error

    def question(self) -> str:
        """Name the outcome with its unit."""
        return f"which {self.predictions.classes[0]} to expect of"

    def cells(self, index: int) -> list[str]:
        """Format the predicted number of a case and its range as two cells of the overview table.

        ``_interval`` gives the range, which holds about 19 of 20 outcomes. If it is unknown, the
        second cell is "-". ``index`` is the case's index among the readable inputs.
        """
        interval = self._interval(index)
        texts = [format_measure(float(self.predictions.probabilities[index, 0])), "-"]
        if interval:
            texts[1] = f"{format_measure(interval[0])} to {format_measure(interval[1])}"
        return texts

    def explained_number(self, index: int) -> str:
        """Name the prediction."""
        return f"the prediction, {self.predictions.classes[0]}"

    def bars(self, index: int) -> list[Bar]:
        """Build the bar of a predicted number, as a list of one: a point on the scale of all cases.

        If the run's errors on test samples are known, the bar also has the range that holds about
        19 of 20 outcomes. Positions are given from 0 at the low end of the scale to 1 at the high
        end. ``index`` is the case's index among the readable inputs.
        """
        low, high = self._ends

        def place(number: float) -> float:
            return (number - low) / (high - low)

        number = float(self.predictions.probabilities[index, 0])
        text, interval = format_measure(number), self._interval(index)
        ends: tuple[float | None, float | None] = (None, None)
        if interval:
            low_end, high_end = format_measure(interval[0]), format_measure(interval[1])
            text += f" (about 19 of 20: {low_end} to {high_end})"
            ends = place(interval[0]), place(interval[1])
        return [Bar(self.predictions.classes[0], place(number), text, *ends, is_point=True)]

    def notes(self, index: int) -> list[str]:
        """Describe in a list of one sentence the outcomes of test samples with similar predictions.

        The run stores test samples in groups of similar predictions. The sentence is about the
        group whose mean prediction is nearest to the prediction for the case. If no group is within
        the root mean square error on test samples, the list is empty. ``index`` is the case's index
        among the readable inputs.
        """
        number = float(self.predictions.probabilities[index, 0])
        nearest, distance = None, self._values[0].get("rmse", 0.0)
        for one in self._bins:
            if abs(one.predicted - number) <= distance:
                nearest, distance = one, abs(one.predicted - number)
        if nearest is None:
            return []
        predicted, observed = format_measure(nearest.predicted), format_measure(nearest.observed)
        return [
            f"{nearest.count} test samples with similar predictions, {predicted} on average, had a "
            f"mean outcome of {observed}."
        ]

    def limits(self) -> list[str]:
        """List sentences on the errors of test predictions, and on the range of a predicted number.

        One sentence states the ends of the scale that all cases share. If the errors are unknown,
        or hidden because of too few patients, another sentence says that numbers have no range.
        """
        values, where = self._values
        low, high = (format_measure(end) for end in self._ends)
        scale = f"The grey strip goes from {low} to {high} for all cases."
        if "rmse" not in values:
            return [scale, "The run has no errors that may be shown, so a number has no range."]
        mae, rmse = format_measure(values["mae"]), format_measure(values["rmse"])
        return [
            f"Test predictions were off by {mae} on average (MAE, {where}); their root mean square "
            f"error is {rmse}.",
            "The range is the prediction minus and plus two root mean square errors. About 19 of "
            "20 outcomes are within it if errors are about normal, and as large for all patients. "
            + scale,
        ]


class FindingAnswers(CaseAnswers):
    """Several findings: the probability of each."""

    columns = ("findings", "least sure")
    last = "those with a finding of which the model is least sure"

    def question(self) -> str:
        """Name the findings."""
        return f"which findings are present ({', '.join(self.predictions.classes)}) in"

    @cached_property
    def _texts(self) -> list[str]:
        return list(self.predictions.predicted())

    def cells(self, index: int) -> list[str]:
        """Format an answer of several findings as two cells of the overview table.

        The first cell lists the findings with a probability of at least 0.5, or says "no finding".
        The second cell has the finding whose probability is nearest to 0.5, and this probability.
        ``index`` is the case's index among the readable inputs.
        """
        shares = self.predictions.probabilities[index].tolist()
        # Near 0.5 a small change would make another answer, so this finding needs a look first
        place = int(np.argmin([abs(share - 0.5) for share in shares]))
        unsure = f"{self.predictions.classes[place]} {shares[place]:.2f}"
        return [self._texts[index].replace(";", ", ") or "no finding", unsure]

    def explained_number(self, index: int) -> str:
        """Name the most probable finding, whose probability a table's columns add to."""
        place = int(self.predictions.own[index].argmax())
        return f"the probability of {self.predictions.classes[place]}"

    def bars(self, index: int) -> list[Bar]:
        """Return a bar with the probability of each finding, the most probable finding first.

        ``index`` counts the readable inputs.
        """
        shares = self.predictions.probabilities[index].tolist()
        rows = []
        for place in np.argsort(shares)[::-1]:
            rows.append(Bar(self.predictions.classes[place], shares[place], f"{shares[place]:.2f}"))
        return rows

    def is_unsure(self, index: int) -> bool:
        """Tell whether some finding's probability is between 0.2 and 0.8."""
        return self.rank(index) < UNSURE

    def rank(self, index: int) -> float:
        """Return the certainty of the least certain finding, 0.5 to 1."""
        probabilities = self.predictions.probabilities[index]
        return float(probabilities.maximum(1 - probabilities).min())

    def limits(self) -> list[str]:
        """List sentences on what the probabilities of findings mean.

        The last sentence has each finding's AUC on test samples, the mean over the sites with a
        known AUC. An AUC of too few patients is hidden and counts as unknown. If no AUC is known,
        the sentence is left out.
        """
        said = [
            "A probability is the model's, and nobody has compared it with how often the finding "
            "is present. A finding counts as present from 0.5. Findings are judged one by one."
        ]
        areas: dict[str, list[float]] = {}
        for by_name in final_metrics(self.run).values():
            for outcome in finding_outcomes(by_name, list(self.predictions.classes)):
                if outcome.auc is not None:
                    areas.setdefault(outcome.name, []).append(outcome.auc)
        texts = [f"{name} {sum(found) / len(found):.2f}" for name, found in areas.items()]
        if texts:
            said.append(
                f"AUC on test samples, the mean over the hospitals that may show it: "
                f"{', '.join(texts)}. It says how often a sample with the finding gets a higher "
                "probability of it than one without."
            )
        return said


@dataclass(frozen=True)
class _Baseline:
    """The cumulative hazard of the site's median training patient.

    Attributes:
        patients: the number of training patients.
        risk: their median risk, a log hazard.
        times: the times of events, rising, (k,), up to the last one with enough patients followed.
        hazard: the cumulative hazard up to each of them, (k,); empty if there are too few events.
    """

    patients: int
    risk: float
    times: Floats
    hazard: Floats

    def survival(self, risk: float) -> Floats:
        """Return the probability that a patient has no event up to each of ``times``, (k,).

        ``risk`` is the log hazard that the model predicts for the patient.
        """
        # A network may give a risk whose exponential overflows; beyond 50 the survival is 0 or 1
        survival: Floats = np.exp(-self.hazard * np.exp(np.clip(risk - self.risk, -50.0, 50.0)))
        return survival


def _estimate_baseline(model: TrainedModel, floor: int) -> _Baseline:
    """Estimate the baseline hazard from the training patients of the model's site.

    The result is Breslow's estimate of the cumulative hazard of a patient with the median predicted
    risk. Its steps must not reveal single patients. So a time is left out if fewer than ``floor``
    patients are followed beyond it. If fewer than ``floor`` patients had the event, all times are
    left out.

    Raises:
        DataError: the training patients have changed since the run.
    """
    # The network knows no baseline, so the survival rests on patients whose times are known here.
    # These are the training patients: the few test patients are those that the page may be about
    refuse_other_rows(model, "train")
    split = model.samples("train")
    times, events = split.labels.double().numpy().T
    risks = model.probabilities(in_batches(split.inputs), "train")[:, 0].double().numpy()
    middle = float(np.median(risks))
    if events.sum() < floor:
        return _Baseline(len(times), middle, times[:0], times[:0])
    distinct, hazard = baseline_hazard(times, events, np.clip(risks - middle, -50.0, 50.0))
    # Beyond these times a step of the curve would be a single patient's
    followed = len(times) - np.searchsorted(np.sort(times), distinct, side="right")
    enough = followed >= floor
    return _Baseline(len(times), middle, distinct[enough], hazard[enough])


class RiskAnswers(CaseAnswers):
    """The time to an event: the hazard beside the site's patients, and the survival over time."""

    columns = ("hazard ratio", "half without the event until")
    last = "the others from the highest risk to the lowest"

    @cached_property
    def _baseline(self) -> _Baseline | str:
        """The site's baseline hazard, or the reason why it is unknown."""
        try:
            return _estimate_baseline(self.model, self.run.floor)
        except DataError as error:
            return str(error)

    def _risk(self, index: int) -> float:
        return float(self.predictions.probabilities[index, 0])

    def question(self) -> str:
        """Name the event."""
        return f"how soon to expect the event '{self.predictions.classes[0]}' for"

    def cells(self, index: int) -> list[str]:
        """Format the risk of a case as two cells: hazard ratio and median time to the event.

        The hazard ratio compares the case with the site's training patient of median risk. A cell
        is "-" if its number is unknown, for example because the training data have changed since
        the run. ``index`` counts the readable inputs.
        """
        baseline = self._baseline
        if isinstance(baseline, str):
            return ["-", "-"]
        return [format_measure(np.exp(self._risk(index) - baseline.risk)), self._median(index)]

    def _median(self, index: int) -> str:
        """Format the time by which half of the patients with a case's risk have had the event.

        If less than half of these patients have had the event at the last known time, the text says
        that the median is later than this time. If no survival is known, the text is "-". ``index``
        is the case's index among the readable inputs.
        """
        baseline = self._baseline
        if isinstance(baseline, str) or not len(baseline.times):
            return "-"
        # The curve falls only at events, so the median is the first one at which it is 0.5 or less
        below = np.flatnonzero(baseline.survival(self._risk(index)) <= 0.5)
        if not len(below):
            return f"{_LATER}{baseline.times[-1]:g}"
        return f"{baseline.times[below[0]]:g}"

    def explained_number(self, index: int) -> str:
        """Name the logarithm of the hazard."""
        return "the logarithm of the hazard"

    def rank(self, index: int) -> float:
        """Return minus the risk (the log hazard), so that the highest risk comes first."""
        return -self._risk(index)

    def bars(self, index: int) -> list[Bar]:
        """Build bars that show a case's survival at up to four round points in time.

        A bar shows the share of patients with the case's risk who have no event up to the time of
        the bar. The shares are computed from the case's risk and the baseline hazard of the site's
        training patients. If the baseline hazard is unknown, the list is empty. ``index`` is the
        case's index among the readable inputs.
        """
        baseline = self._baseline
        if isinstance(baseline, str) or not len(baseline.times):
            return []
        survival, rows = baseline.survival(self._risk(index)), []
        for time in round_times(float(baseline.times[-1]), _HORIZONS):
            before = np.searchsorted(baseline.times, time, side="right")
            share = float(survival[before - 1]) if before else 1.0
            rows.append(Bar(f"without the event at {time:g}:", share, f"{share:.0%}"))
        return rows

    def notes(self, index: int) -> list[str]:
        """Compare a case with the site's training patient of median risk, in sentences.

        The first sentence has the hazard ratio. The second has the median time to the event, and is
        left out if this time is unknown. If the hazard ratio is unknown, the list is empty.
        ``index`` is the case's index among the readable inputs.
        """
        ratio, median = self.cells(index)
        if ratio == "-":
            return []
        said = [
            f"The hazard is {ratio} times that of the median training patient of {self.model.site}."
        ]
        if median.startswith(_LATER):
            time = median.removeprefix(_LATER)
            said.append(f"More than half of such patients are without the event at {time}.")
        elif median != "-":
            said.append(f"Half of such patients have had the event by {median}.")
        return said

    def limits(self) -> list[str]:
        """List texts that tell a reader how survival is estimated, and how accurate the risks are.

        The first text says how survival is estimated, or why it cannot be shown. The last text has
        the C-index on test samples. It is left out if the C-index is hidden because of too few
        patients.
        """
        values, where = site_values(self.run, self.model)
        baseline, said = self._baseline, []
        if isinstance(baseline, str):
            said.append(f"There is no hazard ratio and no survival: {baseline}.")
        elif not len(baseline.times):
            said.append(
                f"No survival is shown: fewer than {self.run.floor} of {baseline.patients} "
                f"training patients of {self.model.site} had the event, or fewer than "
                f"{self.run.floor} are followed after each event."
            )
        else:
            said.append(
                f"The survival is that of {baseline.patients} training patients of "
                f"{self.model.site} (Breslow's estimate), made better or worse by the case's "
                "hazard ratio. Times are in the unit of the data, up to the last one after which "
                f"{self.run.floor} patients are followed. At another hospital survival can "
                "differ, and it has no interval."
            )
        if "c-index" in values:
            said.append(
                f"The C-index on test samples is {values['c-index']:.2f} ({where}): the share of "
                "pairs of patients whose order the model gets right; chance is 0.5."
            )
        return said


_ANSWERS: dict[str, type[CaseAnswers]] = {
    CLASSIFICATION: ClassAnswers,
    REGRESSION: NumberAnswers,
    MULTI_LABEL: FindingAnswers,
    SURVIVAL: RiskAnswers,
}
