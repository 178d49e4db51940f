"""Counts of right answers by class and by certainty.

Sensitivity, specificity, reliability diagrams and their intervals are made of them. Counts over few
samples reveal single patients, so those of fewer than a minimum are left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedsilo.models.contract.metric_names import BINS, CLASS, CONFIDENCE, UNCERTAINTY, read_bins
from fedsilo.models.maths.mc_dropout import predictive_entropy
from fedsilo.models.measures.classification_metrics import bin_counts, roc_auc
from fedsilo.models.measures.intervals import Estimate, of_share


def outcome_counts(probabilities: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
    """Return the counts that at least ``minimum`` samples are behind.

    For each class c ``class.<c>.right`` is the number of its samples that are classified as c,
    ``class.<c>.false`` that of the other classes' samples, and ``class.<c>.auc`` the area under the
    ROC curve of c against the rest. ``confidence.<bin>.<part>`` and ``uncertainty.<bin>.<part>``
    (see ``bin_counts``) are by tenths of the largest probability, and of the entropy over ln K.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.
        minimum: samples behind a number; for the bins all n count.
    """
    if len(labels) < minimum:
        return {}
    confidence, predicted = probabilities.max(dim=1)
    counts = _by_class(probabilities, predicted, labels, minimum)
    uncertainty = predictive_entropy(probabilities) / math.log(probabilities.shape[1])
    for name, values in ((CONFIDENCE, confidence), (UNCERTAINTY, uncertainty)):
        for key, value in bin_counts(values, predicted == labels, BINS).items():
            counts[f"{name}.{key}"] = value
    return counts


def _by_class(
    probabilities: Tensor, predicted: Tensor, labels: Tensor, minimum: int
) -> dict[str, float]:
    counts = {}
    for label in range(probabilities.shape[1]):
        of_class = labels == label
        size = int(of_class.sum())
        enough, others_enough = size >= minimum, len(labels) - size >= minimum
        if enough:
            counts[f"{CLASS}.{label}.right"] = float((predicted[of_class] == label).sum())
        if others_enough:
            counts[f"{CLASS}.{label}.false"] = float((predicted[~of_class] == label).sum())
        if enough and others_enough:
            scores = probabilities[:, label]
            counts[f"{CLASS}.{label}.auc"] = roc_auc(scores, of_class).item()
    return counts


@dataclass(frozen=True)
class Bin:
    """Test samples of about the same certainty: how many, how many right, their mean."""

    count: int
    right: int
    mean: float

    def share(self) -> Estimate:
        """Return the share that is right."""
        return of_share(self.right, self.count)

    def with_(self, other: "Bin") -> "Bin":
        """Return the samples of both."""
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        return Bin(count, self.right + other.right, mean)


def bins(figures: Iterable[Mapping[str, float]], family: str) -> list[Bin]:
    """Return the bins of a family over all sites together, of the lowest tenth first."""
    total: dict[int, tuple[int, int, float]] = {}
    for by_name in figures:
        for number, found in read_bins(by_name, family).items():
            if found.count:
                n, k, weighted = total.get(number, (0, 0, 0.0))
                weighted += found.count * found.mean
                total[number] = (n + int(found.count), k + int(found.right), weighted)
    return [Bin(n, min(k, n), w / n) for _, (n, k, w) in sorted(total.items())]


def merge_bins(found: Sequence[Bin], floor: int) -> list[Bin]:
    """Return bins of at least ``floor`` samples: smaller ones are merged with the next."""
    kept: list[Bin] = []
    waiting = Bin(0, 0, 0.0)
    for one in found:
        waiting = waiting.with_(one)
        if waiting.count >= floor:
            kept.append(waiting)
            waiting = Bin(0, 0, 0.0)
    if waiting.count and kept:
        kept.append(kept.pop().with_(waiting))
    return kept
