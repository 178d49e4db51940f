"""Measurements as parts of a secure sum: of a known range, weighted by the samples behind them.

A site masks (v - low) / (high - low) of each, from 0 to 1, times the samples of the split over
'secure-samples'; of the sums of these and of the samples the mean over all sites' samples is left.
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


def counted(splits: Sequence[str]) -> list[str]:
    """Return the splits whose samples are summed, in the order of their sums."""
    return ["train", *(split for split in splits if split != "train")]


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


def portion(value: float, low: float, high: float) -> float:
    """Return where ``value`` is between ``low`` and ``high``: from 0 to 1, beyond is cut."""
    return min(max((value - low) / (high - low), 0.0), 1.0)
