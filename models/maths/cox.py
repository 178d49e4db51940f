"""Cox's proportional hazards model from sums over the patients of each hospital.

The model is stratified by hospital: each hospital has a baseline hazard of its own, so a patient is
compared only with patients of the same hospital. Therefore log partial likelihood, gradient and
Hessian of all hospitals are the sums of the hospitals' own.

Equations (doi:10.1111/j.2517-6161.1972.tb00899.x):
  (partial likelihood) product over events of exp(eta) / sum of exp(eta) at risk -> cox_sums
Equations (doi:10.2307/2529620):
  (Breslow's ties) all patients who die at one time are at risk for each of them -> cox_sums
Equations (doi:10.1080/01621459.1977.10480613):
  (Efron's ties) the l-th of d deaths at one time leaves l / d of these d patients out -> cox_sums
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Ties = Literal["efron", "breslow"]

# exp(-300) squared is still a float64 above 0, so no sum over patients at risk becomes 0
_MOST_DISTANCE = 300.0


@dataclass(frozen=True)
class FollowUp:
    """How long each patient was followed, and whether the event ended it.

    Attributes:
        times: the time to the event or to the end of follow-up, (n,), at least 0.
        events: 1 if the event happened at that time, 0 if the patient is censored, (n,).
        ties: how events at the same time count.
    """

    times: Floats
    events: Floats
    ties: Ties = "efron"

    def __len__(self) -> int:
        return len(self.times)

    def risk_sets(self) -> "RiskSets":
        """Build the index of times that sums over the patients at risk need.

        The distinct times of events and censorings are numbered from 0 in rising order. The result
        holds, for each patient, the number of the patient's time. It also holds the indices of the
        patients with an event, and how many events each distinct time has.
        """
        distinct, places = np.unique(self.times, return_inverse=True)
        places = places.reshape(-1)
        is_event = self.events == 1
        deaths = np.bincount(places[is_event], minlength=len(distinct))
        return RiskSets(places, np.flatnonzero(is_event), deaths)


@dataclass(frozen=True)
class RiskSets:
    """The patients at risk at each distinct time.

    Attributes:
        places: the index of each patient's time among the distinct times, (n,).
        dying: the indices of the patients with an event, (events,).
        deaths: the number of events at each distinct time, (times,).
    """

    places: Whole
    dying: Whole
    deaths: Whole

    def at_risk(self, values: Floats) -> Floats:
        """Sum the patients' values (n, ...) over those at risk at each distinct time, (times, ...).

        A patient is at risk at all times up to its own. The earliest time comes first.
        """
        return np.cumsum(self._by_time(values, self.places)[::-1], axis=0)[::-1]

    def at_death(self, values: Floats) -> Floats:
        """Sum the values (n, ...) of patients with an event at each distinct time, (times, ...).

        The earliest time comes first. A time without an event gets 0.
        """
        return self._by_time(values[self.dying], self.places[self.dying])

    def _by_time(self, values: Floats, places: Whole) -> Floats:
        totals = np.zeros((len(self.deaths), *values.shape[1:]))
        np.add.at(totals, places, values)
        return totals

    def tied_shares(self, ties: Ties) -> Floats:
        """Compute the share of the tied patients that each event leaves out of its risk set.

        Tied patients have their event at the same time. Efron's method treats d tied events as if
        they followed each other. The first leaves out none of the tied patients, the second 1 / d
        of them, the third 2 / d. Breslow's method always leaves out none.

        Returns:
            The share for each event, (events,), in the order of the attribute ``dying``.
        """
        shares = np.zeros(len(self.dying))
        if ties == "breslow":
            return shares
        seen = np.zeros(len(self.deaths), dtype=np.int64)
        for number, place in enumerate(self.places[self.dying].tolist()):
            shares[number] = seen[place] / self.deaths[place]
            seen[place] += 1
        return shares


@dataclass(frozen=True)
class CoxSums:
    """Log partial likelihood, gradient (k,) and minus the second derivatives (k, k) at ``beta``."""

    objective: float
    gradient: Floats
    hessian: Floats


def cox_sums(x: Floats, follow_up: FollowUp, beta: Floats) -> CoxSums:
    """Compute one hospital's log partial likelihood at ``beta``, its gradient and its Hessian.

    Each event compares its patient with all patients of the hospital who are still at risk.
    ``follow_up.ties`` selects Efron's or Breslow's method for events at the same time. The Hessian
    is minus the second derivatives. Adding the results of several hospitals gives a model
    stratified by hospital.

    Args:
        x: the patients' columns, (n, k), without an intercept, which would cancel.
        follow_up: times and events of these n patients.
        beta: the coefficients, (k,).
    """
    sets = follow_up.risk_sets()
    eta, weights = _relative_hazards(x, beta)
    places, shares = sets.places[sets.dying], sets.tied_shares(follow_up.ties)
    # The total hazard of the patients at risk at each event, and the mean of their columns
    total = sets.at_risk(weights)[places] - shares * sets.at_death(weights)[places]
    weighted = x * weights[:, None]
    means = sets.at_risk(weighted)[places] - shares[:, None] * sets.at_death(weighted)[places]
    means = means / total[:, None]
    # The Hessian is a sum of covariances over risk sets: E[x x'] - E[x] E[x]'. The first part is
    # summed by patient and the second by event, so no matrix per event is needed
    spread = _total_risks(sets, weights, total, shares)
    return CoxSums(
        float(eta[sets.dying].sum() - np.log(total).sum()),
        x[sets.dying].sum(axis=0) - means.sum(axis=0),
        (x * spread[:, None]).T @ x - means.T @ means,
    )


def risks_and_residuals(x: Floats, follow_up: FollowUp, beta: Floats) -> tuple[Floats, Floats]:
    """Compute each patient's Hessian weight and martingale residual in Cox's model.

    At each event, a patient at risk has a probability p of being the one with the event. It is
    exp(x beta), divided by the sum of exp(x beta) over all patients at risk.

    - The weight sums p (1 - p) over the events at which the patient is at risk.
    - The residual is the patient's event indicator, 0 or 1, minus the sum of p over those events.

    Events at the same time count by Breslow's method, whatever ``follow_up.ties`` is.

    Args:
        x: the patients' columns, (n, k).
        follow_up: times and events of these n patients.
        beta: the coefficients, (k,).

    Returns:
        The weights and the residuals, (n,) each.
    """
    sets = follow_up.risk_sets()
    _, weights = _relative_hazards(x, beta)
    total = sets.at_risk(weights)
    # A patient is at risk at all events up to its own time, so sums over them are cumulative
    hazard = np.cumsum(sets.deaths / total)[sets.places]
    squared = np.cumsum(sets.deaths / np.square(total))[sets.places]
    expected = weights * hazard
    return expected - np.square(weights) * squared, follow_up.events - expected


def _relative_hazards(x: Floats, beta: Floats) -> tuple[Floats, Floats]:
    """Compute each patient's log hazard and hazard, shifted so that exp cannot overflow.

    The log hazard is x beta. One shift for all patients makes the largest log hazard 0, which
    changes no partial likelihood. After the shift, log hazards below -300 are raised to -300. The
    hazard is the exponential of the result.

    Returns:
        The log hazards and the hazards, (n,) each.
    """
    eta = x @ beta
    eta = np.maximum(eta - eta.max(initial=-np.inf), -_MOST_DISTANCE)
    return eta, np.exp(eta)


def _total_risks(sets: RiskSets, weights: Floats, total: Floats, shares: Floats) -> Floats:
    """Compute each patient's expected number of events, (n,): the sum of a probability per event.

    At one event, the probability is the patient's hazard divided by the total hazard at risk. It is
    0 for patients who are no longer at risk. It is multiplied by 1 minus the event's entry of
    ``shares`` for tied patients, whose event is at the same time.

    Args:
        sets: the risk sets.
        weights: the patients' hazards, (n,).
        total: the total hazard of the patients at risk at each event, (events,).
        shares: the share of the tied patients that each event leaves out, (events,), from
            ``tied_shares``.
    """
    places = sets.places[sets.dying]
    each = np.bincount(places, 1 / total, minlength=len(sets.deaths))
    left_out = np.bincount(places, shares / total, minlength=len(sets.deaths))
    risks = np.cumsum(each)[sets.places]
    # A patient who dies at a time is left out by its share of that time's events
    risks[sets.dying] -= left_out[places]
    return weights * risks
