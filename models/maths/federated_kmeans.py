"""K-means in two steps: each silo clusters its own features, the server clusters the centroids.

UEFL starts new codewords at the centroids of the uncertain silos' features (section 3.2). Features
never leave a hospital; only centroids leave, with the number of features behind each.
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
    """The result of a K-means clustering.

    Attributes:
        centres: (k, d) float32.
        counts: the number of features in each cluster, (k,) int64.
    """

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
    """Cluster a silo's feature rows by K-means and return only the centres that may leave the silo.

    Each sample contributes ``each`` consecutive rows. A centre over few samples would reveal
    patients, so two checks apply to every cluster.

    Args:
        features: the rows to cluster, (n, d), at least one, ordered by sample.
        clusters: the largest number of clusters, at least 1. Fewer rows give fewer clusters.
        seed: decides K-means' first centres.
        min_count: the fewest rows in a cluster whose centre is returned.
        each: the number of rows that come from one sample.
        min_samples: the smallest effective number of samples behind a centre that is returned. This
            number is low if few samples contribute almost the whole centre. 1 switches this check
            off.

    Returns:
        The centres float32 and the number of rows of each. Both may be empty.
    """
    fitted = _kmeans(features, None, clusters, seed)
    centres, labels = fitted.cluster_centers_, fitted.labels_
    counts = np.bincount(labels, minlength=len(centres))
    keep = counts >= min_count
    if min_samples > 1:
        # Features are ordered by sample, so this division gives each feature its sample
        samples = np.arange(len(features)) // each
        for cluster in range(len(centres)):
            inside = labels == cluster
            keep[cluster] &= _effective_samples(features[inside], samples[inside]) >= min_samples
    return Centroids(centres[keep].astype(np.float32), counts[keep])


def _effective_samples(features: FloatArray, samples: npt.NDArray[np.int64]) -> float:
    """Compute the effective number of samples on which the mean of ``features`` rests.

    A mean over many rows may still reveal one patient, if nearly the whole mean comes from one
    sample. For one coordinate the number is (Σ a_i)² / Σ a_i², where a_i sums the absolute values
    in the rows of sample i. It is n if n samples contribute equally, and 1 if one contributes
    everything.

    Args:
        features: the rows, (n, d).
        samples: the number of the sample to which each row belongs, (n,).

    Returns:
        The smallest number over all coordinates that are not 0 in every row. If there is no such
        coordinate, the number of distinct samples.
    """
    owners, where = np.unique(samples, return_inverse=True)
    each = np.zeros((len(owners), features.shape[1]))
    # Several features of one sample add up first. += would count only the last of them
    np.add.at(each, where, np.abs(features.astype(np.float64)))
    squares = (each**2).sum(axis=0)
    effective = each.sum(axis=0)[squares > 0] ** 2 / squares[squares > 0]
    return float(min([len(owners), *effective]))


def merge_centroids(parts: list[Centroids], clusters: int, seed: int) -> FloatArray:
    """Merge the silos' centroids into at most ``clusters`` centres, (k, d) float32.

    If there are more than ``clusters`` centroids, K-means clusters them, each weighted by its
    count. Otherwise they are concatenated in the order of ``parts`` and returned unchanged.

    Args:
        parts: the centroids of each silo, for at least one silo.
        clusters: the largest number of centres.
        seed: decides K-means' first centres.
    """
    centres = np.concatenate([part.centres for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    if len(centres) <= clusters:
        return centres
    # Weighted by counts, the objective is that of K-means on the pooled features, except for the
    # spread within local clusters. Without them ten features would pull as strongly as a thousand
    fitted = _kmeans(centres, counts.astype(np.float64), clusters, seed)
    merged: FloatArray = fitted.cluster_centers_.astype(np.float32)
    return merged


def _kmeans(
    points: FloatArray, weights: npt.NDArray[np.float64] | None, clusters: int, seed: int
) -> KMeans:
    """Fit scikit-learn's K-means from one start, in one thread, and return the fitted model.

    Args:
        points: the points to cluster, (n, d), at least one. They are converted to float64.
        weights: the weight of each point, (n,). None weights all points equally.
        clusters: the number of clusters. If there are fewer points, the number of points is used.
        seed: decides the first centres.
    """
    # Imported late, because every message imports this module, but only few need scikit-learn
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    # scikit-learn adds up the partial sums of its threads in any order; one thread keeps the bits
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # scikit-learn warns if there are fewer distinct points than clusters. The empty clusters
        # have count 0 and are dropped by the caller
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(min(clusters, len(points)), n_init=1, random_state=seed % 2**32)
        return model.fit(points.astype(np.float64), sample_weight=weights)
