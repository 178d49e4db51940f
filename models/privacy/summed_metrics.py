"""Measurements in a secure sum: scaled to a known range, weighted by samples.

For each measurement v a site masks two numbers: w (v - low) / (high - low), and w itself. The
weight w is the number of samples in the split divided by B ('secure-samples' of the site files).
The first sum divided by the second is the mean over the samples of all sites that have a value. A
site without a finite value adds 0 to both sums, so the mean is right and nobody learns which site
it was.
"""

import math
from collections.abc import Mapping, Sequence

from fedsilo.core.messages import INCOMING, TRAINED, measurement

LARGEST_LOSS = 10.0  # nats; a larger mean loss of a site counts as 10
_STEPS = "steps"  # optimiser steps of a round, which FedNova averages
_MOST_STEPS = 2.0**16  # more steps count as 2^16
_INVERSE_STEPS = "inverse-steps"  # 1 / (optimiser steps of a round), which SCAFFOLD averages
TRAIN_LOSS = measurement(TRAINED, "train", "loss")


def summed_metrics(trains: bool, measured: Sequence[str], splits: Sequence[str]) -> list[str]:
    """List the metrics that are added up over sites in a secret sum, for a part of a run.

    Sites measure ``measured`` on validation and test data, with the model that they have received.

    Args:
        trains: whether sites train in this part of the run. The training loss is then listed if
            every site has the split ``train``.
        measured: the metrics that sites measure (``Task.always``). Empty if they measure nothing.
        splits: the splits that every site has. A sum over fewer sites would show which sites lack
            the split.

    Returns:
        Names such as ``incoming.val.loss``, the training loss first. May be empty.
    """
    names = []
    if trains and "train" in splits:
        names.append(TRAIN_LOSS)
    for split in ("val", "test"):
        if split in splits:
            names += [measurement(INCOMING, split, metric) for metric in measured]
    return names


def split_of(name: str) -> str:
    """Return the split in a metric's name, such as 'val' for 'incoming.val.loss'.

    For a name without a split, such as 'steps', the result is ''.
    """
    return name.partition(".")[2].partition(".")[0]


def bounds(name: str, limits: Mapping[str, tuple[float, float]]) -> tuple[float, float] | None:
    """Return the bounds to which a metric is clipped before a secure sum.

    - ``steps``, the optimiser steps of a round: 0 to 65,536.
    - ``inverse-steps``, 1 divided by the steps: 0 to 1.
    - The training loss, ``trained.train.loss``: the bounds of ``loss`` in ``limits``.
    - ``incoming.val.<metric>`` and ``incoming.test.<metric>``, for a metric in ``limits``: its
      bounds there.

    Any other metric is not summed, and the result is None.

    Args:
        name: the metric's whole name.
        limits: the least and the largest value of each metric by the last part of its name, such as
            ``loss``, which it must include.
    """
    metric = name.rpartition(".")[2]
    known = (_STEPS, _INVERSE_STEPS, TRAIN_LOSS)
    if name not in known and name not in summed_metrics(True, [*limits], ("val", "test")):
        return None
    return {**limits, _STEPS: (0.0, _MOST_STEPS), _INVERSE_STEPS: (0.0, 1.0)}[metric]


def to_unit_range(value: float | None, low: float, high: float) -> float | None:
    """Map ``value`` linearly from the range ``low``..``high`` to 0..1. Outside, it becomes 0 or 1.

    ``high`` must be above ``low``. The result is None if the value is None or not finite.
    """
    if value is None or not math.isfinite(value):
        return None
    return min(max((value - low) / (high - low), 0.0), 1.0)
