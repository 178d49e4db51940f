from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import DataError, SettingError
from fedsilo.datasets.partition.label_sets import TOLERANCE, LabelCut, divide_evenly, label_sets
from fedsilo.datasets.silo.silos import SPLITS
from tests.support.errors import refuses

NONE = np.empty(0, np.int64)


def cut_of(
    train: list[int], sets: list[tuple[int, ...]], test: list[int] | None = None, **parts: list[int]
) -> LabelCut:
    """Return the cutting of samples whose labels are given."""
    labels = {"train": train, "val": [], "test": train if test is None else test, **parts}
    arrays = {part: np.array(found, dtype=np.int64) for part, found in labels.items()}
    names = [f"s{number}" for number in range(len(sets))]
    return LabelCut(arrays, sets, names, 1 + max(map(max, sets)), "here")


def shares(sets: list[tuple[int, ...]]) -> list[float]:
    holders = Counter(label for held in sets for label in held)
    return [sum(holders[label] == 1 for label in held) / len(held) for held in sets]


def test_at_1_ten_labels_are_two_for_each_of_five_silos() -> None:
    assert label_sets(10, 5, 1.0) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def test_at_0_every_silo_holds_every_label() -> None:
    assert label_sets(10, 5, 0.0) == [tuple(range(10))] * 5
    assert label_sets(2, 3, 0.0) == [(0, 1)] * 3


def test_at_one_half_ten_labels_are_eight_private_ones_and_two_shared_ones() -> None:
    found = label_sets(10, 5, 0.5)
    assert found == [(0, 1, 8, 9), (2, 3, 8, 9), (4, 5, 8, 9), (6, 8), (7, 9)]
    assert shares(found) == [0.5] * 5


def test_labels_that_do_not_divide_are_spread_as_evenly_as_can_be() -> None:
    assert label_sets(10, 9, 1.0) == [(0, 1), *((label,) for label in range(2, 10))]
    # 1/4: a private label and three of four shared ones, each of which three silos hold
    found = label_sets(8, 4, 0.25)
    assert shares(found) == [0.25] * 4
    assert {len(held) for held in found} == {4}
    assert Counter(label for held in found for label in held if label >= 4) == dict.fromkeys(
        range(4, 8), 3
    )


@given(st.integers(1, 24), st.integers(2, 12), st.floats(0, 1))
def test_all_labels_are_held_and_each_silos_share_is_as_asked(
    classes: int, silos: int, share: float
) -> None:
    try:
        found = label_sets(classes, silos, share)
    except SettingError:
        return
    assert len(found) == silos
    assert {label for held in found for label in held} == set(range(classes))
    assert all(list(held) == sorted(set(held)) and held for held in found)
    assert shares(found) == pytest.approx([share] * silos, abs=TOLERANCE + 1e-6)
    assert found == label_sets(classes, silos, share)


@given(st.integers(1, 20), st.integers(2, 12))
def test_1_is_impossible_only_with_fewer_labels_than_silos_and_0_never(
    classes: int, silos: int
) -> None:
    assert len(label_sets(classes, silos, 0.0)) == silos
    if classes >= silos:
        assert shares(label_sets(classes, silos, 1.0)) == [1.0] * silos
    else:
        with pytest.raises(SettingError, match=r"cannot give .* silos this share"):
            label_sets(classes, silos, 1.0)


@pytest.mark.parametrize(
    ("classes", "silos", "share", "nearest"),
    [(10, 5, 0.75, "0.5 and 1"), (2, 2, 0.5, "0 and 1"), (10, 11, 1.0, "0"), (2, 3, 0.9, "0")],
)
def test_a_share_that_cannot_be_is_refused_with_the_nearest_that_can(
    classes: int, silos: int, share: float, nearest: str
) -> None:
    says = (
        rf"'split.unseen' is {share:g}, but {classes} labels .* {silos} silos .* nearest are "
        f"{nearest}$"
    )
    with pytest.raises(SettingError, match=says):
        label_sets(classes, silos, share)
    for near in nearest.split(" and "):
        assert shares(label_sets(classes, silos, float(near))) == [float(near)] * silos


def test_one_silo_has_nobody_to_differ_from() -> None:
    with refuses(SettingError, 2, 1):
        label_sets(10, 1, 1.0)


def test_what_is_needed_is_levelled_up_to_the_limits() -> None:
    assert divide_evenly(9, [5, 5, 5]) == [3, 3, 3]
    assert divide_evenly(10, [5, 1, 9]) == [4, 1, 5]
    assert divide_evenly(3, [9, 9]) == [1, 2]
    assert divide_evenly(99, [2, 3]) == [2, 3]


def test_silos_train_on_the_first_rows_of_their_labels_and_validate_on_the_last_of_all() -> None:
    # Rows 0, 4, 8, ... are of label 0; each of 4 labels has 15
    cut = cut_of([0, 1, 2, 3] * 15, [(0, 1), (2, 3)], test=[0, 1, 2, 3] * 3)
    first, second = cut.rows(20, 4)
    assert first["train"].tolist() == [row for row in range(36) if row % 4 < 2]
    assert second["train"].tolist() == [row for row in range(36) if row % 4 >= 2]
    # Two validation images of four labels: labels 2 and 3, silo by silo up to the last
    assert first["val"].tolist() == [54, 55]
    assert second["val"].tolist() == [58, 59]
    assert first["test"].tolist() == [0, 1, 2, 3]
    assert second["test"].tolist() == [4, 5, 6, 7]


def test_a_pools_own_validation_part_is_cut_instead_of_the_training_part() -> None:
    cut = cut_of([0, 1] * 10, [(0,), (1,)], val=[0, 1, 0, 1, 0])
    first, second = cut.rows(10, 0)
    assert first["train"].tolist() == list(range(0, 20, 2))
    assert [first["val"].tolist(), second["val"].tolist()] == [[0, 1], [2, 3]]


def test_silos_share_a_label_in_the_ratio_in_which_they_need_it() -> None:
    # s0 holds three labels and s1 one: of the common label 2 it takes three times as many
    cut = cut_of([0] * 90 + [1] * 90 + [2] * 88, [(0, 1, 2), (2,)], val=[0, 1, 2] * 2)
    rows = cut.rows(0, 0)
    counts = [np.bincount(cut.labels["train"][own["train"]], minlength=3).tolist() for own in rows]
    assert counts == [[22, 22, 22], [0, 0, 66]]


def test_a_rare_label_limits_equal_parts_and_gives_what_it_has_where_more_is_asked() -> None:
    labels = [0] * 50 + [1] * 12
    cut = cut_of(labels, [(0, 1), (0, 1)], val=[0, 1] * 2)
    assert [len(own["train"]) for own in cut.rows(0, 0)] == [13, 13], "6 of label 1, 7 of label 0"
    assert [len(own["test"]) for own in cut.rows(0, 0)] == [12, 12]
    more = cut.rows(30, 20)
    assert [sum(own["train"] >= 50) for own in more] == [6, 6]
    assert [sum(own["test"] >= 50) for own in more] == [6, 6]
    assert [len(own["test"]) for own in more] == [20, 20]


@settings(max_examples=50)
@given(
    st.lists(st.integers(20, 60), min_size=2, max_size=6),
    st.integers(2, 3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 50),
    st.booleans(),
)
def test_no_sample_is_at_two_silos_and_all_silos_are_of_one_size(
    counts: list[int], silos: int, share: float, seed: int, own_validation: bool
) -> None:
    try:
        sets = label_sets(len(counts), silos, share)
    except SettingError:
        return
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    val = labels.tolist() if own_validation else []
    cut = cut_of(labels.tolist(), sets, val=val)
    rows = cut.rows(0, 0)
    for held, own in zip(sets, rows, strict=True):
        trained = np.bincount(labels[own["train"]], minlength=len(counts))
        assert set(np.flatnonzero(trained)) == set(held)
        assert np.ptp(trained[list(held)]) <= 1
        assert set(labels[own["test"]]) == set(range(len(counts)))
        assert all(np.all(np.diff(own[part]) > 0) for part in SPLITS)
    for part in SPLITS:
        assert len({len(own[part]) for own in rows}) == 1
        together = np.concatenate([own[part] for own in rows])
        assert len(np.unique(together)) == len(together)
    if not own_validation:
        trained_on = np.concatenate([own["train"] for own in rows])
        assert not np.isin(np.concatenate([own["val"] for own in rows]), trained_on).any()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((42, 4), [2, 42, 40, 20]),
        ((9, 4), [9]),
        ((20, 3), [2, 3, 4]),
        ((20, 9), [2, 9, 3]),
    ],
)
def test_sizes_that_the_pool_cannot_give_are_refused_with_its_counts(
    sizes: tuple[int, int], says: list[object]
) -> None:
    cut = cut_of([0, 1, 2, 3] * 20, [(0, 1), (2, 3)], test=[0, 1, 2, 3, 0, 1, 2, 3, 3])
    with refuses(DataError, *says):
        cut.rows(*sizes)


def test_a_label_without_enough_images_for_every_holder_is_refused() -> None:
    cut = cut_of([0] * 40 + [1], [(0, 1), (0, 1)], val=[0, 1] * 2)
    with pytest.raises(DataError, match="is left of label 1 for s0; the pool has 1"):
        cut.rows(20, 0)
    cut = cut_of([0] * 20 + [1] * 20, [(0, 1), (0, 1)], test=[0] * 9 + [1])
    with refuses(DataError, 2, 9, 1):
        cut.rows(0, 0)


def test_a_pool_without_test_images_cuts_silos_without_them() -> None:
    cut = cut_of([0, 1] * 20, [(0,), (1,)], test=[])
    assert [len(own["test"]) for own in cut.rows(10, 0)] == [0, 0]
    with pytest.raises(DataError, match="test images"):
        cut.rows(10, 4)
