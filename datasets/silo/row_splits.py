"""Splitting a site's rows into training, validation and test rows, by scikit-learn.

Without test folds the split is the data set's own, by default that of FLamby's
Fed-Heart-Disease: a fixed share, stratified only if every class has more than two rows. Rows of
one group (images of a lesion, of a patient) stay together where groups are given.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, as_mapping, keys_with

Indices = npt.NDArray[Any]

# The settings that decide which rows are test and validation rows
SPLIT_KEYS = keys_with(CommonSettings, "rows")


def split_values(settings: CommonSettings) -> list[Value]:
    """Return the values of ``SPLIT_KEYS``, which decide a cached silo's content."""
    values = as_mapping(settings)
    return [values[key] for key in SPLIT_KEYS]


@dataclass(frozen=True)
class RowSplit:
    """Row indices of each part, in ascending order; val and test may be empty."""

    train: Indices
    val: Indices
    test: Indices


def check_folds(settings: CommonSettings) -> None:
    """Refuse a fold that does not exist, by a ``SettingError``."""
    for kind in ("test", "val"):
        folds = getattr(settings, f"{kind}_folds")
        fold = getattr(settings, f"{kind}_fold")
        if folds == 1:
            raise SettingError(f"'split.{kind}-folds' must be 0 or at least 2, but is 1")
        if fold and fold >= folds:
            raise SettingError(
                f"'split.{kind}-fold' must be 0 to {max(folds - 1, 0)}, because "
                f"'split.{kind}-folds' is {folds}, but is {fold}"
            )


def split_rows(
    labels: Indices,
    settings: CommonSettings,
    share: float,
    seed: int,
    where: str,
    groups: Sequence[str] | None = None,
) -> RowSplit:
    """Split rows by ``settings`` (test-folds, val-folds, fold-seed, use-test).

    Args:
        labels: (n,) class of each row.
        settings: how many folds, and which of them is left out.
        share: share of test rows where there are no test folds; 0 for none.
        seed: random state of that split.
        where: names the site in errors.
        groups: (n,) group of each row; no group is in two parts. By default each row is its own.

    Raises:
        DataError: there are too few rows or groups for it.
    """
    rows = np.arange(len(labels))
    if settings.test_folds:
        rest, test = cut_fold("test", rows, labels, settings, where, groups)
    elif groups is None:
        rest, test = shared_out(labels, share, seed, where)
    else:
        rest, test = shared_groups(labels, _number_groups(groups), share, seed, where)
    rest, val = cut_fold("val", rest, labels, settings, where, groups)
    if not settings.use_test:
        test = test[:0]
    return RowSplit(rest, val, np.sort(test))


def cut_fold(
    kind: str,
    rows: Indices,
    labels: Indices,
    settings: CommonSettings,
    where: str,
    groups: Sequence[str] | None,
) -> tuple[Indices, Indices]:
    """Cut a fold out of some rows: 'split.val-fold' or 'split.test-fold', as ``kind`` says.

    Returns:
        The rows without the fold, and those of it, both sorted; with 0 folds all of them, and none.

    Raises:
        DataError: there are too few rows or groups for it.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    folds = getattr(settings, f"{kind}_folds")
    fold = getattr(settings, f"{kind}_fold")
    if not folds:
        return np.sort(rows), rows[:0]
    classes = labels[rows]
    if groups is None:
        numbers = None
        splitter = StratifiedKFold
    else:
        numbers = _number_groups(groups)[rows]
        splitter = StratifiedGroupKFold
    _check_enough(classes, numbers, folds, where)
    key = derive_seed(settings.fold_seed, f"{kind}-folds") % 2**32
    with warnings.catch_warnings():
        # A class with fewer rows than folds is then missing in some of them
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        cuts = splitter(folds, shuffle=True, random_state=key).split(rows, classes, numbers)
        rest, out = list(cuts)[fold]
    return np.sort(rows[rest]), np.sort(rows[out])


def _check_enough(labels: Indices, groups: Indices | None, folds: int, where: str) -> None:
    """Refuse more folds than there are rows, rows of a class, or groups, by a ``DataError``."""
    if len(labels) < folds:
        cause = f"{len(labels)} rows cannot be cut into {folds} folds"
    elif (np.unique(labels, return_counts=True)[1] < folds).all():
        cause = f"no class has as many as {folds} rows, so {folds} folds cannot be stratified"
    elif groups is not None and len(np.unique(groups)) < folds:
        count = len(np.unique(groups))
        cause = f"rows of {count} groups (patients, copies) cannot be cut into {folds} folds"
    else:
        return
    raise DataError(f"{where}: {cause}: take fewer folds")


def _number_groups(groups: Sequence[str]) -> Indices:
    """Number the groups from 0 without gaps; return each row's number, (n,)."""
    return np.unique(np.array(groups), return_inverse=True)[1]


def shared_out(labels: Indices, share: float, seed: int, where: str) -> tuple[Indices, Indices]:
    """Return training and test rows, ``share`` of them the latter, as FLamby splits a centre."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(labels))
    if share == 0:
        return rows, rows[:0]
    if len(rows) < 3:
        raise DataError(
            f"{where}: {len(rows)} rows are too few for a test part of {share:g}: add rows, or in "
            "the schema of a table set 'test-share' to 0"
        )
    counts = np.unique(labels, return_counts=True)[1]
    stratify = None
    if len(counts) > 1 and (counts > 2).all():  # FLamby's rule
        stratify = labels
    try:
        train, test = train_test_split(
            rows, test_size=share, random_state=seed, shuffle=True, stratify=stratify
        )
    except ValueError as error:  # a part would be smaller than the number of classes
        raise DataError(
            f"{where}: {len(rows)} rows cannot be split with a test share of {share:g} ({error}): "
            "add rows, or change the share"
        ) from None
    return train, test


def shared_groups(
    labels: Indices, groups: Indices, share: float, seed: int, where: str
) -> tuple[Indices, Indices]:
    """Return training and test rows, about ``share`` of all rows and of each class the latter.

    ``labels`` (n,) has the class of each row, ``groups`` (n,) the number of its group, from 0
    without gaps. Groups come in random order; one becomes test data if that brings the classes'
    test rows nearer to their shares (chi-square distance). A second pass also counts how near all
    test rows are, since of a rare class the share may be less than a row. Each part gets at least a
    group.

    Raises:
        DataError: there are fewer than two groups.
    """
    rows = np.arange(len(labels))
    if share == 0:
        return rows, rows[:0]
    counts = _group_counts(labels, groups)
    if len(counts) < 2:
        raise DataError(
            f"{where}: {len(rows)} samples of {len(counts)} group (patient, lesion or copies) "
            f"cannot be split with a test share of {share:g}: add other samples"
        )
    total = counts.sum(axis=0)
    # Rows that the test part still lacks, by class and, in the last column, in all. A group is
    # taken if the sum of squared gaps, each relative to its class's size, becomes smaller
    lacking = share * total
    is_test = np.zeros(len(counts), dtype=bool)
    order = np.random.default_rng(derive_seed(seed, "test-groups")).permutation(len(counts))
    # The first pass counts the classes only, the second also all rows, the last column
    for columns in (slice(-1), slice(None)):
        for group in order[~is_test[order]]:
            after = lacking - counts[group]
            is_nearer = ((after**2 - lacking**2) / total)[columns].sum() < 0
            # One group at least must be left to train
            if is_nearer and is_test.sum() < len(counts) - 1:
                lacking = after
                is_test[group] = True
    if not is_test.any():
        smallest = np.argmin(counts[order, -1])
        is_test[order[smallest]] = True
    return rows[~is_test[groups]], rows[is_test[groups]]


def _group_counts(labels: Indices, groups: Indices) -> Indices:
    """Return (groups, classes + 1): each group's rows by class, and in all."""
    classes, column = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(np.unique(groups)), len(classes) + 1))
    np.add.at(counts, (groups, column), 1)
    counts[:, -1] = counts[:, :-1].sum(axis=1)
    return counts
