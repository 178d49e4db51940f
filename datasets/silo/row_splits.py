"""Split a site's rows into training, validation and test rows with scikit-learn.

Without test folds, the test rows are the data set's own; by default they are drawn as in FLamby's
Fed-Heart-Disease: a fixed share, stratified only if every class has more than two rows. If groups
are given (images of one lesion or patient), all rows of a group stay in one part.
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
    """Return the values of the settings in ``SPLIT_KEYS``, a part of each cached silo's key."""
    values = as_mapping(settings)
    return [values[key] for key in SPLIT_KEYS]


@dataclass(frozen=True)
class RowSplit:
    """Row indices of each part, in ascending order; val and test may be empty."""

    train: Indices
    val: Indices
    test: Indices


def check_folds(settings: CommonSettings) -> None:
    """Check that the chosen test fold and validation fold exist.

    Folds are numbered from 0. With 0 folds, which is the default, only fold 0 may be chosen.

    Raises:
        SettingError: a number of folds is 1, or the chosen fold does not exist.
    """
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
    """Split row indices into training, validation and test rows according to ``settings``.

    If 'split.test-folds' is above 0, the test rows are fold 'split.test-fold'. Otherwise they are a
    random ``share`` of the rows. If 'split.val-folds' is above 0, the validation rows are fold
    'split.val-fold' of the remaining rows. Otherwise there are none. If 'split.use-test' is false,
    the test rows are dropped from the result.

    Args:
        labels: class of each row, (n,).
        settings: the number of folds and the chosen fold, for test and validation, and the fold
            seed.
        share: share of test rows, 0..1, used only with 0 test folds. 0 means no test rows.
        seed: seed for drawing this share.
        where: the site's name for errors.
        groups: group of each row, (n,). A group is never divided. None makes each row a group by
            itself.

    Raises:
        DataError: there are too few rows or groups for the folds or the share.
    """
    rows = np.arange(len(labels))
    if settings.test_folds:
        rest, test = cut_fold("test", rows, labels, settings, where, groups)
    elif groups is None:
        rest, test = draw_test_rows(labels, share, seed, where)
    else:
        rest, test = draw_test_groups(labels, _number_groups(groups), share, seed, where)
    # Validation rows are cut from the rows that are left, however the test rows were chosen
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
    """Cut one stratified fold out of some rows, as the test part or the validation part.

    scikit-learn shuffles and cuts the folds, with ``StratifiedKFold`` or, for groups,
    ``StratifiedGroupKFold``. The fold seed and ``kind`` decide the shuffling.

    Args:
        kind: 'test' or 'val', which selects the settings of the folds.
        rows: the row indices to divide, (k,).
        labels: class of every row of the table, (n,).
        settings: number of folds, index of the fold to cut out, and fold seed.
        where: the site's name for errors.
        groups: group of every row of the table, (n,). A group is never divided. None makes each row
            a group by itself.

    Returns:
        The remaining rows and the fold's rows, both ascending. With 0 folds the fold is empty.

    Raises:
        DataError: there are fewer rows or groups than folds, or no class has as many rows as there
            are folds.
    """
    folds = getattr(settings, f"{kind}_folds")
    fold = getattr(settings, f"{kind}_fold")
    if not folds:
        return np.sort(rows), rows[:0]
    # Imported late, because it takes a second, and most runs have no folds
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    classes = labels[rows]
    if groups is None:
        numbers = None
        splitter = StratifiedKFold
    else:
        numbers = _number_groups(groups)[rows]
        splitter = StratifiedGroupKFold
    _check_enough(classes, numbers, folds, where)
    # scikit-learn takes seeds below 2^32. Test and validation folds have seeds of their own, since
    # equal ones would make the folds of both depend on each other
    key = derive_seed(settings.fold_seed, f"{kind}-folds") % 2**32
    with warnings.catch_warnings():
        # A class with fewer rows than folds is then missing in some of them
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        cuts = splitter(folds, shuffle=True, random_state=key).split(rows, classes, numbers)
        rest, out = list(cuts)[fold]
    return np.sort(rows[rest]), np.sort(rows[out])


def _check_enough(labels: Indices, groups: Indices | None, folds: int, where: str) -> None:
    """Check that there are enough rows and groups for ``folds`` stratified folds.

    A class with fewer rows than folds is allowed without a warning if another class has enough.

    Args:
        labels: class of each row, (n,).
        groups: group number of each row, (n,), or None if each row is a group by itself.
        folds: number of folds.
        where: the site's name for errors.

    Raises:
        DataError: there are fewer rows or groups than folds, or no class has as many rows as there
            are folds.
    """
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
    """Number the groups from 0 without gaps, and return each row's group number, (n,)."""
    return np.unique(np.array(groups), return_inverse=True)[1]


def draw_test_rows(labels: Indices, share: float, seed: int, where: str) -> tuple[Indices, Indices]:
    """Draw a random share of a site's rows as test rows.

    The draw is stratified by class if there are several classes and each has at least 3 rows.
    Otherwise it ignores the classes. The benchmark FLamby follows the same rule.

    Args:
        labels: class of each row, (n,).
        share: share of test rows, 0..1. 0 gives no test rows.
        seed: scikit-learn's random state.
        where: the site's name for errors.

    Returns:
        Training and test rows, in random order. With share 0, all rows in ascending order and no
        test rows.

    Raises:
        DataError: ``share`` is above 0 and there are fewer than 3 rows, or scikit-learn cannot
            split them. For example, the test part would have fewer rows than there are classes.
    """
    rows = np.arange(len(labels))
    if share == 0:
        return rows, rows[:0]
    if len(rows) < 3:
        raise DataError(
            f"{where}: {len(rows)} rows are too few for a test part of {share:g}: add rows, or in "
            "the schema of a table set 'test-share' to 0"
        )
    from sklearn.model_selection import train_test_split

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


def draw_test_groups(
    labels: Indices, groups: Indices, share: float, seed: int, where: str
) -> tuple[Indices, Indices]:
    """Choose whole groups as test data, so that about ``share`` of each class's rows are test rows.

    Groups are visited in random order. A group becomes test data if this brings the classes' test
    rows nearer to ``share`` (chi-square distance). A second pass over the remaining groups
    considers the number of all test rows too. If no group is chosen, the smallest becomes test
    data. At least one group stays training data.

    Args:
        labels: class of each row, (n,).
        groups: group number of each row, (n,), from 0 without gaps.
        share: share of test rows, 0..1. 0 gives no test rows.
        seed: decides the order of the groups.
        where: the site's name for errors.

    Returns:
        Training and test rows, both ascending.

    Raises:
        DataError: there are fewer than two groups, and ``share`` is above 0.
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
            # At least one group must be left for training
            if is_nearer and is_test.sum() < len(counts) - 1:
                lacking = after
                is_test[group] = True
    if not is_test.any():
        # Every group overshoots the shares, as when all are large: the smallest does the least harm
        smallest = np.argmin(counts[order, -1])
        is_test[order[smallest]] = True
    return rows[~is_test[groups]], rows[is_test[groups]]


def _group_counts(labels: Indices, groups: Indices) -> Indices:
    """Count the rows of each class in each group.

    Returns:
        An array (groups, classes + 1). The classes that occur are in ascending order. The last
        column is the group's number of rows.
    """
    classes, column = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(np.unique(groups)), len(classes) + 1))
    np.add.at(counts, (groups, column), 1)
    counts[:, -1] = counts[:, :-1].sum(axis=1)
    return counts
