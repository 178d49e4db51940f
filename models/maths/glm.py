"""Generalised linear models from sums over the patients of each hospital, by Newton's method.

A model has a linear predictor eta = x beta, where x begins with 1 for the intercept. Each hospital
computes four sums over its patients. The sums of all hospitals are those of the pooled data, so
Newton's steps, the coefficients and the standard errors are those of the pooled data too. All
numbers are float64.

Families: ``logistic`` (logit link), ``linear`` (identity link) and ``poisson`` (log link). All
three links are canonical, so the Hessian below is the information matrix, expected and observed.
The family ``cox`` is Cox's model stratified by hospital (``models.maths.cox``). It has the same
sums, but no intercept, and its outcome is a ``FollowUp``.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import expit, gammaln

from fedsilo.models.maths.cox import FollowUp, cox_sums, risks_and_residuals

Family = Literal["logistic", "linear", "poisson", "cox"]
Floats = npt.NDArray[np.float64]
# A number per patient, (n,); in Cox's model times and events
Outcomes = Floats | FollowUp

_MOST_ETA = 700.0  # exp(709) is the largest float64
# The largest coefficient of a standardised column: an odds ratio of 160,000 per deviation. Newton's
# method gets beyond it only if the outcomes are separated
LARGEST = 12.0
_NUMBERS = 3  # numbers of ``GLMSums`` besides gradient and Hessian
_SINGULAR = 1e-7  # share of a column's variance that the columns before it leave unexplained


class UndeterminedError(ValueError):
    """These patients determine no coefficients; the text says why, without a subject's name."""


@dataclass(frozen=True)
class GLMSums:
    """Sums over patients at given coefficients; the sums of two groups of patients add up.

    Attributes:
        objective: the log-likelihood. For a linear model it is minus half the sum of squared
            residuals, and for Cox's model the log partial likelihood.
        patients: the number of patients.
        outcomes: the sum of the outcomes; in Cox's model the number of events.
        gradient: the gradient of the objective, (k,).
        hessian: minus the matrix of second derivatives of the objective, (k, k).
    """

    objective: float
    patients: float
    outcomes: float
    gradient: Floats
    hessian: Floats

    def vector(self) -> Floats:
        """Concatenate all sums into one vector, so that the vectors of several sites can be added.

        The vector begins with three numbers: ``objective``, ``patients`` and ``outcomes``. The
        gradient (k,) follows. The last k (k + 1) / 2 numbers are the Hessian's upper triangle with
        its diagonal, row by row.
        """
        upper = self.hessian[np.triu_indices(len(self.gradient))]
        numbers = [self.objective, self.patients, self.outcomes]
        return np.concatenate([numbers, self.gradient, upper])

    @classmethod
    def from_vector(cls, vector: Floats, size: int) -> "GLMSums":
        """Rebuild the sums from a vector of the method ``vector``, or from a total of such vectors.

        ``size`` is k, the number of coefficients. The Hessian's upper triangle is mirrored to the
        lower one.
        """
        gradient = vector[_NUMBERS : _NUMBERS + size]
        hessian = np.zeros((size, size))
        hessian[np.triu_indices(size)] = vector[_NUMBERS + size :]
        hessian = hessian + np.triu(hessian, 1).T
        objective, patients, outcomes = map(float, vector[:_NUMBERS])
        return cls(objective, patients, outcomes, gradient, hessian)


def sums_length(size: int) -> int:
    """Return the length of ``GLMSums.vector`` for ``size`` coefficients."""
    return _NUMBERS + size + size * (size + 1) // 2


@dataclass(frozen=True)
class Moments:
    """Sums over patients that give each column's mean and deviation; the outcome is column 0.

    Attributes:
        patients: the number of patients.
        known: the number of patients with a value, (columns,).
        totals: the sum of the values, (columns,).
        squares: the sum of their squares, (columns,).
    """

    patients: float
    known: Floats
    totals: Floats
    squares: Floats

    def vector(self) -> Floats:
        """Concatenate all moments into one vector, so that vectors of several sites can be added.

        The vector begins with ``patients``, one number. Then each column's number of known values
        (``known``), its sum (``totals``) and its sum of squares (``squares``) follow.
        """
        return np.concatenate([[self.patients], self.known, self.totals, self.squares])

    @classmethod
    def from_vector(cls, vector: Floats) -> "Moments":
        """Rebuild the sums from the result of ``vector``, or from a total of such vectors."""
        known, totals, squares = np.split(vector[1:], 3)
        return cls(float(vector[0]), known, totals, squares)

    def means(self) -> Floats:
        """Return the mean of each column, (columns,); 0 without any value."""
        return np.asarray(self.totals / np.maximum(self.known, 1.0))

    def deviations(self) -> Floats:
        """Return the standard deviation of each column, (columns,), divided by n."""
        variances = self.squares / np.maximum(self.known, 1.0) - np.square(self.means())
        return np.sqrt(np.maximum(variances, 0.0))


def moments_of(values: Floats) -> Moments:
    """Compute the count, sum and sum of squares of each column's known values.

    These moments can be added over sites. The totals give the means and deviations over all sites.

    Args:
        values: a row for each patient, (n, columns). NaN marks a missing value, which is left out
            of all three moments.

    Returns:
        The three moments of each column, and the number of patients n.
    """
    missing = np.isnan(values)
    known = np.where(missing, 0.0, values)
    count = (~missing).sum(axis=0).astype(np.float64)
    return Moments(float(len(values)), count, known.sum(axis=0), np.square(known).sum(axis=0))


def moments_length(columns: int) -> int:
    """Return the length of ``Moments.vector`` for ``columns`` columns, with the outcome."""
    return 1 + 3 * columns


def has_intercept(family: Family) -> bool:
    """Tell whether a family's first coefficient is an intercept; only Cox's model has none."""
    return family != "cox"


def weights_and_residuals(
    family: Family, x: Floats, y: Outcomes, beta: Floats
) -> tuple[Floats, Floats]:
    """Compute each patient's weight in the Hessian, and the patient's residual, at ``beta``.

    The residual is the outcome minus the mean, the outcome that the model expects.

    - Linear: the mean is x beta, and the weight is 1.
    - Logistic: the mean is the logistic function of x beta, and the weight is mean * (1 - mean).
    - Poisson: the mean and the weight are exp(x beta), with x beta limited to 700.
    - Cox: see ``risks_and_residuals``.

    Args:
        family: the family of the model. It is ignored if ``y`` is a ``FollowUp``, which means Cox.
        x: (n, k), with a first column of 1 unless the family is Cox's.
        y: the outcomes of n patients.
        beta: the coefficients, (k,).

    Returns:
        The weights and the residuals, (n,) each.
    """
    if isinstance(y, FollowUp):
        return risks_and_residuals(x, y, beta)
    eta = x @ beta
    if family == "linear":
        return np.ones_like(y), y - eta
    if family == "logistic":
        mean = expit(eta)
        return mean * (1 - mean), y - mean
    mean = np.exp(np.minimum(eta, _MOST_ETA))
    return mean, y - mean


def log_likelihood(family: Family, x: Floats, y: Floats, beta: Floats) -> float:
    """Compute the log-likelihood of outcomes ``y`` (n,) with columns ``x`` (n, k) at ``beta`` (k,).

    - 'linear': minus half the sum of squared residuals, with variance 1 and no constant term.
    - 'logistic': the full log-likelihood.
    - Any other family: the full log-likelihood of a Poisson model.

    Cox's model must use ``cox_sums`` instead.
    """
    eta = x @ beta
    if family == "linear":
        return -0.5 * float(np.square(y - eta).sum())
    if family == "logistic":
        # logaddexp(0, eta) is log(1 + exp(eta)), without the overflow of exp
        return float((y * eta - np.logaddexp(0.0, eta)).sum())
    mean = np.exp(np.minimum(eta, _MOST_ETA))
    return float((y * eta - mean - gammaln(y + 1)).sum())


def sums_at(family: Family, x: Floats, y: Outcomes, beta: Floats) -> GLMSums:
    """Compute a hospital's part of the sums that a step of Newton's method needs.

    The result has the log-likelihood, the number of patients, the sum of the outcomes, the gradient
    and the Hessian. The Hessian is the matrix of second derivatives of the log-likelihood,
    multiplied by -1. For Cox's model the sum of the outcomes is the number of events.

    Args:
        family: the family of the model. It is ignored if ``y`` is a ``FollowUp``.
        x: (n, k), with a first column of 1 unless the family is Cox's.
        y: the outcomes of n patients. A ``FollowUp`` selects Cox's model.
        beta: the coefficients at which the sums are computed, (k,).
    """
    if isinstance(y, FollowUp):
        cox = cox_sums(x, y, beta)
        events = float(y.events.sum())
        return GLMSums(cox.objective, float(len(y)), events, cox.gradient, cox.hessian)
    weights, residuals = weights_and_residuals(family, x, y, beta)
    return GLMSums(
        log_likelihood(family, x, y, beta),
        float(len(y)),
        float(y.sum()),
        x.T @ residuals,
        (x * weights[:, None]).T @ x,
    )


def effective_patients(values: Floats) -> float:
    """Return the effective number of patients behind a sum of ``values``: (sum |v|)^2 / sum v^2.

    ``values`` (n,) has one number per patient. The result is n if all are equally large in absolute
    value, and 1 if only one patient contributes. If all values are 0, the result is 0.
    """
    squares = float(np.square(values).sum())
    if squares == 0:
        return 0.0
    return float(np.abs(values).sum()) ** 2 / squares


def start_from(family: Family, moments: Moments, size: int) -> Floats:
    """Return the coefficients from which Newton's method starts, (size,).

    - Logistic: the intercept is the log odds of the mean outcome. Outcomes must include 0 and 1.
    - Poisson: the intercept is the logarithm of the mean outcome, which must be above 0.
    - Linear and Cox: all coefficients are 0.

    The intercept comes first, and all other coefficients are 0. The two conditions are not checked
    here.

    Args:
        family: the family of the model.
        moments: the moments over all patients. Column 0 is the outcome.
        size: the number of coefficients.
    """
    beta, mean = np.zeros(size), float(moments.means()[0])
    if family == "logistic":
        beta[0] = np.log(mean / (1 - mean))
    elif family == "poisson":
        beta[0] = np.log(mean)
    return beta


def find_redundant(hessian: Floats) -> list[int]:
    """Find the columns that are linear combinations of earlier columns.

    A column is redundant if the earlier columns that are not redundant leave less than 1e-7 of its
    sum of squares unexplained. The squares are the Hessian's, so they carry its weights. With an
    intercept as column 0, a constant column is redundant.

    Returns:
        The indices of the redundant columns, in rising order.
    """
    scale = np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    left = hessian / np.outer(scale, scale)
    redundant = []
    for place in range(len(left)):
        pivot = left[place, place]
        if pivot < _SINGULAR:
            redundant.append(place)
            continue
        # Gaussian elimination: what the columns up to this one do not explain of the others
        left = left - np.outer(left[:, place], left[place]) / pivot
    return redundant


def fit_alone(family: Family, x: Floats, y: Outcomes, rounds: int = 30) -> tuple[Floats, Floats]:
    """Fit a model to the patients of only one hospital, by Newton's method.

    The fit has converged if a step changes every coefficient by less than 1e-9 * (1 + m), where m
    is the largest absolute coefficient after the step. The fit fails in two cases: a coefficient
    other than the intercept exceeds 12 in absolute value (not in a linear model), or ``rounds``
    steps are not enough.

    Args:
        family: the family of the model.
        x: (n, k), with a first column of 1 unless the family is Cox's.
        y: the outcomes of n patients.
        rounds: the maximum number of steps.

    Returns:
        The coefficients (k,) and their covariance (k, k).

    Raises:
        UndeterminedError: the outcomes are all alike, Cox's model has no event, a column is
            redundant, or the fit fails.
        LinAlgError: the Hessian becomes singular during the steps.
    """
    sums = sums_at(family, x, y, np.zeros(x.shape[1]))
    if isinstance(y, FollowUp):
        outcomes, are_alike = y.events, not y.events.any()
    else:
        outcomes, are_alike = y, bool((y == y[0]).all())
    if are_alike:
        raise UndeterminedError("all outcomes are alike")
    if find_redundant(sums.hessian):
        raise UndeterminedError("columns are constant or collinear")
    beta = start_from(family, moments_of(outcomes[:, None]), x.shape[1])
    first = int(has_intercept(family))
    for _ in range(rounds):
        sums = sums_at(family, x, y, beta)
        step = np.linalg.solve(sums.hessian, sums.gradient)
        beta = beta + step
        # A linear model has a solution however large a coefficient is
        if family != "linear" and np.abs(beta[first:]).max(initial=0.0) > LARGEST:
            break
        if np.abs(step).max() < 1e-9 * (1 + np.abs(beta).max()):
            covariance = dispersion(family, sums) * np.linalg.inv(sums.hessian)
            return beta, np.asarray(covariance, np.float64)
    raise UndeterminedError("the coefficients grow without end")


def dispersion(family: Family, sums: GLMSums) -> float:
    """Return the factor that turns the inverse Hessian into the coefficients' covariance.

    In a linear model it is the residual variance: the sum of squared residuals divided by (n - k),
    for n patients and k coefficients. In any other model it is 1.
    """
    if family != "linear":
        return 1.0
    return -2 * sums.objective / (sums.patients - len(sums.gradient))
