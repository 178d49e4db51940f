"""Metrics of times to an event that may be censored: C-index, Kaplan-Meier curve, Brier score.

Censored means that a patient's follow-up ended before the event. All functions take the patients of
one hospital: their times and events are compared only with each other.

Equations (doi:10.1001/jama.1982.03320430047030):
  (C-index) share of comparable pairs in the right order -> concordance
Equations (doi:10.1080/01621459.1958.10501452):
  (Kaplan-Meier) product over event times of 1 - d / n -> kaplan_meier
Equations (doi:10.1002/(SICI)1097-0258(19990915/30)18:17/18<2529::AID-SIM274>3.0.CO;2-5):
  (Brier score) squared error of survival, weighted by 1 / G of censoring -> brier_score
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_WIDTH = 1.959963984540054  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True)
class SurvivalCurve:
    """A Kaplan-Meier estimate; it is 1 before the first event and constant between events.

    Attributes:
        times: the distinct times of events, rising, (k,).
        survival: the share that survives beyond each of them, (k,), 0 to 1.
        variance: Greenwood's sum of d / (n (n - d)) up to each of them, (k,); infinite where nobody
            is left.
        at_risk: the number of patients at risk at each of them, (k,).
        events: the number of events at each of them, (k,).
    """

    times: Floats
    survival: Floats
    variance: Floats
    at_risk: Floats
    events: Floats

    def at(self, times: Floats) -> Floats:
        """Return the survival at ``times`` (m,), after the events at each time."""
        return self._steps(times, "right")

    def before(self, times: Floats) -> Floats:
        """Return the survival just before ``times`` (m,), without the events at each time."""
        return self._steps(times, "left")

    def band(self) -> tuple[Floats, Floats]:
        """Return the lower and upper ends of the 95 % interval of ``survival``, (k,) each.

        The interval is symmetric on the scale log(-log S), so it stays between 0 and 1. Where the
        survival is exactly 0 or 1, both ends equal the survival.
        """
        inside = (self.survival > 0) & (self.survival < 1)
        low, high = self.survival.copy(), self.survival.copy()
        logarithm = np.log(self.survival[inside])
        width = _WIDTH * np.sqrt(self.variance[inside]) / np.abs(logarithm)
        low[inside] = np.exp(logarithm * np.exp(width))
        high[inside] = np.exp(logarithm * np.exp(-width))
        return low, high

    def _steps(self, times: Floats, side: Literal["left", "right"]) -> Floats:
        return np.concatenate([[1.0], self.survival])[np.searchsorted(self.times, times, side)]


def kaplan_meier(times: Floats, events: Floats) -> SurvivalCurve:
    """Estimate the share of patients without the event over time (Kaplan and Meier 1958).

    At each distinct time of an event the share is multiplied by 1 - d / n, for d events among n
    patients at risk. A patient is at risk up to and including the patient's own time. A patient who
    is censored at the time of an event is therefore still at risk.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).

    Returns:
        The curve at the distinct times of events. Without any event its arrays are empty, and the
        share is 1 at all times.
    """
    distinct, deaths = np.unique(times[events == 1], return_counts=True)
    at_risk = len(times) - np.searchsorted(np.sort(times), distinct, side="left")
    return _product_limit(distinct, at_risk.astype(np.float64), deaths.astype(np.float64))


def censoring_curve(times: Floats, events: Floats) -> SurvivalCurve:
    """Estimate the share of patients who are not censored yet, as a curve over time.

    This is a Kaplan-Meier curve whose events are the censorings. If an event and a censoring have
    the same time, the event comes first. The patient with the event is then no longer at risk of
    censoring.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).
    """
    distinct, censored = np.unique(times[events == 0], return_counts=True)
    at_risk = len(times) - np.searchsorted(np.sort(times), distinct, side="left")
    ordered = np.sort(times[events == 1])
    dying = np.searchsorted(ordered, distinct, "right") - np.searchsorted(ordered, distinct, "left")
    return _product_limit(
        distinct, (at_risk - dying).astype(np.float64), censored.astype(np.float64)
    )


def _product_limit(distinct: Floats, at_risk: Floats, deaths: Floats) -> SurvivalCurve:
    """Build a Kaplan-Meier curve from the deaths and the patients at risk at each time.

    At each time the survival is multiplied by 1 - d / n, for d deaths among n patients at risk. The
    variance of log(survival) is Greenwood's running sum of d / (n (n - d)). Once all patients at
    risk have died, the variance is infinite.

    Args:
        distinct: the times of deaths, rising, (k,).
        at_risk: n at each time, (k,).
        deaths: d at each time, (k,).
    """
    left = at_risk - deaths
    # Without anybody left the survival is 0, and its variance has no meaning
    terms = np.divide(deaths, at_risk * left, out=np.full_like(deaths, np.inf), where=left > 0)
    survival = np.cumprod(left / at_risk, dtype=np.float64)
    return SurvivalCurve(distinct, survival, np.cumsum(terms), at_risk, deaths)


def concordance(times: Floats, events: Floats, risks: Floats) -> float | None:
    """Compute Harrell's C-index: how often the patient of higher risk has the event earlier.

    Only comparable pairs count. A pair is comparable if the patient with the shorter time had the
    event. With equal times, exactly one of the two must have had it, and this patient counts as
    earlier. A pair of equal risks counts one half.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).
        risks: predicted risks, (n,). A higher risk predicts an earlier event.

    Returns:
        The index, from 0 to 1, which is 0.5 for random risks. None without a comparable pair.
    """
    right = pairs = 0.0
    for place in np.flatnonzero(events == 1):
        # A patient who is censored at the time of an event had not had it yet, so counts as later
        later = (times > times[place]) | ((times == times[place]) & (events == 0))
        others = risks[later]
        pairs += len(others)
        right += float((others < risks[place]).sum()) + 0.5 * float((others == risks[place]).sum())
    if not pairs:
        return None
    return right / pairs


def baseline_hazard(times: Floats, events: Floats, risks: Floats) -> tuple[Floats, Floats]:
    """Estimate the cumulative baseline hazard by Breslow's method.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).
        risks: the log hazard ratio of each patient, (n,).

    Returns:
        The distinct times of events, rising, and the cumulative hazard at each of them for a
        patient whose log hazard ratio is 0, (k,) each.
    """
    distinct, deaths = np.unique(times[events == 1], return_counts=True)
    weights = np.exp(risks)
    order = np.argsort(times)
    at_risk = np.cumsum(weights[order][::-1])[::-1]
    total = at_risk[np.searchsorted(times[order], distinct, side="left")]
    return distinct, np.cumsum(deaths / total)


def brier_score(times: Floats, events: Floats, survival: Floats, horizons: Floats) -> Floats:
    """Compute the Brier score of predicted survival at each of several times.

    The score at a time t is a weighted mean squared error. G is the Kaplan-Meier estimate of the
    probability of not being censored yet, at least 1e-12.

    - Event at or before t: the true value is 0, and the weight is 1 / G just before the event.
    - Followed beyond t: the true value is 1, and the weight is 1 / G(t).
    - Censored at or before t: the weight is 0, but the patient counts in the mean.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).
        survival: predicted probabilities of surviving beyond each time t, (n, k).
        horizons: the k times t, (k,). At least one patient must be followed beyond each.

    Returns:
        The scores, (k,). 0 is perfect, and a constant prediction of 0.5 has about 0.25.
    """
    censoring = censoring_curve(times, events)
    # Censorings at the time of an event come after it, so they do not change this event's weight
    weights_of_dead = 1 / np.maximum(censoring.before(times), 1e-12)
    scores = np.empty(len(horizons))
    for place, horizon in enumerate(horizons):
        alive = times > horizon
        dead = (times <= horizon) & (events == 1)
        weight = 1 / max(float(censoring.at(np.array([horizon]))[0]), 1e-12)
        predicted = survival[:, place]
        wrong = weights_of_dead * dead * np.square(predicted)
        wrong += weight * alive * np.square(1 - predicted)
        scores[place] = wrong.mean()
    return scores


def integrated_brier_score(times: Floats, events: Floats, risks: Floats) -> float | None:
    """Compute the Brier score of a Cox model, averaged over the times of events.

    A patient's predicted survival is exp(-H exp(risk)). The baseline hazard H is estimated from the
    same patients, so the score tells only how well the risks separate them. The average is an
    integral by the trapezoidal rule, divided by its length. It covers the times of events before
    the end of follow-up.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).
        risks: log hazard ratios, (n,). They are limited to 50 above and below their mean.

    Returns:
        The mean score, at least 0. Lower is better. None if there are fewer than two distinct times
        of events before the end of follow-up.
    """
    # A common shift of all risks moves the baseline only, and exp of a large risk would overflow
    centred = np.clip(risks - risks.mean(), -50.0, 50.0)
    distinct, hazard = baseline_hazard(times, events, centred)
    # Nobody is followed beyond the last time, so the weights are not defined there
    followed = distinct < times.max(initial=-np.inf)
    horizons, hazard = distinct[followed], hazard[followed]
    if len(horizons) < 2:
        return None
    survival = np.exp(-hazard[None, :] * np.exp(centred)[:, None])
    scores = brier_score(times, events, survival, horizons)
    return float(np.trapezoid(scores, horizons) / (horizons[-1] - horizons[0]))
