"""How far a sample is from those that a model was trained on, and from where on that is unusual.

Three parts are compared, each in units in which 1 is about the edge of the training samples: values
beyond any that were trained on, the distance of the whole sample (Mahalanobis, to the nearest of
several means with one covariance: Lee et al. 2018, eq. 2, without their input noise), and missing
values. The score is the largest; held-out samples say, as in split conformal prediction, from which
score on a sample is unusual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]

FEWEST = 20  # training samples: with fewer a covariance is chance
_EDGE = 0.99  # share of the training samples within the unit of distance and of missing values
_FEW_VALUES = 10  # a feature of so many different values has these and no others
_CERTAINTY = 0.9  # that no more than the chosen share of new samples is beyond the limit
_RARE = 20  # a value that one in so many lacks is at the edge of what is missing


@dataclass(frozen=True)
class Seen:
    """The values of a feature in training: all if they are ``few``, else lowest and highest."""

    values: Floats
    few: bool

    def beyond(self, values: Floats) -> Floats:
        """Return 0 for values (k,) that were seen, else 1 and how far they are from those."""
        if not len(self.values):  # missing in every training sample
            return np.ones(len(values))
        gap = np.abs(values[:, None] - self.values).min(axis=1)
        if not self.few:
            gap = np.where((values > self.values[0]) & (values < self.values[-1]), 0.0, gap)
        far: Floats = np.where(gap > 1e-5 * (1 + np.abs(values)), 1.0 + gap, 0.0)
        return far


@dataclass(frozen=True)
class Novelty:
    """How far k samples are from the training samples; 1 is about their edge."""

    values: Floats  # (k, f), of each value; 0 within the values that were trained on
    distance: Floats  # (k,), of all of the sample
    missing: Floats  # (k,), of what it lacks

    @cached_property
    def score(self) -> Floats:
        """The largest part of each sample, (k,)."""
        most = self.values.max(axis=1, initial=0.0)
        scores: Floats = np.maximum.reduce([most, self.distance, self.missing])
        return scores


@dataclass(frozen=True)
class Familiar:
    """Where a model was trained; ``familiar`` makes one."""

    rows: int  # number of training samples
    means: Floats  # (m, f), of the groups
    precision: Floats  # (f, f), the inverse of their shared covariance
    reach: float  # the distance within which 99 % of the training samples are
    seen: tuple[Seen, ...]  # of each feature; empty for a network's, which say nothing alone
    rates: Floats  # (f,), the share of training samples that lack each feature
    lacking: float  # the surprise of missing values within which 99 % of them are

    def novelty(self, samples: Floats, missing: Booleans) -> Novelty:
        """Return how far samples (k, f) are, of which ``missing`` (k, f) values are imputed."""
        values = np.zeros(samples.shape)
        for place, seen in enumerate(self.seen):
            values[:, place] = np.where(missing[:, place], 0.0, seen.beyond(samples[:, place]))
        distance = _distance(samples, self.means, self.precision) / self.reach
        return Novelty(values, distance, _surprise(missing, self.rates) / self.lacking)


def familiar(samples: Floats, missing: Booleans, groups: npt.NDArray[np.int64] | None) -> Familiar:
    """Return where a model was trained.

    Args:
        samples: (n, f) training samples, standardised, a missing value imputed; of a network its
            features of them.
        missing: (n, f), which of them are imputed.
        groups: (n,), whose own mean each sample is measured from, such as its class; None for one
            mean, with edges of each feature.
    """
    from sklearn.covariance import LedoitWolf

    labels = np.zeros(len(samples), dtype=np.int64) if groups is None else groups
    found, places = np.unique(labels, return_inverse=True)
    means = np.stack([samples[labels == group].mean(axis=0) for group in found])
    precision = LedoitWolf(assume_centered=True).fit(samples - means[places]).precision_
    rates = (missing.sum(axis=0) + 1) / (len(samples) + 2)
    surprise = _surprise(missing, rates)
    return Familiar(
        len(samples),
        means,
        precision,
        max(float(np.quantile(_distance(samples, means, precision), _EDGE)), 1e-9),
        () if groups is not None else tuple(map(_find_seen_values, samples.T, missing.T)),
        rates,
        max(float(np.quantile(surprise, _EDGE)), math.log(_RARE)),
    )


def limit_of(scores: Floats, share: float) -> float:
    """Return the score beyond which a sample is unusual, infinite if ``scores`` (n,) are too few.

    Beyond it is at most ``share`` of all samples like these, nine times in ten: what is beyond the
    k-th smallest of n scores is a share that is Beta(n + 1 - k, k) distributed (Vovk 2012). For too
    few scores it is the largest, beyond which the mean share is 1 / (n + 1).
    """
    from scipy.stats import beta

    count = len(scores)
    if (count + 1) * share < 1 - 1e-9:
        return math.inf
    ranks = np.arange(1, count + 1)
    sure = beta.cdf(share, count + 1 - ranks, ranks) >= _CERTAINTY
    return float(np.sort(scores)[int(sure.argmax()) if sure.any() else count - 1])


def _find_seen_values(values: Floats, missing: Booleans) -> Seen:
    found: Floats = np.unique(values[~missing])
    few = len(found) <= _FEW_VALUES
    return Seen(found if few else found[[0, -1]], few)


def _distance(samples: Floats, means: Floats, precision: Floats) -> Floats:
    apart = samples[:, None] - means  # (k, m, f)
    squares = np.einsum("kmi,ij,kmj->km", apart, precision, apart)
    nearest: Floats = np.sqrt(np.maximum(squares, 0.0).min(axis=1))
    return nearest


def _surprise(missing: Booleans, rates: Floats) -> Floats:
    """Return how surprising what samples lack is: -log of its probability, (k,)."""
    total: Floats = (missing * -np.log(rates)).sum(axis=1)
    return total
