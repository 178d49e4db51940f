"""A site's Kaplan-Meier curve in the form in which it may leave: no step of few patients.

The curve is known at a grid of round times only. A point is published if, since the point before,
enough patients had the event, and if enough patients are still followed. So no step tells the time
of one patient's event, and the number of events in each step is at least the floor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsilo.core.metric_names import SURVIVAL_CURVE, SURVIVAL_PARTS, SURVIVAL_POINTS
from fedsilo.models.measures.survival_metrics import Floats, kaplan_meier

_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class CurvePoint:
    """One published point of a Kaplan-Meier curve.

    Attributes:
        time: a time of the grid.
        share: the share of patients without the event until then.
        low, high: its 95 % interval (Greenwood's variance on the scale log(-log S)).
        followed: the number of patients who are still followed then.
    """

    time: float
    share: float
    low: float
    high: float
    followed: int


def published_curve(times: Floats, events: Floats, minimum: int) -> dict[str, float]:
    """Select the points of a site's Kaplan-Meier curve that may leave the site.

    The candidates are round times up to the longest follow-up (``round_times``). A time becomes a
    point if at least ``minimum`` patients had the event since the last point. As many patients must
    be followed beyond the time. The events of a skipped time count for the next point.

    Args:
        times: the time to the event or to censoring, (n,).
        events: 1 for an event, 0 if censored, (n,).
        minimum: the smallest number of patients in both rules. With 0, each point still needs one
            event.

    Returns:
        ``survival.<number>.<part>`` for each point, numbered from 0 in rising order. The parts are
        ``time``, ``share`` (without the event), ``low`` and ``high`` (its 95 % interval), and
        ``followed`` (patients beyond the time). Empty if no time becomes a point.
    """
    curve = kaplan_meier(times, events)
    if not len(curve.times):
        return {}
    low, high = curve.band()
    values: dict[str, float] = {}
    number, before = 0, 0
    for time in round_times(float(times.max()), SURVIVAL_POINTS):
        happened = int(((times <= time) & (events == 1)).sum())
        followed = int((times > time).sum())
        # A skipped time leaves ``before`` as it is, so its events count for the next point. Without
        # that, the difference of two points could show the events of a few patients
        if happened - before < max(minimum, 1) or followed < minimum:
            continue
        place = int(np.searchsorted(curve.times, time, side="right")) - 1
        found = (time, curve.survival[place], low[place], high[place], followed)
        for part, value in zip(SURVIVAL_PARTS, found, strict=True):
            values[f"{SURVIVAL_CURVE}.{number}.{part}"] = float(value)
        number, before = number + 1, happened
    return values


def read_curve(values: Mapping[str, float]) -> list[CurvePoint]:
    """Read the points of a survival curve from the metrics of ``published_curve``, in rising order.

    Reading stops at the first point that lacks one of its metrics. Without points the list is
    empty.
    """
    points: list[CurvePoint] = []
    while f"{SURVIVAL_CURVE}.{len(points)}.time" in values:
        parts = [values.get(f"{SURVIVAL_CURVE}.{len(points)}.{part}") for part in SURVIVAL_PARTS]
        time, share, low, high, followed = parts
        if time is None or share is None or low is None or high is None or followed is None:
            break
        points.append(CurvePoint(time, share, low, high, int(followed)))
    return points


def round_times(longest: float, most: int) -> Floats:
    """Return the round times from 0 to ``longest``, without 0, for the points of a curve.

    The times are the multiples of a step: 1, 2 or 5 times a power of ten. The step is the smallest
    for which no more than ``most`` times are needed to reach ``longest``. If ``longest`` is 0, the
    result is empty.
    """
    if longest <= 0:
        return np.zeros(0)
    power = 10.0 ** math.floor(math.log10(longest / most))
    step = next(size * power for size in _STEPS if size * power * most >= longest)
    times: Floats = step * np.arange(1.0, most + 1)
    return times[times <= longest]
