import numpy as np
import pytest

from fedsilo.models.maths.federated_kmeans import (
    Centroids,
    FloatArray,
    local_centroids,
    merge_centroids,
)


def _rows(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32).reshape(-1, 1)


def _sorted(rows: FloatArray) -> list[float]:
    return sorted(rows.ravel().tolist())


def _part(centres: FloatArray, *counts: int) -> Centroids:
    return Centroids(centres, np.array(counts, dtype=np.int64))


def test_local_centroids_are_the_means_of_well_separated_groups_with_their_counts() -> None:
    found = local_centroids(_rows(0.0, 0.2, 10.0, 10.2, 10.4), 2, seed=1, min_count=1)
    order = np.argsort(found.centres.ravel())
    np.testing.assert_allclose(found.centres.ravel()[order], [0.1, 10.2], rtol=1e-6)
    assert found.counts[order].tolist() == [2, 3]
    assert found.centres.dtype == np.float32


def test_a_centroid_of_too_few_features_stays_at_the_silo() -> None:
    features = _rows(0.0, 0.2, 10.0, 10.2, 10.4)
    kept = local_centroids(features, 2, seed=1, min_count=3)
    assert kept.counts.tolist() == [3]
    assert kept.centres[0, 0] == pytest.approx(10.2)
    none = local_centroids(features, 2, seed=1, min_count=4)
    assert none.centres.shape == (0, 1)


def test_equal_features_leave_no_empty_centroids() -> None:
    found = local_centroids(_rows(*[2.0] * 6), 3, seed=0, min_count=1)
    assert found.counts.tolist() == [6]
    assert found.centres.tolist() == [[2.0]]


def test_merging_weights_centroids_by_their_counts() -> None:
    first = _part(_rows(0.0, 100.0), 30, 5)
    second = _part(_rows(4.0), 10)
    # (30 * 0 + 10 * 4) / 40 = 1, where the plain mean would be 2
    assert _sorted(merge_centroids([first, second], 2, seed=3)) == pytest.approx([1.0, 100.0])


def test_no_more_centroids_than_wanted_are_passed_on_as_they_are() -> None:
    merged = merge_centroids([_part(_rows(1.0, 2.0), 5, 1), _part(_rows(9.0), 2)], 3, seed=0)
    assert merged.tolist() == [[1.0], [2.0], [9.0]]


def test_clustering_is_the_same_for_the_same_seed_down_to_the_last_bit() -> None:
    features = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    once, again = (local_centroids(features, 5, seed=2**62 + 1, min_count=1) for _ in range(2))
    np.testing.assert_array_equal(once.centres, again.centres)
    other = local_centroids(features, 5, seed=2, min_count=1)
    assert not np.array_equal(once.centres, other.centres)
