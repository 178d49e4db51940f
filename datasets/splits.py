"""Splitting a site's rows into training, validation and test rows, by scikit-learn.

``folds`` 0 for the test rows is the data set's own split, by default that of FLamby's
Fed-Heart-Disease: a fixed share, stratified only if every class has more than two rows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import DataError
from models.seeding import derive_seed
from models.settings import CommonSettings

Indices = npt.NDArray[Any]


@dataclass(frozen=True)
class RowSplit:
    """Row indices of each part, in ascending order; val and test may be empty."""

    train: Indices
    val: Indices
    test: Indices


def split_rows(
    labels: Indices, settings: CommonSettings, share: float, seed: int, where: str
) -> RowSplit:
    """Split rows by ``settings`` (test-folds, val-folds, fold-seed, use-test).

    Args:
        labels: (n,) class of each row.
        settings: how many folds, and which of them is left out.
        share: share of test rows where there are no test folds; 0: none.
        seed: random state of that split.
        where: names the site in errors.

    Raises:
        DataError: there are too few rows for it.
    """
    rows = np.arange(len(labels))
    if settings.test_folds:
        key = derive_seed(settings.fold_seed, "test-folds") % 2**32
        rest, test = _fold(rows, labels, settings.test_folds, settings.test_fold, key, where)
    else:
        rest, test = shared_out(labels, share, seed, where)
    val = rest[:0]
    if settings.val_folds:
        key = derive_seed(settings.fold_seed, "val-folds") % 2**32
        rest, val = _fold(rest, labels, settings.val_folds, settings.val_fold, key, where)
    if not settings.use_test:
        test = test[:0]
    return RowSplit(np.sort(rest), np.sort(val), np.sort(test))


def shared_out(labels: Indices, share: float, seed: int, where: str) -> tuple[Indices, Indices]:
    """Return training and test rows, ``share`` of them the latter, as FLamby splits a centre."""
    from sklearn.model_selection import train_test_split

    rows = np.arange(len(labels))
    if share == 0:
        return rows, rows[:0]
    if len(rows) < 3:
        raise DataError(
            f"{where}: {len(rows)} rows are too few for a test part of {share:g}; add rows, or set "
            "the schema's 'test-share' to 0"
        )
    counts = np.unique(labels, return_counts=True)[1]
    stratify = labels if len(counts) > 1 and (counts > 2).all() else None
    try:
        train, test = train_test_split(
            rows, test_size=share, random_state=seed, shuffle=True, stratify=stratify
        )
    except ValueError as error:  # a part would be smaller than the number of classes
        raise DataError(
            f"{where}: {len(rows)} rows cannot be split with a test share of {share:g}: {error}"
        ) from None
    return train, test


def _fold(
    rows: Indices, labels: Indices, folds: int, chosen: int, key: int, where: str
) -> tuple[Indices, Indices]:
    from sklearn.model_selection import StratifiedKFold

    if len(rows) < folds:
        raise DataError(f"{where}: {len(rows)} rows cannot be cut into {folds} folds: take fewer")
    if (np.unique(labels[rows], return_counts=True)[1] < folds).all():
        raise DataError(
            f"{where}: no class has as many as {folds} rows, so {folds} folds cannot be "
            "stratified: take fewer"
        )
    with warnings.catch_warnings():
        # A class with fewer rows than folds is then missing in some of them
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        splitter = StratifiedKFold(folds, shuffle=True, random_state=key)
        rest, out = list(splitter.split(rows, labels[rows]))[chosen]
    return rows[rest], rows[out]
