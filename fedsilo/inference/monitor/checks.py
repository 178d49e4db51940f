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

    The check is an alarm if the population stability index is above 0.25 and too large to be
    chance. A column is skipped if its histogram cannot have two cells with ``floor`` training
    samples each. Both tensors are (samples, features), with NaN for missing.
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
    """Divide a column into cells, and count the training and the new samples in each.

    A cell is a level or a range of values. The last one may count missing values. Small cells are
    merged. Fewer than two cells give None.
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
    """Choose the inner edges that cut a numeric feature into the cells of a histogram, in order.

    Two values are cut in the middle. Otherwise, quantiles of the training samples ``old`` (n, 1)
    give at most 10 cells. Smaller samples give fewer cells.
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

    A cell that is too small joins the cell before it, and a small first cell the next one. The
    result is None if fewer than two cells remain.
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

    The check is an alarm if the 95 % Wilson interval of the share of such sets is entirely below
    ``coverage``.

    Args:
        sets: bool (n, classes), the classes in each prediction set.
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
