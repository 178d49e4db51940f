"""The distance of a sample from the training samples, and the score above which it is unusual.

The score is the largest of three parts. Each part is scaled so that 1 is about the edge of the
training samples:

- single values beyond all training values;
- the Mahalanobis distance of the whole sample to the nearest of several means with one covariance
  (Lee et al. 2018, eq. 2, without their input noise);
- the pattern of missing values.

Held-out samples decide above which score a sample is unusual, as in split conformal prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]

FEWEST = 20  # training samples; with fewer the covariance is mostly chance
_EDGE = 0.99  # share of training samples within 1, for the distance and for missing values
_FEW_VALUES = 10  # a feature with at most 10 different values is taken as categorical
_CERTAINTY = 0.9  # probability that at most the chosen share of new samples exceeds the limit
_RARE = 20  # the least edge of missing values: one value that 1 in 20 samples lacks


@dataclass(frozen=True)
class Seen:
    """The values that one feature takes in training.

    Attributes:
        values: all distinct values, ascending, if there are at most 10; otherwise the lowest and
            the highest. Empty if every training sample lacks the feature.
        few: whether all distinct values are listed.
    """

    values: Floats
    few: bool

    def beyond(self, values: Floats) -> Floats:
        """Score new values (k,) of a feature: 0 if familiar, or 1 plus the gap to training.

        The gap is the distance to the nearest number in the attribute ``values``. If the attribute
        ``few`` is True, a value is familiar if it equals one of these numbers. Otherwise it is
        familiar if it lies between the lowest and the highest of them. Differences within float32
        rounding are ignored. If no training sample has the feature, all scores are 1.
        """
        if not len(self.values):
            # The feature was missing in every training sample, so any value is new
            return np.ones(len(values))
        gap = np.abs(values[:, None] - self.values).min(axis=1)
        if not self.few:
            gap = np.where((values > self.values[0]) & (values < self.values[-1]), 0.0, gap)
        # The tolerance is that of float32, because features are stored in float32
        far: Floats = np.where(gap > 1e-5 * (1 + np.abs(values)), 1.0 + gap, 0.0)
        return far


@dataclass(frozen=True)
class Novelty:
    """The novelty of k samples in three parts; 1 is about the edge of the training samples.

    Attributes:
        values: (k, f), the score of each value; 0 within the training values.
        distance: (k,), the score of the whole sample.
        missing: (k,), the score of the pattern of missing values.
    """

    values: Floats
    distance: Floats
    missing: Floats

    @cached_property
    def score(self) -> Floats:
        """The largest of the three parts for each sample, (k,)."""
        most = self.values.max(axis=1, initial=0.0)
        scores: Floats = np.maximum.reduce([most, self.distance, self.missing])
        return scores


@dataclass(frozen=True)
class Familiar:
    """The region that the training samples fill, as ``estimate_region`` estimates it.

    Attributes:
        rows: number of training samples.
        means: means of the groups, (m, f).
        precision: the inverse of their shared covariance, (f, f).
        reach: the distance within which 99 % of the training samples are.
        seen: training values of each feature. Empty for features of a network, because single
            features of a network mean nothing.
        rates: share of training samples that lack each feature, (f,).
        lacking: the surprise of missing values that 99 % of the training samples stay within.
    """

    rows: int
    means: Floats
    precision: Floats
    reach: float
    seen: tuple[Seen, ...]
    rates: Floats
    lacking: float

    def novelty(self, samples: Floats, missing: Booleans) -> Novelty:
        """Score how far samples are from the training samples, in three parts.

        - ``values`` (k, f): the score of each single value, by ``Seen.beyond``. A value like those
          in training scores 0, any other value at least 1. An imputed value scores 0. All values
          score 0 if the samples are features of a network and not rows of a table.
        - ``distance`` (k,): the Mahalanobis distance to the nearest mean of a training group, such
          as a class, divided by ``reach``.
        - ``missing`` (k,): the sum of -ln(rate) over the sample's missing features, divided by
          ``lacking``. A feature's rate is the share of training samples that lack it, smoothed so
          that it is never 0.

        The divisors make 99 % of the training samples score at most 1 in the last two parts.

        Args:
            samples: (k, f), standardised and imputed as in training.
            missing: (k, f) bool, True for imputed values.
        """
        values = np.zeros(samples.shape)
        for place, seen in enumerate(self.seen):
            values[:, place] = np.where(missing[:, place], 0.0, seen.beyond(samples[:, place]))
        distance = _distance(samples, self.means, self.precision) / self.reach
        return Novelty(values, distance, _surprise(missing, self.rates) / self.lacking)


def estimate_region(
    samples: Floats, missing: Booleans, groups: npt.NDArray[np.int64] | None
) -> Familiar:
    """Estimate the region that the training samples fill, to recognise unusual samples later.

    The region has these parts:

    - The mean of each group, and one inverse covariance for all groups (Ledoit and Wolf).
    - The 99 % quantile of the training samples' Mahalanobis distances to their nearest mean.
    - The rate at which each feature is missing. One sample with the value and one without it are
      added, so that no rate is 0.
    - The 99 % quantile of the training samples' surprise, at least ln 20. The surprise of a sample
      is the sum of -ln(rate) over its missing features.
    - The values that each feature takes in training, only if ``groups`` is None.

    Args:
        samples: the training samples, (n, f). They are standardised and imputed rows of a table, or
            a network's features.
        missing: True where a value was imputed, (n, f) bool.
        groups: the group of each sample, such as its class, (n,). None, for rows of a table, puts
            all samples in one group.
    """
    from sklearn.covariance import LedoitWolf

    seen: tuple[Seen, ...] = ()
    if groups is None:
        groups = np.zeros(len(samples), dtype=np.int64)
        seen = tuple(map(_find_seen_values, samples.T, missing.T))
    found, places = np.unique(groups, return_inverse=True)
    means = np.stack([samples[groups == group].mean(axis=0) for group in found])
    precision = LedoitWolf(assume_centered=True).fit(samples - means[places]).precision_
    # One sample more that lacks the value and one that has it: a rate is never 0, whose logarithm
    # would be infinite
    rates = (missing.sum(axis=0) + 1) / (len(samples) + 2)
    surprise = _surprise(missing, rates)
    return Familiar(
        len(samples),
        means,
        precision,
        max(float(np.quantile(_distance(samples, means, precision), _EDGE)), 1e-9),
        seen,
        rates,
        max(float(np.quantile(surprise, _EDGE)), math.log(_RARE)),
    )


def limit_of(scores: Floats, share: float) -> float:
    """Choose the score above which a sample counts as unusual, from scores of familiar samples.

    The first rule that applies decides:

    - If ``share`` is below 1 / (n + 1), the limit is infinite.
    - The limit is the smallest score that, with probability 0.9, at most ``share`` of all familiar
      samples exceed. The share beyond the k-th smallest score follows Beta(n + 1 - k, k) (Vovk
      2012).
    - If no score meets this condition, the limit is the largest score.

    Args:
        scores: scores of n held-out samples, (n,). Without scores the limit is infinite.
        share: the accepted share of false alarms, above 0 and below 1.
    """
    from scipy.stats import beta

    count = len(scores)
    if (count + 1) * share < 1 - 1e-9:
        return math.inf
    ranks = np.arange(1, count + 1)
    # Certainty rises with the rank. The first rank that suffices gives the lowest limit, which
    # finds most unusual samples
    sure = np.flatnonzero(beta.cdf(share, count + 1 - ranks, ranks) >= _CERTAINTY)
    if not len(sure):
        return float(np.max(scores))
    return float(np.sort(scores)[sure[0]])


def _find_seen_values(values: Floats, missing: Booleans) -> Seen:
    """Summarise the values that one feature takes in training, without imputed values.

    The summary lists all distinct values if there are at most 10, and otherwise only the lowest and
    the highest. If all values are imputed, the list is empty.

    Args:
        values: the feature's value in each training sample, (n,).
        missing: whether that value was imputed, (n,).
    """
    found: Floats = np.unique(values[~missing])
    if len(found) <= _FEW_VALUES:
        return Seen(found, True)
    return Seen(found[[0, -1]], False)


def _distance(samples: Floats, means: Floats, precision: Floats) -> Floats:
    """Compute the Mahalanobis distance of samples (k, f) to the nearest of the means (m, f)."""
    apart = samples[:, None] - means  # (k, m, f)
    squares = np.einsum("kmi,ij,kmj->km", apart, precision, apart)
    # Rounding can make the square of a tiny distance negative
    nearest: Floats = np.sqrt(np.maximum(squares, 0.0).min(axis=1))
    return nearest


def _surprise(missing: Booleans, rates: Floats) -> Floats:
    """Compute each sample's surprise, (k,): the sum of -log(rate) over its missing features."""
    total: Floats = (missing * -np.log(rates)).sum(axis=1)
    return total
