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
    """List the metrics that are added up over sites in a secret sum, such as ``incoming.val.loss``.

    If ``trains``, the training loss comes first. The metrics ``measured`` follow for validation and
    test data. Each needs its split in ``splits``, the splits that every site has. The list may be
    empty.
    """
    names = []
    if trains and "train" in splits:
        names.append(TRAIN_LOSS)
    # A sum over fewer sites would show which sites lack the split
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

    A metric that is not summed gives None. ``limits`` holds the bounds of the training loss and of
    metrics such as ``incoming.val.loss``, by the last part of the name. The optimiser steps of a
    round, ``steps``, have the bounds 0 and 65,536. ``inverse-steps`` has 0 and 1.
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
