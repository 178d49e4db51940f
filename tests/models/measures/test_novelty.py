import math

import numpy as np
import pytest

from fedsilo.models.measures.novelty import Seen, estimate_region, limit_of


def test_values_between_seen_ones_are_0_and_others_1_and_their_distance() -> None:
    many = Seen(np.array([-1.0, 2.0]), few=False)
    assert many.beyond(np.array([-1.0, 0.5, 2.0, 3.5, -1.25])).tolist() == [0, 0, 0, 2.5, 1.25]
    few = Seen(np.array([0.0, 1.0]), few=True)
    assert few.beyond(np.array([0.0, 1.0, 0.5, 3.0])).tolist() == [0, 0, 1.5, 3.0]
    assert Seen(np.array([]), few=True).beyond(np.array([7.0])).tolist() == [1.0]


def test_the_distance_is_mahalanobis_to_the_nearest_mean() -> None:
    rng = np.random.default_rng(0)
    groups = np.arange(4000) % 2
    samples = rng.normal(size=(4000, 2)) * (2.0, 0.5) + 20.0 * groups[:, None]
    known = estimate_region(samples, np.zeros(samples.shape, bool), groups)
    none = np.zeros((3, 2), bool)
    found = known.novelty(np.array([[0.0, 1.0], [4.0, 0.0], [20.0, 19.0]]), none)
    assert known.reach * found.distance == pytest.approx([2.0, 2.0, 2.0], rel=0.1)
    assert not found.values.any()
    # 99 % of a two-dimensional normal lie within sqrt(-2 ln 0.01)
    assert known.reach == pytest.approx(math.sqrt(-2 * math.log(0.01)), rel=0.05)


def test_what_no_training_sample_lacks_is_more_than_1_and_what_many_lack_is_less() -> None:
    rng = np.random.default_rng(1)
    missing = np.zeros((98, 2), bool)
    missing[:49, 1] = True
    known = estimate_region(rng.normal(size=(98, 2)), missing, None)
    found = known.novelty(np.zeros((3, 2)), np.array([[True, False], [False, True], [False] * 2]))
    assert found.missing == pytest.approx(
        [math.log(100) / math.log(20), math.log(2) / math.log(20), 0.0]
    )
    assert found.score[0] == found.missing[0] > 1


def test_nine_times_in_ten_at_most_5_percent_of_new_samples_are_beyond_the_limit() -> None:
    shares = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        train, held, new = (draw.normal(size=(n, 5)) for n in (100, 99, 1000))
        known = estimate_region(train, np.zeros(train.shape, bool), None)
        limit = limit_of(known.novelty(held, np.zeros(held.shape, bool)).score, 0.05)
        shares.append((known.novelty(new, np.zeros(new.shape, bool)).score > limit).mean())
    assert np.mean(np.array(shares) <= 0.055) >= 0.85
    assert np.mean(shares) > 0.01, "a limit that nothing is beyond finds nothing"


def test_a_limit_takes_19_samples_and_of_few_is_the_largest() -> None:
    assert limit_of(np.arange(18.0), 0.05) == math.inf
    assert limit_of(np.arange(19.0), 0.05) == 18.0
    assert limit_of(np.arange(44.0), 0.05) == 43.0
    # 0.95^45 < 0.1: the largest of 45 is the first that is sure, of 77 the second largest
    assert limit_of(np.arange(45.0), 0.05) == 44.0
    assert limit_of(np.arange(76.0), 0.05) == 75.0
    assert limit_of(np.arange(77.0), 0.05) == 75.0
