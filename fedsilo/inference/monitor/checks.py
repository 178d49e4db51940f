"""The checks of new cases, each with a value and the limit beyond which it is an alarm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.models.measures.drift import LARGE, population_stability_index, psi_by_chance
from fedsilo.models.measures.intervals import Estimate, wilson
from fedsilo.pages.number_texts import with_interval

_CELLS = 10  # most cells of a numeric feature, with equally many training samples each
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CaseCheck:
    """One check of new cases."""

    name: str  # name of the check
    value: str  # the measured value as text
    limit: str  # the rule for an alarm as text
    alarm: bool  # whether the value is beyond the limit

    def line(self) -> str:
        """Return it in one line."""
        return f"{'ALARM' if self.alarm else 'ok   '}  {self.name}: {self.value} ({self.limit})"


def drift_checks(
    names: Sequence[str], training: Tensor, new: Tensor, floor: int
) -> Iterator[CaseCheck]:
    """Yield a check for each feature with two or more cells of ``floor`` training samples each.

    Args:
        names: names of the features; a level of a category is called ``column=level``.
        training: the site's training samples (n, features), NaN for a missing value.
        new: the new cases (m, features), NaN for a missing value.
        floor: the smallest number of training samples in a cell.
    """
    by_column = groupby(range(len(names)), lambda at: (_column(names[at]), "=" in names[at]))
    columns = [list(places) for _, places in by_column]
    for places in columns:
        old, now = (rows[:, places].double().numpy() for rows in (training, new))
        cells = _cells(old, now, floor)
        if cells is None:
            continue
        expected, found = cells
        psi = population_stability_index(expected, found)
        chance = psi_by_chance(len(expected), len(old), len(now), len(columns))
        limit = max(LARGE, chance)
        yield CaseCheck(
            f"distribution of {_column(names[places[0]])}",
            f"PSI {psi:.3f} over {len(expected)} cells",
            f"alarm above {limit:.2f}",
            psi > limit,
        )


def _column(name: str) -> str:
    return name.partition("=")[0]


def _cells(old: Array, now: Array, floor: int) -> tuple[list[int], list[int]] | None:
    """Return the counts by cell, or None if there are no two cells of enough training samples.

    Samples that lack the value are the last cell.
    """
    lacking = [int(np.isnan(rows[:, 0]).sum()) for rows in (old, now)]
    old, now = (rows[~np.isnan(rows[:, 0])] for rows in (old, now))
    if not len(old):
        return None
    if old.shape[1] > 1:
        old, now = _levels(old), _levels(now)
        edges = np.arange(1, old.max() + 1) - 0.5
    elif len(values := np.unique(old)) == 2:
        edges = values.mean(keepdims=True)
    else:
        # New samples are divided too, so few of them get few cells
        cells = int(np.clip(min(len(old), len(now)) // (2 * floor), 2, _CELLS))
        edges = np.unique(np.quantile(old, np.arange(1, cells) / cells))
    counts = [
        np.bincount(np.searchsorted(edges, rows.ravel(), "right"), minlength=len(edges) + 1)
        for rows in (old, now)
    ]
    more = [[count] * any(lacking) for count in lacking]
    return _merge_cells(counts[0].tolist() + more[0], counts[1].tolist() + more[1], floor)


def _levels(rows: Array) -> Array:
    """Return each row's level of (n, levels but the first) that are 0 or 1: 0 if none is 1."""
    lifted: Array = np.where(rows.max(axis=1) > 0, rows.argmax(axis=1) + 1, 0).astype(float)
    return lifted


def _merge_cells(old: list[int], now: list[int], floor: int) -> tuple[list[int], list[int]] | None:
    """Merge each cell with fewer than ``floor`` training samples with the cell before it.

    Returns:
        The training and the new counts by cell; None if fewer than two cells remain.
    """
    kept: list[list[int]] = []
    for pair in zip(old, now, strict=True):
        if kept and (pair[0] < floor or kept[-1][0] < floor):
            kept[-1] = [a + b for a, b in zip(kept[-1], pair, strict=True)]
        else:
            kept.append(list(pair))
    if len(kept) < 2 or kept[-1][0] < floor:
        return None
    return [a for a, _ in kept], [b for _, b in kept]


def coverage_check(sets: Tensor, labels: Tensor, coverage: float) -> CaseCheck:
    """Check that prediction sets contain the true class as often as promised.

    ``sets`` are bool (n, classes), ``labels`` the true classes (n,).
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
    """Check that the model's accuracy agrees with its probabilities (n, classes)."""
    confidence, predicted = probabilities.max(dim=1)
    right, n, said = int((predicted == labels).sum()), len(labels), confidence.mean().item()
    around = wilson(right, n)
    return CaseCheck(
        "calibration: mean confidence and accuracy",
        f"{said:.3f} and {with_interval(Estimate(right / n, around))}",
        "alarm if the mean confidence is outside the 95 % interval",
        not around.low <= said <= around.high,
    )


def accuracy_check(predicted: Tensor, labels: Tensor, before: float) -> CaseCheck:
    """Check that the model's accuracy is not below ``before``, its accuracy in the run's test."""
    right, n = int(torch.eq(predicted, labels).sum()), len(labels)
    around = wilson(right, n)
    return CaseCheck(
        f"accuracy, {before:.3f} on the run's test samples",
        with_interval(Estimate(right / n, around)),
        "alarm if all of the 95 % interval is below the run's accuracy",
        around.high < before,
    )
