"""Counts of right answers by class and by certainty.

Sensitivity, specificity, reliability diagrams and their intervals are computed from these counts.
Counts over few samples reveal single patients, so counts over fewer than a minimum are left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedsilo.core.metric_names import BINS, CLASS, CONFIDENCE, UNCERTAINTY, read_bins
from fedsilo.models.maths.mc_dropout import predictive_entropy
from fedsilo.models.measures.classification_metrics import bin_counts, roc_auc
from fedsilo.models.measures.intervals import Estimate, of_share


def outcome_counts(probabilities: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
    """Count right answers; counts over fewer than ``minimum`` samples are left out.

    For each class c ``class.<c>.right`` is the number of samples of c that are classified as c,
    ``class.<c>.false`` the number of other samples that are classified as c, and ``class.<c>.auc``
    the AUC of c against the rest. ``confidence.<bin>.<part>`` counts by tenths of the largest
    probability, ``uncertainty.<bin>.<part>`` by tenths of the entropy over ln K (see
    ``bin_counts``).

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.
        minimum: the fewest samples behind a number. For the bins all n samples count together.
    """
    if len(labels) < minimum:
        return {}
    confidence, predicted = probabilities.max(dim=1)
    counts = _by_class(probabilities, predicted, labels, minimum)
    # ln K is the entropy of K equal probabilities, the largest there is: the quotient is in 0..1
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
        # A rate reveals the samples in its denominator: those of the class, or all other samples
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
    """Test samples of similar certainty: their number, how many are right, the mean certainty."""

    count: int
    right: int
    mean: float

    def share(self) -> Estimate:
        """Return the share of right answers with its interval."""
        return of_share(self.right, self.count)

    def with_(self, other: "Bin") -> "Bin":
        """Merge this bin with another."""
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        return Bin(count, self.right + other.right, mean)


def bins(metrics: Iterable[Mapping[str, float]], family: str) -> list[Bin]:
    """Add up a family's bins over all sites, the lowest tenth first; empty bins are left out.

    ``metrics`` has metric -> value for each site.
    """
    total: dict[int, tuple[int, int, float]] = {}
    for by_name in metrics:
        for number, found in read_bins(by_name, family).items():
            if found.count:
                n, k, weighted = total.get(number, (0, 0, 0.0))
                weighted += found.count * found.mean
                total[number] = (n + int(found.count), k + int(found.right), weighted)
    # A hospital may add noise to its counts, and a share of more than 1 has no interval
    return [Bin(n, min(k, n), w / n) for _, (n, k, w) in sorted(total.items())]


def merge_bins(found: Sequence[Bin], floor: int) -> list[Bin]:
    """Merge bins until each has at least ``floor`` samples; empty if all together have fewer.

    A bin that is too small joins the next bin, and the last one joins the bin before.
    """
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
