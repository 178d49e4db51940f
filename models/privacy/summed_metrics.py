"""Measurements as parts of a secure sum: of a known range, weighted by the samples behind them.

A site masks (v - low) / (high - low) of each, from 0 to 1, times the samples of the split over B
('secure-samples' of the site files), and next to it those samples. The ratio of both sums is the
mean over the samples of all sites that have a value. A site without one, or with one that is not
finite, adds 0 to both, so the mean is right without it and nobody sees which site that was.
"""

import math
from collections.abc import Sequence

from fedsilo.models.contract.messages import INCOMING, TRAINED, measurement

LARGEST_LOSS = 10.0  # nats; a site's mean loss beyond is counted as this
_STEPS = "steps"  # of an optimiser, FedNova's
_MOST_STEPS = 2.0**16
MEASURED = ("accuracy", "entropy", "loss")
TRAIN_LOSS = measurement(TRAINED, "train", "loss")


def summed_metrics(trains: bool, measures: bool, splits: Sequence[str]) -> list[str]:
    """Return which measurements sites add up: of the splits that all of them measure.

    Args:
        trains: whether sites train in the phase.
        measures: whether they measure the model that comes.
        splits: which all sites measure.
    """
    names = [TRAIN_LOSS] if trains and "train" in splits else []
    return names + [
        measurement(INCOMING, split, metric)
        for split in ("val", "test")
        if measures and split in splits
        for metric in MEASURED
    ]


def split_of(name: str) -> str:
    """Return the split that a metric is of; empty where it is of none, such as steps."""
    return name.partition(".")[2].partition(".")[0]


def bounds(name: str, classes: int) -> tuple[float, float] | None:
    """Return the least and the largest value of a metric that can be summed; None for others."""
    metric = name.rpartition(".")[2]
    if name not in (_STEPS, TRAIN_LOSS) and name not in summed_metrics(True, True, ("val", "test")):
        return None
    return {
        "accuracy": (0.0, 1.0),
        "entropy": (0.0, math.log(classes)),
        "loss": (-LARGEST_LOSS, LARGEST_LOSS),
        _STEPS: (0.0, _MOST_STEPS),
    }[metric]


def portion(value: float | None, low: float, high: float) -> float | None:
    """Place ``value`` between ``low`` and ``high``: from 0 to 1, beyond is cut.

    None where there is no value, or one that is not finite.
    """
    if value is None or not math.isfinite(value):
        return None
    return min(max((value - low) / (high - low), 0.0), 1.0)
