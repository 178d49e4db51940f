"""How many samples a classifier gets right, by class and by what it says of its certainty.

What sensitivity, specificity, a reliability diagram and their intervals are made of. Of few samples
such counts tell of each of them, so those of fewer than a minimum are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from fedsilo.models.maths.classification_metrics import bin_counts, roc_auc
from fedsilo.models.maths.mc_dropout import predictive_entropy

CLASS, CONFIDENCE, UNCERTAINTY = "class", "confidence", "uncertainty"
BINS = 10


def outcome_counts(probabilities: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
    """Return counts by class and by bin, of at least ``minimum`` samples.

    ``class.<c>.right`` are the samples of a class that are taken for it, ``class.<c>.false`` those
    of others that are, ``class.<c>.auc`` is its area under the ROC curve against all others. Which
    of them are there depends on how many samples the class has, and the others.
    ``confidence.<bin>.<part>`` and ``uncertainty.<bin>.<part>`` (see ``bin_counts``) are by tenths
    of the largest probability, and of the entropy as a share of the largest there is, ln classes.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.
        minimum: samples behind a number; all n for the bins.
    """
    if len(labels) < minimum:
        return {}
    confidence, predicted = probabilities.max(dim=1)
    doubt = predictive_entropy(probabilities) / math.log(probabilities.shape[1])
    figures = dict(_by_class(probabilities, predicted, labels, minimum))
    for name, values in ((CONFIDENCE, confidence), (UNCERTAINTY, doubt)):
        for key, value in bin_counts(values, predicted == labels, BINS).items():
            figures[f"{name}.{key}"] = value
    return figures


def _by_class(
    probabilities: Tensor, predicted: Tensor, labels: Tensor, minimum: int
) -> Iterator[tuple[str, float]]:
    for label in range(probabilities.shape[1]):
        of_class = labels == label
        has = int(of_class.sum())
        enough, others_enough = has >= minimum, len(labels) - has >= minimum
        if enough:
            yield f"{CLASS}.{label}.right", float((predicted[of_class] == label).sum())
        if others_enough:
            yield f"{CLASS}.{label}.false", float((predicted[~of_class] == label).sum())
        if enough and others_enough:
            scores = probabilities[:, label]
            yield f"{CLASS}.{label}.auc", roc_auc(scores, of_class).item()
