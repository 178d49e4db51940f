import dataclasses
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.row_splits import Indices, RowSplit, draw_test_rows, split_rows
from fedsilo.datasets.tables.heart import HEART
from fedsilo.datasets.tables.parsing import parse_table
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import Lines
from tests.support.errors import refuses

PLAIN = CommonSettings(dataset="table")


def split(labels: Indices, share: float = 0.34, seed: int = 43, **changes: int) -> RowSplit:
    own = dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]  # field by field
    return split_rows(labels, own, share, seed, "a.csv")


def labels_of(*counts: int) -> Indices:
    """Return so many labels of class 0, 1, ..., mixed."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(1).permutation(labels)


def parts(found: RowSplit) -> list[list[int]]:
    return [found.train.tolist(), found.val.tolist(), found.test.tolist()]


def counts_of(labels: Indices, rows: Indices, classes: int) -> list[int]:
    return np.bincount(labels[rows], minlength=classes).tolist()


@pytest.mark.parametrize("site", ["cleveland", "hungary", "switzerland", "va"])
def test_the_hospitals_of_heart_are_cut_as_flamby_cuts_them(
    real_data: Path, tmp_path: Path, site: str
) -> None:
    places = Places(real_data, tmp_path)
    schema = HEART.schema(places)
    labels = parse_table(*_table(site, places)).labels
    # FLamby, fed_heart_disease/dataset.py: stratified but for a centre with a class of two or less
    rare = min(np.bincount(labels, minlength=2)) <= 2
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=0.34,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=None if rare else labels,
    )
    assert rare == (site == "switzerland")
    found = split(labels, schema.test_share, schema.split_seed)
    assert parts(found) == [sorted(train), [], sorted(test)]


def _table(site: str, places: Places) -> tuple[Lines, TableSchema, str]:
    schema = HEART.schema(places)
    lines, where = HEART.lines_of(site, schema, places)
    return lines, schema, where


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 60), min_size=2, max_size=3),
    share=st.sampled_from([0.1, 0.2, 0.25, 0.34, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
@example(counts=[25, 25], share=0.34, seed=43)
@example(counts=[60, 40], share=0.34, seed=43)
@example(counts=[30, 20], share=0.9, seed=43)
def test_every_row_is_training_or_test_data_and_the_share_rounded_up_is_test_data(
    counts: list[int], share: float, seed: int
) -> None:
    labels = labels_of(*counts)
    size = math.ceil(share * len(labels))
    assume(len(counts) <= size <= len(labels) - len(counts))
    found = split(labels, share, seed)
    assert len(found.test) == size
    assert sorted([*found.train.tolist(), *found.test.tolist()]) == list(range(len(labels)))
    assert len(found.val) == 0


def test_classes_of_more_than_two_rows_are_shared_out_alike() -> None:
    labels = labels_of(60, 30)
    for seed in range(5):
        assert counts_of(labels, split(labels, 1 / 3, seed).test, 2) == [20, 10]


@pytest.mark.parametrize(("rare", "stratified"), [(2, False), (3, True)])
def test_the_split_is_stratified_only_if_each_class_has_more_than_two_rows(
    rare: int, stratified: bool
) -> None:
    labels = labels_of(60, rare)
    shares = {counts_of(labels, split(labels, 0.34, seed).test, 2)[1] for seed in range(30)}
    assert (shares == {1}) == stratified
    assert len(shares) == (1 if stratified else 3)


def test_one_class_alone_is_split_all_the_same() -> None:
    found = split(labels_of(0, 10))
    assert (len(found.train), len(found.test)) == (6, 4)


def test_the_seed_of_the_split_decides_it_and_fold_settings_do_not() -> None:
    labels = labels_of(30, 20)
    first = split(labels)
    assert parts(first) == parts(split(labels, fold_seed=9, seed=43))
    assert parts(first) != parts(split(labels, seed=44))


def test_without_a_share_all_rows_are_training_rows() -> None:
    assert parts(split(labels_of(2, 1), share=0)) == [[0, 1, 2], [], []]


fold_cases = given(
    counts=st.lists(st.integers(12, 25), min_size=2, max_size=3),
    folds=st.integers(2, 5),
    seed=st.integers(0, 99),
)


@settings(max_examples=25, deadline=None)
@fold_cases
def test_test_folds_are_disjoint_stratified_and_all_rows_together(
    counts: list[int], folds: int, seed: int
) -> None:
    labels = labels_of(*counts)
    found = [
        split(labels, test_folds=folds, test_fold=fold, fold_seed=seed) for fold in range(folds)
    ]
    together = [row for one in found for row in one.test.tolist()]
    assert sorted(together) == list(range(len(labels)))
    for one in found:
        assert sorted([*one.train.tolist(), *one.test.tolist()]) == list(range(len(labels)))
    for label, count in enumerate(counts):
        held = [counts_of(labels, one.test, len(counts))[label] for one in found]
        assert set(held) <= {count // folds, -(-count // folds)}


@settings(max_examples=25, deadline=None)
@fold_cases
def test_validation_folds_cut_the_training_rows_and_leave_the_test_rows_alone(
    counts: list[int], folds: int, seed: int
) -> None:
    labels = labels_of(*counts)
    for outer in ({}, {"test_folds": 3, "test_fold": 1}):
        whole = split(labels, fold_seed=seed, **outer)
        found = [
            split(labels, fold_seed=seed, val_folds=folds, val_fold=fold, **outer)
            for fold in range(folds)
        ]
        assert all(one.test.tolist() == whole.test.tolist() for one in found)
        together = [row for one in found for row in one.val.tolist()]
        assert sorted(together) == whole.train.tolist()
        for one in found:
            assert sorted([*one.train.tolist(), *one.val.tolist()]) == whole.train.tolist()


def test_the_seed_of_the_folds_decides_them_and_the_seed_of_the_split_does_not() -> None:
    labels = labels_of(30, 20)
    first = parts(split(labels, test_folds=5, val_folds=5))
    assert parts(split(labels, test_folds=5, val_folds=5, seed=99)) == first
    assert parts(split(labels, test_folds=5, val_folds=5, share=0.8)) == first
    assert parts(split(labels, test_folds=5, val_folds=5, fold_seed=1)) != first


@pytest.mark.parametrize("folds", [{}, {"test_folds": 4, "test_fold": 2}])
@pytest.mark.parametrize("validation", [{}, {"val_folds": 3, "val_fold": 1}])
def test_without_test_rows_training_and_validation_rows_are_the_same(
    folds: dict[str, int], validation: dict[str, int]
) -> None:
    labels = labels_of(20, 15)
    with_test = split(labels, **folds, **validation)
    without = split(labels, **folds, **validation, use_test=False)
    assert parts(without) == [with_test.train.tolist(), with_test.val.tolist(), []]
    assert len(with_test.test) > 0


def test_rows_of_a_part_keep_the_order_of_the_file() -> None:
    for part in parts(split(labels_of(20, 15), val_folds=3)):
        assert part == sorted(part)


def test_a_class_of_fewer_rows_than_folds_is_missing_in_some_without_a_warning() -> None:
    labels = labels_of(12, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [split(labels, test_folds=4, test_fold=fold) for fold in range(4)]
    rare = [counts_of(labels, one.test, 2)[1] for one in found]
    assert sorted(rare) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("counts", "changes", "said"),
    [
        (
            (1, 1),
            {},
            r"2 rows are too few for a test part of 0\.34: add rows, or in .* 'test-share' to 0$",
        ),
        ((0, 0), {}, "0 rows are too few"),
        ((2, 2), {"test_folds": 5}, "4 rows cannot be cut into 5 folds"),
        ((3, 3), {"test_folds": 4}, "no class has as many as 4 rows"),
        ((3, 3), {"test_folds": 2, "val_folds": 4}, "3 rows cannot be cut into 4 folds"),
        ((4, 4), {"test_folds": 2, "val_folds": 3}, "no class has as many as 3 rows"),
    ],
)
def test_too_few_rows_are_refused_by_their_file(
    counts: tuple[int, ...], changes: dict[str, int], said: str
) -> None:
    with pytest.raises(DataError, match=rf"^a\.csv: {said}"):
        split(labels_of(*counts), **changes)


@pytest.mark.parametrize(("counts", "share"), [((3, 3), 0.1), ((3, 3), 0.9), ((3, 3, 3), 0.2)])
def test_a_part_too_small_to_hold_each_class_is_refused_by_its_file(
    counts: tuple[int, ...], share: float
) -> None:
    with refuses(DataError, "a.csv"):
        draw_test_rows(labels_of(*counts), share, 43, "a.csv")


def grouped(
    labels: Indices, groups: list[str], share: float = 0.25, seed: int = 0, **changes: int
) -> RowSplit:
    own = dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]  # field by field
    return split_rows(labels, own, share, seed, "a.csv", groups)


@st.composite
def grouped_rows(draw: st.DrawFn, least: int = 2) -> tuple[Indices, list[str]]:
    """Return labels and groups of 1 to 4 rows each; a group's rows are of one class or two."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=least, max_size=40))
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    labels = draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups)))
    order = draw(st.permutations(range(len(groups))))
    return np.array(labels)[order], [groups[row] for row in order]


def groups_of(groups: list[str], rows: Indices) -> set[str]:
    return {groups[row] for row in rows}


@settings(max_examples=100, deadline=None)
@given(rows=grouped_rows(), share=st.sampled_from([0.1, 0.25, 0.34, 0.5, 0.9]), seed=st.integers(0))
def test_a_share_of_groups_is_test_data_and_no_group_is_on_both_sides(
    rows: tuple[Indices, list[str]], share: float, seed: int
) -> None:
    labels, groups = rows
    found = grouped(labels, groups, share, seed)
    assert sorted([*found.train, *found.test]) == list(range(len(labels)))
    assert groups_of(groups, found.train).isdisjoint(groups_of(groups, found.test))
    assert len(found.train) > 0
    assert len(found.test) > 0
    # Off by less than the largest group and a row of each class, however few rows there are
    assert abs(len(found.test) - share * len(labels)) <= 4 + 3


@settings(max_examples=40, deadline=None)
@given(rows=grouped_rows(least=8), seed=st.integers(0, 99), fold=st.integers(0, 2))
def test_no_group_is_in_two_folds_or_in_training_and_validation(
    rows: tuple[Indices, list[str]], seed: int, fold: int
) -> None:
    labels, groups = rows
    assume(np.bincount(labels).max() >= 12)
    held = []
    for test_fold in range(3):
        folds = {"test_folds": 3, "test_fold": test_fold, "val_folds": 2, "val_fold": fold % 2}
        try:
            found = grouped(labels, groups, fold_seed=seed, **folds)
        except DataError as error:
            assume("cannot be" not in str(error))
            raise
        assert sorted([*found.train, *found.val, *found.test]) == list(range(len(labels)))
        names = [groups_of(groups, part) for part in (found.train, found.val, found.test)]
        assert names[0].isdisjoint(names[1])
        assert (names[0] | names[1]).isdisjoint(names[2])
        held.append(found.test)
    assert sorted(np.concatenate(held).tolist()) == list(range(len(labels)))


def test_the_share_and_the_classes_of_many_groups_are_kept_closely() -> None:
    labels = np.repeat([0, 1, 2], [900, 240, 60])
    groups = [f"g{row // 6}" if row % 6 < 3 else f"h{row}" for row in range(len(labels))]
    for share, seed in ((0.25, 0), (0.25, 1), (0.1, 2), (0.34, 3)):
        test = grouped(labels, groups, share, seed).test
        assert counts_of(labels, test, 3) == pytest.approx(
            [900 * share, 240 * share, 60 * share], abs=3
        )


def test_classes_too_rare_for_the_share_still_make_up_its_test_rows() -> None:
    labels = np.repeat(np.arange(8), 2)  # of no class a quarter is a row
    assert len(grouped(labels, [str(row) for row in range(16)]).test) == 4


def test_large_groups_are_no_more_often_test_data_than_small_ones() -> None:
    groups = [f"large{n}" for n in range(40) for _ in range(4)] + [f"small{n}" for n in range(160)]
    labels = np.zeros(len(groups), dtype=np.int64)
    held = [grouped(labels, groups, seed=seed).test for seed in range(20)]
    large = sum((test < 160).sum() for test in held) / sum(len(test) for test in held)
    assert large == pytest.approx(0.5, abs=0.06)


def test_the_seed_draws_the_groups_and_the_order_of_rows_does_not_matter() -> None:
    labels, groups = labels_of(30, 20), [f"g{row // 2}" for row in range(50)]
    first = grouped(labels, groups).test
    assert grouped(labels, groups).test.tolist() == first.tolist()
    assert grouped(labels, groups, seed=1).test.tolist() != first.tolist()
    turned = grouped(labels[::-1], groups[::-1]).test
    assert groups_of(groups[::-1], turned) == groups_of(groups, first)


def test_two_groups_are_a_training_and_a_test_group_and_the_smaller_one_is_tested() -> None:
    labels = np.array([0, 0, 1, 1, 1])
    assert parts(grouped(labels, ["a", "a", "b", "b", "b"], 0.1)) == [[2, 3, 4], [], [0, 1]]
    for large in (0.9, 0.99):
        assert len(grouped(labels[1:], ["a", "a", "b", "b"], large).train) == 2
    assert parts(grouped(labels, ["a", "a", "b", "b", "b"], 0)) == [[0, 1, 2, 3, 4], [], []]


@pytest.mark.parametrize(
    ("groups", "changes", "said"),
    [
        (["a"] * 8, {}, r"8 samples of 1 group \(.*\) cannot .* share of 0\.25: add"),
        (list("aaaabbcc"), {"test_folds": 4}, "rows of 3 groups .* into 4 folds: take fewer"),
        (list("aaaabbcc"), {"test_folds": 2, "val_folds": 3}, "rows of . groups? .* 3 folds"),
    ],
)
def test_too_few_groups_are_refused_by_their_file(
    groups: list[str], changes: dict[str, int], said: str
) -> None:
    with pytest.raises(DataError, match=rf"^a\.csv: {said}"):
        grouped(np.array([0, 1] * 4 if "val_folds" not in changes else [0] * 8), groups, **changes)
    with refuses(DataError, "a.csv", "0"):
        grouped(np.zeros(0, dtype=np.int64), [])


def test_rows_without_groups_are_split_as_ever() -> None:
    # Read off the version that knew no groups
    labels = labels_of(6, 5)
    assert parts(split(labels, val_folds=2)) == [[4, 9, 10], [1, 3, 5, 8], [0, 2, 6, 7]]
    assert parts(split(labels, test_folds=3, test_fold=1, val_folds=2)) == [
        [1, 2, 3],
        [0, 7, 8, 10],
        [4, 5, 6, 9],
    ]
