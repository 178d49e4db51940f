"""Results of a regression: coefficients in the columns' units, standard errors, measures of fit.

The document is plain JSON. Confidence intervals are Wald's, as in statsmodels: by the normal
distribution, and in a linear model by Student's t with n - k degrees of freedom.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from fedsilo.models.maths.glm import Family, Floats, GLMSums, dispersion
from fedsilo.models.maths.meta_analysis import combine_effects

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Units:
    """The units that a regression was fitted in, as centre and deviation in the columns' own.

    Attributes:
        centers: the centre of each column, (columns,), without the intercept.
        deviations: the deviation of each column, (columns,).
        outcome_center: the centre of the outcome; 0 unless the model is linear.
        outcome_deviation: the deviation of the outcome; 1 unless the model is linear.
        has_intercept: whether the first of the k coefficients is an intercept.
    """

    centers: Floats
    deviations: Floats
    outcome_center: float = 0.0
    outcome_deviation: float = 1.0
    has_intercept: bool = True

    def transformation(self) -> Floats:
        """Build the matrix (k, k) that converts coefficients from standardised to original columns.

        It divides each coefficient by its column's deviation. In a model with an intercept it also
        subtracts the effect of the columns' centres from the intercept, and multiplies all
        coefficients by the outcome's deviation. The caller must add the outcome's centre to the
        intercept.
        """
        if not self.has_intercept:
            return np.diag(1 / self.deviations)
        matrix = np.diag(np.concatenate([[1.0], 1 / self.deviations]))
        matrix[0, 1:] = -self.centers / self.deviations
        return np.asarray(matrix * self.outcome_deviation)


@dataclass(frozen=True)
class Fitted:
    """A converged regression in the units of standardised columns.

    Attributes:
        family: the family.
        names: the coefficients' names; an intercept comes first.
        beta: the coefficients, (k,).
        sums: the sums over all patients at these coefficients.
        sites: site -> its own coefficients and variances; empty lists if it has no fit of its own.
    """

    family: Family
    names: Sequence[str]
    beta: Floats
    sums: GLMSums
    sites: Mapping[str, Sequence[Sequence[float]]]


def results_document(fitted: Fitted, units: Units) -> dict[str, Any]:
    """Build the content of fit.json: the results of a regression over all sites.

    Args:
        fitted: the regression, with coefficients of standardised columns.
        units: the centres and deviations of the columns, which convert the results to the columns'
            original units.

    Returns:
        JSON values by key:

        - 'family': the family of the model.
        - 'patients': the number of patients.
        - 'events': the number of events, only in logistic and Cox's models.
        - 'log-likelihood': the log-likelihood of the fit.
        - 'aic': 2 k - 2 log-likelihood, for k coefficients.
        - 'coefficients': one row per coefficient, with its estimate, error and interval.

        Two keys follow only if each site was also fitted alone:

        - 'heterogeneity': one row per column, which compares the sites' coefficients.
        - 'sites-without-fit': the names of the sites whose fit failed.
    """
    sums, size = fitted.sums, len(fitted.beta)
    likelihood = _log_likelihood(fitted, units)
    document: dict[str, Any] = {
        "family": fitted.family,
        "patients": round(sums.patients),
        "log-likelihood": likelihood,
        "aic": 2 * size - 2 * likelihood,
        "coefficients": list(_coefficients(fitted, units)),
    }
    if fitted.family in ("logistic", "cox"):
        document["events"] = round(sums.outcomes)
    if fitted.sites:
        document["heterogeneity"] = list(_heterogeneity(fitted, units))
        document["sites-without-fit"] = [site for site, own in fitted.sites.items() if not own[0]]
    return document


def _log_likelihood(fitted: Fitted, units: Units) -> float:
    """Return the log-likelihood of a fit, for the outcome in its original unit.

    - Linear: the fit used a standardised outcome, so the result is converted. It is the Gaussian
      log-likelihood with the residual variance that maximises it.
    - Logistic and Poisson: the log-likelihood of the fit, unchanged.
    - Cox: the log partial likelihood, unchanged.
    """
    sums = fitted.sums
    if fitted.family != "linear":
        return sums.objective
    squares = -2 * sums.objective * units.outcome_deviation**2
    # The best variance is squares / n. The residuals' term, squares / (2 variance), is then n / 2:
    # hence the 1
    return -sums.patients / 2 * (math.log(2 * math.pi * squares / sums.patients) + 1)


def _coefficients(fitted: Fitted, units: Units) -> Iterator[dict[str, Any]]:
    """Yield a row for each coefficient, converted to the columns' original units.

    The keys of a row are:

    - 'name', 'estimate' and 'standard-error'.
    - 'statistic': 'estimate' divided by 'standard-error'.
    - 'p', the two-sided p value, and 'low' and 'high', the ends of the 95 % interval. A linear
      model with n patients and k coefficients takes them from the t distribution with n - k degrees
      of freedom. All other models take them from the normal distribution.
    - 'ratio-estimate', 'ratio-low' and 'ratio-high': the exponentials of 'estimate', 'low' and
      'high'. A linear model lacks them.
    """
    matrix, sums = units.transformation(), fitted.sums
    beta = matrix @ fitted.beta
    if units.has_intercept:
        beta[0] += units.outcome_center
    covariance = dispersion(fitted.family, sums) * np.linalg.inv(sums.hessian)
    # The intercept in the columns' own units is a sum over all coefficients, so its error needs
    # their covariances too
    errors = np.sqrt(np.diag(matrix @ covariance @ matrix.T))
    law: Any = stats.norm
    if fitted.family == "linear":
        law = stats.t(sums.patients - len(beta))
    width = float(law.ppf(0.5 + CONFIDENCE / 2))
    for name, estimate, error in zip(fitted.names, beta.tolist(), errors.tolist(), strict=True):
        statistic = estimate / error
        row = {
            "name": name,
            "estimate": estimate,
            "standard-error": error,
            "statistic": statistic,
            "p": float(2 * law.sf(abs(statistic))),
            "low": estimate - width * error,
            "high": estimate + width * error,
        }
        if fitted.family != "linear":
            for key in ("estimate", "low", "high"):
                row[f"ratio-{key}"] = _ratio(row[key])
        yield row


def _ratio(value: float) -> float:
    """Return exp(value), at most the largest float, so that the document stays JSON."""
    return math.exp(min(value, 700.0))


def _heterogeneity(fitted: Fitted, units: Units) -> Iterator[dict[str, Any]]:
    """Yield a row for each column, to compare the coefficients of fits to single sites.

    The intercept has no row. The keys of a row, in the column's original unit, are:

    - 'name': the name of the column.
    - 'sites': site -> 'estimate' and 'standard-error', only for sites whose fit succeeded.
    - The results of the meta-analysis ``combine_effects``, such as 'fixed' and 'tau-squared', if at
      least two sites have a fit.
    """
    first = int(units.has_intercept)
    for place in range(first, len(fitted.names)):
        unit = units.outcome_deviation / float(units.deviations[place - first])
        sites = {}
        for site, own in fitted.sites.items():
            if own[0]:
                error = math.sqrt(own[1][place]) * unit
                sites[site] = {"estimate": own[0][place] * unit, "standard-error": error}
        row: dict[str, Any] = {"name": fitted.names[place], "sites": sites}
        if len(sites) > 1:
            estimates = [site["estimate"] for site in sites.values()]
            combined = combine_effects(
                estimates, [site["standard-error"] for site in sites.values()]
            )
            row |= {key.replace("_", "-"): value for key, value in vars(combined).items()}
        yield row
