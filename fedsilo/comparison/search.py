"""The points that 'fedsilo tune' tries: Optuna's samplers over an experiment's grid.

``grid`` draws points of the grid, each at most once. ``tpe`` (Bergstra et al. 2011) searches the
range between the smallest and the largest number of a setting, and proposes points by the scores of
earlier ones; for a setting that is not a number, it chooses among the values. A sampler's seed is
fixed and no study is stored, so a repeated search asks for the same points, whose runs already
exist.
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
    """A search of ``grid`` by the sampler ``grid`` or ``tpe``, which draws ``points`` points.

    Raises:
        SettingError: Optuna is not installed.
    """

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
        """Draw the points to try, and yield them in batches whose points can be tried side by side.

        A point has one value for each setting. The batches end after ``points`` points in all.

        The sampler ``grid`` draws all points in one batch, at random from the grid. The sampler
        ``tpe`` draws at most four points per batch, and needs their scores (see ``tell``) before
        the next batch. It rounds fractions from a range to three significant digits.
        """
        from optuna.distributions import FloatDistribution

        while self._left:
            count = self._left
            if self._learns:
                count = min(count, _AT_ONCE)
            # Counted before the trials run, so that failed points use up the budget, too
            self._left -= count
            self._asked = []
            batch = []
            for _ in range(count):
                trial = self._study.ask(self._spaces)
                self._asked.append(trial)
                point: Point = {}
                for key, space in self._spaces.items():
                    value = trial.params[key]
                    if isinstance(space, FloatDistribution):
                        value = _round_digits(value)
                    point[key] = value
                batch.append(point)
            yield batch

    def tell(self, scores: Sequence[float]) -> None:
        """Give the scores of the last batch to the sampler, in the order of its points.

        A higher score is better. The sampler ``grid`` ignores them.
        """
        # The grid sampler learns nothing, and would raise an exception at its last point
        if not self._learns:
            return
        for trial, score in zip(self._asked, scores, strict=True):
            self._study.tell(trial, score)


def refuse_small(grid: Grid, sampler: str, points: int, experiment: str) -> None:
    """Check that an experiment's grid has at least as many points as the search will try.

    A point is one choice of a value for each setting. The sampler ``tpe`` searches the whole range
    of a setting's numbers, so it needs only one setting with at least two different values, all
    numbers. Such a grid is never too small.

    Args:
        grid: setting -> the values to try.
        sampler: ``grid`` or ``tpe``.
        points: the number of points to try.
        experiment: the name of the experiment, for the error.

    Raises:
        SettingError: the grid is empty, or has fewer than ``points`` points.
    """
    if sampler == "tpe" and any(map(_range, grid.values())):
        return  # a range has any number of points
    size = 0
    if grid:
        size = math.prod(map(len, grid.values()))
    if size < points:
        raise SettingError(
            f"experiment '{experiment}' declares a grid of {size} points, but every experiment is "
            f"tried at {points} (--trials, or 'trials' under 'tuning'): add points to its 'grid'"
        )


def at_an_edge(
    grid: Grid, best: Mapping[str, Value], sampler: str, rules: Mapping[str, SettingRule]
) -> Iterator[str]:
    """Yield a warning for each numeric setting whose best value is at an end of the values tried.

    The ends are the setting's smallest and largest value in the grid. With the sampler ``tpe``, a
    value within 5 % of the range from an end also counts. The distance is measured on the scale
    that the sampler searched, which may be logarithmic.

    There is no warning if an end is also the limit that the setting's rule sets, if all values are
    equal, or if a value is not a number.

    Args:
        grid: key -> the values in the grid.
        best: key -> the best value.
        sampler: ``grid`` or ``tpe``.
        rules: key -> the setting's rule, with its smallest and largest allowed value.
    """
    margin = 0.0  # only the first and the last number of a grid are at an end
    if sampler == "tpe":
        margin = _EDGE
    for key, values in grid.items():
        ends = _range(values)
        if not ends:
            continue
        low, high = ends
        value = best[key]
        # 0 at the lower end and 1 at the upper, on the scale that the sampler searched
        at = _place(float(str(value)), low, high)
        end = ""
        if at >= 1 - margin and high < rules[key].maximum:
            end = "upper"
        if at <= margin and low > rules[key].minimum:
            end = "lower"
        if end:
            yield (
                f"the best '{key}', {value}, is at the {end} end of {low:g} to {high:g}, so others "
                "may be better: widen the grid and tune again"
            )


def without_effect(digests: Sequence[str], points: Sequence[Mapping[str, Value]]) -> Iterator[str]:
    """Yield a warning for each point whose metrics equal those of an earlier point to the last bit.

    A point is one choice of a value for each setting. The warning names the settings that differ
    between this point and the first one with the same metrics, and says that they had no effect. If
    no setting differs, there is no warning.

    Args:
        digests: a digest over all metrics of each point. Empty for a point that failed.
        points: the settings of each point, in the same order.
    """
    first: dict[str, Mapping[str, Value]] = {}
    for digest, point in zip(digests, points, strict=True):
        # The first point with this digest, which may be the point itself
        same = first.setdefault(digest, point)
        pairs = []
        for key in point:
            if point[key] != same[key]:
                pairs.append(f"{key} {same[key]} and {point[key]}")
        if digest and pairs:  # the digest of a failed point is empty
            yield (
                "these settings had no effect, the metrics are equal to the last bit: "
                + ", ".join(pairs)
            )


def _space(values: Sequence[Value], sampler: str) -> BaseDistribution:
    """Build Optuna's search space for one setting from the values that the grid has for it.

    With the sampler ``tpe``, numbers that are not all equal become the range from the smallest to
    the largest number. The range has only integers if all values are integers. Its scale is
    logarithmic if the smallest value is above 0 and the largest at least 10 times as large.

    Otherwise, the space is a choice among the values. True and False are not numbers here.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    ends = _range(values)
    # The grid tries the declared values themselves, never a number between them
    if sampler != "tpe" or not ends:
        return CategoricalDistribution(values)
    low, high = ends
    if all(isinstance(value, int) for value in values):
        return IntDistribution(int(low), int(high), log=_by_logarithm(low, high))
    return FloatDistribution(low, high, log=_by_logarithm(low, high))


def _range(values: Sequence[Value]) -> tuple[float, float] | None:
    """Return the smallest and the largest value; None if they are equal or not all are numbers.

    True and False are not numbers here.
    """
    numbers: list[float] = []
    for value in values:
        # Python counts True as a number, but a switch spans no range
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        numbers.append(float(value))
    low, high = min(numbers), max(numbers)
    if low == high:
        return None
    return low, high


def _by_logarithm(low: float, high: float) -> bool:
    """Tell whether a range is searched on a log scale.

    This is so if ``low`` is above 0 and ``high`` is at least 10 times ``low``.
    """
    return low > 0 and high / low >= _DECADE


def _place(value: float, low: float, high: float) -> float:
    """Return the position of a number in a range, from 0 at the lower end to 1 at the upper end.

    The scale is logarithmic if ``low`` is above 0 and ``high`` is at least 10 times as large.
    Otherwise the scale is linear.
    """
    if _by_logarithm(low, high):
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _round_digits(value: float) -> float:
    """Round a number to three significant digits, so that a person can copy it by hand."""
    return float(f"{value:.{_DIGITS}g}")
