"""The checks of new cases; a check whose value is beyond its limit is an alarm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.core.one_line import format_measure
from fedsilo.models.measures.drift import LARGE, population_stability_index, psi_by_chance
from fedsilo.models.measures.intervals import Estimate, wilson
from fedsilo.pages.page import with_interval

_CELLS = 10  # largest number of cells of a numeric feature, with equally many training samples each
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CaseCheck:
    """The result of one check of new cases."""

    name: str  # name of the check
    value: str  # the measured value as text
    limit: str  # the rule for an alarm as text
    alarm: bool  # whether the value is beyond the limit

    def line(self) -> str:
        """Format the check as a line for a terminal."""
        verdict = "ok   "
        if self.alarm:
            verdict = "ALARM"
        return f"{verdict}  {self.name}: {self.value} ({self.limit})"


def drift_checks(
    names: Sequence[str], training: Tensor, new: Tensor, floor: int
) -> Iterator[CaseCheck]:
    """Yield a check for each column that compares the distributions of its training and new values.

    The measure is the population stability index (PSI) over the cells of a histogram. The check is
    an alarm if the PSI is above a limit. The limit is 0.25 or, if larger, the PSI that chance alone
    exceeds with a probability of 5 % divided by the number of columns. A column is skipped if its
    histogram cannot have two cells with at least ``floor`` training samples each.

    Args:
        names: the names of the features. A level of a categorical column is called
            ``column=level``.
        training: the site's training samples (n, features), NaN for a missing value.
        new: the new cases (m, features), NaN for a missing value.
        floor: the smallest number of training samples in a cell.
    """
    columns = _places_by_column(names)
    for places in columns:
        old = training[:, places].double().numpy()
        now = new[:, places].double().numpy()
        cells = _cells(old, now, floor)
        if cells is None:
            continue
        expected, found = cells
        # The more features are compared and the fewer samples there are, the larger a PSI by chance
        psi = population_stability_index(expected, found)
        chance = psi_by_chance(len(expected), len(old), len(now), len(columns))
        limit = max(LARGE, chance)
        yield CaseCheck(
            f"distribution of {_column(names[places[0]])}",
            f"PSI {psi:.3f} over {len(expected)} cells",
            f"alarm above {limit:.2f}",
            psi > limit,
        )


def _places_by_column(names: Sequence[str]) -> list[list[int]]:
    """Group the indices of the features by column, in order.

    A feature ``column=level`` is one level of a categorical column. Neighbouring features of the
    same categorical column form a group. Any other feature is a numeric column.
    """
    groups: list[list[int]] = []
    before = None
    for place, name in enumerate(names):
        kind = (_column(name), "=" in name)
        if kind == before:
            groups[-1].append(place)
        else:
            groups.append([place])
        before = kind
    return groups


def _column(name: str) -> str:
    return name.partition("=")[0]


def _cells(old: Array, now: Array, floor: int) -> tuple[list[int], list[int]] | None:
    """Divide the values of a column into cells, and count the training and the new samples in each.

    A categorical column has a cell for each level, and a numeric column for ranges of values. If
    any value is missing, the last cell counts the missing values. A cell with fewer than ``floor``
    training samples is added to the cell before it. If the first cell is too small, the next cells
    are added to it.

    Args:
        old: training samples (n, features of the column).
        now: new samples (m, features of the column).
        floor: the smallest number of training samples in a cell.

    Returns:
        The training and the new counts by cell. None if fewer than two cells remain, or if all
        training values are missing.
    """
    old_missing = np.isnan(old[:, 0])
    now_missing = np.isnan(now[:, 0])
    old, now = old[~old_missing], now[~now_missing]
    if not len(old):
        return None
    if old.shape[1] > 1:
        old, now = _levels(old), _levels(now)
        edges = np.arange(1, old.max() + 1) - 0.5
    else:
        edges = _edges(old, len(now), floor)
    old_counts = _count_between(edges, old)
    now_counts = _count_between(edges, now)
    if old_missing.any() or now_missing.any():
        old_counts.append(int(old_missing.sum()))
        now_counts.append(int(now_missing.sum()))
    return _merge_cells(old_counts, now_counts, floor)


def _edges(old: Array, new_count: int, floor: int) -> Array:
    """Choose the edges that cut a numeric feature into the cells of a histogram.

    If the training samples have exactly two values, the only edge is in the middle between them.
    Otherwise the edges are the quantiles that cut the training samples into c equal parts. c is
    min(n, ``new_count``) // (2 * ``floor``), limited to the range from 2 to 10. Equal quantiles
    become one edge, so there can be fewer than c cells.

    Args:
        old: the n training samples of the feature, (n, 1), without missing values.
        new_count: the number of new samples.
        floor: the smallest number of training samples wanted in a cell. The cells may be smaller.

    Returns:
        The inner edges in increasing order, one fewer than cells.
    """
    values: Array = np.unique(old)
    if len(values) == 2:
        return np.asarray(values.mean(keepdims=True))
    # New samples are divided by the same edges, so a small number of them gets few cells
    cells = int(np.clip(min(len(old), new_count) // (2 * floor), 2, _CELLS))
    return np.unique(np.quantile(old, np.arange(1, cells) / cells))


def _count_between(edges: Array, values: Array) -> list[int]:
    """Count the values in each cell; a value on an edge belongs to the cell above it."""
    cells = np.searchsorted(edges, values.ravel(), "right")
    counts: list[int] = np.bincount(cells, minlength=len(edges) + 1).tolist()
    return counts


def _levels(rows: Array) -> Array:
    """Convert the features of a categorical column to level numbers (n,), counted from 0.

    ``rows`` (n, levels - 1) has a feature of 0 or 1 for each level except the first, without
    missing values. A row of zeros means the first level, number 0.
    """
    lifted: Array = np.where(rows.max(axis=1) > 0, rows.argmax(axis=1) + 1, 0).astype(float)
    return lifted


def _merge_cells(old: list[int], now: list[int], floor: int) -> tuple[list[int], list[int]] | None:
    """Merge neighbouring cells until each has at least ``floor`` training samples.

    A cell that is too small is added to the cell before it. If the first cell is too small, the
    next cells are added to it until it is large enough. A cell of missing values is treated like
    any other cell.

    Returns:
        The training and the new counts by cell, or None if fewer than two cells remain.
    """
    kept_old: list[int] = []
    kept_now: list[int] = []
    for old_count, now_count in zip(old, now, strict=True):
        # A cell that is still too small takes in the next one, so the first cell grows, too
        if kept_old and (old_count < floor or kept_old[-1] < floor):
            kept_old[-1] += old_count
            kept_now[-1] += now_count
        else:
            kept_old.append(old_count)
            kept_now.append(now_count)
    if len(kept_old) < 2 or kept_old[-1] < floor:
        return None
    return kept_old, kept_now


def coverage_check(sets: Tensor, labels: Tensor, coverage: float) -> CaseCheck:
    """Check that prediction sets contain the true class as often as promised.

    The measure is the share of sets that contain the true class. The check is an alarm if the 95 %
    Wilson interval of this share is entirely below ``coverage``.

    Args:
        sets: bool (n, classes), the classes in the prediction set of each case.
        labels: the true classes (n,).
        coverage: the promised share, between 0 and 1.
    """
    right, n = int(sets.gather(1, labels[:, None]).sum()), len(labels)
    around = wilson(right, n)
    return CaseCheck(
        f"coverage of prediction sets, promised {coverage:g}",
        f"{right} of {n}, {with_interval(Estimate(right / n, around))}",
        "alarm if all of the 95 % interval is below the promise",
        around.high < coverage,
    )


def certainty_check(probabilities: Tensor, labels: Tensor) -> CaseCheck:
    """Check that the mean confidence agrees with the accuracy.

    The confidence in a case is the largest of its ``probabilities`` (n, classes). ``labels`` (n,)
    are the true classes. The check is an alarm if the mean confidence is outside the 95 % Wilson
    interval of the accuracy.
    """
    confidence, predicted = probabilities.max(dim=1)
    right, n, said = int((predicted == labels).sum()), len(labels), confidence.mean().item()
    around = wilson(right, n)
    return CaseCheck(
        "calibration: mean confidence and accuracy",
        f"{said:.3f} and {with_interval(Estimate(right / n, around))}",
        "alarm if the mean confidence is outside the 95 % interval",
        not around.low <= said <= around.high,
    )


def accuracy_check(predicted: Tensor, labels: Tensor, reference: float) -> CaseCheck:
    """Check that the accuracy on new cases has not fallen below that on the run's test samples.

    The check is an alarm if the 95 % Wilson interval of the accuracy is entirely below
    ``reference``, the accuracy on the test samples. ``predicted`` (n,) are classes, and ``labels``
    (n,) the true classes.
    """
    right, n = int(torch.eq(predicted, labels).sum()), len(labels)
    around = wilson(right, n)
    return CaseCheck(
        f"accuracy, {reference:.3f} on the run's test samples",
        with_interval(Estimate(right / n, around)),
        "alarm if all of the 95 % interval is below the run's accuracy",
        around.high < reference,
    )


def error_check(errors: Tensor, reference: float) -> CaseCheck:
    """Check that the mean absolute error has not risen above the one on the run's test samples.

    The check is an alarm if the 95 % interval of the mean error is entirely above ``reference``.
    The interval is 1.96 standard errors on each side of the mean.

    Args:
        errors: the absolute errors (n,) of at least two new cases.
        reference: the mean absolute error on the run's test samples.
    """
    mean = errors.double().mean().item()
    reach = 1.96 * errors.double().std().item() / len(errors) ** 0.5
    low = mean - reach
    return CaseCheck(
        f"MAE, {format_measure(reference)} on the run's test samples",
        f"{format_measure(mean)} ({format_measure(low)} to {format_measure(mean + reach)})",
        "alarm if all of the 95 % interval is above the run's MAE",
        low > reference,
    )
