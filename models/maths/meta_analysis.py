"""Fixed and random effects over hospitals (DerSimonian and Laird 1986), and their heterogeneity.

Equations (doi:10.1016/0197-2456(86)90046-2):
  (fixed) weights 1 / s_k^2 -> combine_effects
  (Q) sum of w_k (b_k - b)^2 -> combine_effects
  (tau^2) (Q - (K - 1)) / (sum w - sum w^2 / sum w), at least 0 -> combine_effects
  (random) weights 1 / (s_k^2 + tau^2) -> combine_effects
  (I^2) share of Q beyond K - 1 (Higgins and Thompson 2002) -> combine_effects
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class CombinedEffects:
    """One coefficient over several hospitals.

    Attributes:
        count: the number of hospitals.
        fixed: the mean with weights 1 / variance.
        fixed_error: its standard error.
        random: the mean if hospitals differ by more than chance.
        random_error: its standard error.
        q: Cochran's Q.
        p: the probability of such a Q if all hospitals had the same coefficient.
        tau_squared: the variance between hospitals.
        i_squared: the share of the variation that is not chance, 0 to 1.
    """

    count: int
    fixed: float
    fixed_error: float
    random: float
    random_error: float
    q: float
    p: float
    tau_squared: float
    i_squared: float


def combine_effects(estimates: Sequence[float], errors: Sequence[float]) -> CombinedEffects:
    """Combine one coefficient's estimates from at least two hospitals, by a meta-analysis.

    The fixed effect weights each estimate by 1 / v, where v is its variance. The random effect
    weights it by 1 / (v + tau²). Here tau² is the variance between hospitals by DerSimonian and
    Laird, at least 0. Cochran's Q tests whether the hospitals differ, against a chi-squared
    distribution.

    Args:
        estimates: the coefficient at each hospital.
        errors: the standard error of each estimate, above 0.

    Returns:
        The number of hospitals, the two effects with their standard errors, Q with its p value,
        tau² and I².
    """
    values, variances = np.asarray(estimates), np.square(np.asarray(errors))
    weights = 1 / variances
    fixed = float((weights * values).sum() / weights.sum())
    q = float((weights * np.square(values - fixed)).sum())
    freedom = len(values) - 1
    # Q is on average ``freedom`` + ``spread`` * tau², which gives tau² if Q is put in. By chance Q
    # may be below ``freedom``, but a variance is not below 0
    spread = weights.sum() - np.square(weights).sum() / weights.sum()
    tau_squared = max(0.0, float((q - freedom) / spread))
    mixed = 1 / (variances + tau_squared)
    i_squared = 0.0
    if q > freedom:
        i_squared = (q - freedom) / q
    return CombinedEffects(
        len(values),
        fixed,
        float(weights.sum() ** -0.5),
        float((mixed * values).sum() / mixed.sum()),
        float(mixed.sum() ** -0.5),
        q,
        float(stats.chi2.sf(q, freedom)),
        tau_squared,
        i_squared,
    )
