"""K-means in two steps: each silo clusters its own features, the server clusters the centroids.

UEFL starts new codewords at the centroids of the uncertain silos' features (section 3.2). The
features never leave a hospital; centroids and how many features each stands for do.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Centroids:
    """``centres`` (k, d) float32 and ``counts`` (k,) int64: the features each centre stands for."""

    centres: FloatArray
    counts: npt.NDArray[np.int64]


def local_centroids(
    features: FloatArray,
    clusters: int,
    seed: int,
    min_count: int,
    each: int = 1,
    min_samples: int = 1,
) -> Centroids:
    """Cluster a silo's features.

    Args:
        features: (n, d), in the order of the samples that they are of.
        clusters: centres, at most.
        seed: of K-means' first centres.
        min_count: centres of fewer features are left out.
        each: features of a sample.
        min_samples: centres of fewer samples, or whose numbers fewer samples stand behind, are
            left out: with features that are 0 but for one patient, a mean over all is that one's.
    """
    fitted = _kmeans(features, None, clusters, seed)
    centres, labels = fitted.cluster_centers_, fitted.labels_
    counts = np.bincount(labels, minlength=len(centres))
    keep = counts >= min_count
    if min_samples > 1:
        samples = np.arange(len(features)) // each
        crowds = [_crowd(features[labels == c], samples[labels == c]) for c in range(len(centres))]
        keep &= np.array(crowds) >= min_samples
    return Centroids(centres[keep].astype(np.float32), counts[keep])


def _crowd(features: FloatArray, samples: npt.NDArray[np.int64]) -> float:
    """Return how many samples stand behind the mean of ``features`` (n, d), at its weakest number.

    Of each number that is (Σ_i |f_i|)² / Σ_i |f_i|² over samples; a number that is 0 tells nothing.
    """
    owners, where = np.unique(samples, return_inverse=True)
    each = np.zeros((len(owners), features.shape[1]))
    np.add.at(each, where, np.abs(features.astype(np.float64)))
    squares = (each**2).sum(axis=0)
    crowds = each.sum(axis=0)[squares > 0] ** 2 / squares[squares > 0]
    return float(min([len(owners), *crowds]))


def merge_centroids(parts: list[Centroids], clusters: int, seed: int) -> FloatArray:
    """Cluster the silos' centroids, weighted by count, into at most ``clusters`` rows (k, d)."""
    centres = np.concatenate([part.centres for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    if len(centres) <= clusters:
        return centres
    fitted = _kmeans(centres, counts.astype(np.float64), clusters, seed)
    merged: FloatArray = fitted.cluster_centers_.astype(np.float32)
    return merged


def _kmeans(
    points: FloatArray, weights: npt.NDArray[np.float64] | None, clusters: int, seed: int
) -> KMeans:
    # Only a silo's extension needs it, and every message of a deployment imports this module
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    # One thread: scikit-learn adds up its threads' partial sums in any order.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # Fewer distinct points than clusters: empty ones fall away by their count.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(min(clusters, len(points)), n_init=1, random_state=seed % 2**32)
        return model.fit(points.astype(np.float64), sample_weight=weights)
