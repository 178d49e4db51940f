"""The points that 'fedsilo tune' tries: Optuna's samplers over an experiment's grid.

``grid`` draws points of the grid, each at most once. ``tpe`` (Bergstra et al. 2011) searches the
range between the smallest and the largest number of a setting, and proposes points by the scores of
earlier ones; values that are no numbers stay a choice. A sampler's seed is fixed and no study is
stored, so a repeated search asks for the same points, whose runs already exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import SettingError, needs_extra
from fedsilo.core.settings_schema import SettingRule, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Grid = Mapping[str, Sequence[Value]]
Point = dict[str, Value]

_AT_ONCE = 4  # points per batch of tpe; independent of '--jobs', so that results are the same
_DECADE = 10  # a range is searched on a log scale if its ends differ by this factor
_DIGITS = 3  # significant digits of a number that tpe proposes
_EDGE = 0.05  # share of a range; a best value this close to an end counts as at the edge


class Search:
    """A search of a grid by the sampler ``grid`` or ``tpe``, over ``points`` points."""

    def __init__(self, grid: Grid, sampler: str, points: int) -> None:
        with needs_extra("'fedsilo tune'", "tuning"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._learns = sampler == "tpe"
        chosen: optuna.samplers.BaseSampler
        if self._learns:  # the first third is drawn at random, at most ten as is Optuna's default
            chosen = optuna.samplers.TPESampler(n_startup_trials=min(10, -(-points // 3)), seed=0)
        else:
            chosen = optuna.samplers.GridSampler(grid, seed=0)
        self._study = optuna.create_study(sampler=chosen, direction="maximize")
        self._spaces = {key: _space(values, sampler) for key, values in grid.items()}
        self._left = points
        self._asked: list[Any] = []

    def batches(self) -> Iterator[list[Point]]:
        """Yield batches of points to try side by side; call ``tell`` before the next batch."""
        while self._left:
            count = min(self._left, _AT_ONCE) if self._learns else self._left
            self._left -= count
            self._asked = [self._study.ask(self._spaces) for _ in range(count)]
            yield [
                {key: _round_digits(trial.params[key]) for key in self._spaces}
                for trial in self._asked
            ]

    def tell(self, scores: Sequence[float]) -> None:
        """Take the scores of the batch, in its order; a higher score is better."""
        # The grid sampler learns nothing, and would raise an exception at its last point
        for trial, score in zip(self._asked, scores, strict=True) if self._learns else ():
            self._study.tell(trial, score)


def refuse_small(grid: Grid, sampler: str, points: int, experiment: str) -> None:
    """Check that a grid has enough points, because every experiment gets the same budget.

    Raises:
        SettingError: there is no grid, or it has fewer than ``points`` points.
    """
    ranges = sampler == "tpe" and any(_range(values) for values in grid.values())
    size = math.prod(map(len, grid.values())) if grid else 0
    if size < points and not ranges:
        raise SettingError(
            f"experiment '{experiment}' declares a grid of {size} points, but every experiment is "
            f"tried at {points} (--trials, or 'trials' under 'tuning'): add points to its 'grid'"
        )


def at_an_edge(
    grid: Grid, best: Mapping[str, Value], sampler: str, rules: Mapping[str, SettingRule]
) -> Iterator[str]:
    """Yield a warning for each number of the best point that lies at an end of its range.

    An end is ignored if ``rules`` allow no number beyond it.
    """
    margin = _EDGE if sampler == "tpe" else 0.0  # in a grid, only the first and last are at an end
    for key, values in grid.items():
        if not (ends := _range(values)):
            continue
        (low, high), value = ends, best[key]
        at = _place(float(str(value)), low, high)
        lower = at <= margin and low > rules[key].minimum
        if lower or (at >= 1 - margin and high < rules[key].maximum):
            yield (
                f"the best '{key}', {value}, is at the {'lower' if lower else 'upper'} end of "
                f"{low:g} to {high:g}, so others may be better: widen the grid and tune again"
            )


def without_effect(digests: Sequence[str], points: Sequence[Mapping[str, Value]]) -> Iterator[str]:
    """Yield a warning for each point whose metrics equal those of an earlier point in all bits."""
    first: dict[str, Mapping[str, Value]] = {}
    for digest, point in zip(digests, points, strict=True):
        same = first.setdefault(digest, point)
        if digest and (changed := [k for k in point if point[k] != same[k]]):
            pairs = ", ".join(f"{key} {same[key]} and {point[key]}" for key in changed)
            yield f"these settings had no effect, the metrics are equal to the last bit: {pairs}"


def _space(values: Sequence[Value], sampler: str) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if sampler != "tpe" or not (ends := _range(values)):
        return CategoricalDistribution(values)
    low, high = ends
    if all(isinstance(value, int) for value in values):
        return IntDistribution(int(low), int(high), log=_by_logarithm(low, high))
    return FloatDistribution(low, high, log=_by_logarithm(low, high))


def _range(values: Sequence[Value]) -> tuple[float, float] | None:
    """Return the smallest and the largest value; None if they are equal or not all are numbers."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or min(numbers) == max(numbers):
        return None
    return float(min(numbers)), float(max(numbers))


def _by_logarithm(low: float, high: float) -> bool:
    return low > 0 and high / low >= _DECADE


def _place(value: float, low: float, high: float) -> float:
    """Return the relative place of a number in a range: 0 at the lower end, 1 at the upper."""
    if _by_logarithm(low, high):
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _round_digits(value: Any) -> Value:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
