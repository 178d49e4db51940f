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
    """Count right and wrong predictions by class and by certainty.

    - ``class.<c>.right``: the number of samples of class c that are classified as c.
    - ``class.<c>.false``: the number of samples of other classes that are wrongly classified as c.
    - ``class.<c>.auc``: the AUC of c against the rest.
    - ``confidence.<bin>.<part>``: ten equal bins of the largest probability. Each bin has three
      parts: ``count`` is the number of samples, ``right`` the number of right predictions, and
      ``mean`` the mean of the value that decides the bin.
    - ``uncertainty.<bin>.<part>``: the same parts in ten bins of the entropy, scaled to 0..1.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: the true classes, (n,) int64.
        minimum: the smallest number of samples. With fewer in total, the result is empty. ``right``
            needs as many of class c, ``false`` as many of other classes, and ``auc`` both. Bins
            have no minimum.
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
    """Count right and wrong predictions of each class c, and compute its AUC.

    - ``class.<c>.right``: samples of c that are classified as c.
    - ``class.<c>.false``: other samples that are classified as c.
    - ``class.<c>.auc``: the AUC of c against the rest.

    ``right`` needs ``minimum`` samples of c, ``false`` as many other samples, and ``auc`` both.
    """
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
    """A bin of test samples with similar certainty.

    Attributes:
        count: the number of samples.
        right: how many of them are classified correctly.
        mean: their mean certainty, 0 to 1.
    """

    count: int
    right: int
    mean: float

    def share(self) -> Estimate:
        """Return the share of right answers with its 95 % interval; the bin must not be empty."""
        return of_share(self.right, self.count)

    def with_(self, other: "Bin") -> "Bin":
        """Return this bin merged with another.

        The counts are added, and the mean is weighted by them. At least one of the two bins must
        contain a sample.
        """
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        return Bin(count, self.right + other.right, mean)


def bins(metrics: Iterable[Mapping[str, float]], family: str) -> list[Bin]:
    """Add up each certainty bin over all sites, and return the bins with samples, lowest first.

    Each site reports, for ten ranges of certainty, the number of predictions, the number of right
    ones and the mean certainty. A bin's mean is weighted by the counts. Noise at a site may make
    right predictions outnumber all predictions. The sum of right predictions is then lowered to
    that of all predictions.

    Args:
        metrics: metric -> value, for each site. The names are ``<family>.<bin>.count``, ``.right``
            and ``.mean``.
        family: the kind of certainty, one of ``BIN_FAMILIES``, such as ``confidence``.
    """
    total: dict[int, tuple[int, int, float]] = {}
    for by_name in metrics:
        for number, found in read_bins(by_name, family).items():
            if found.count:
                n, k, weighted = total.get(number, (0, 0, 0.0))
                weighted += found.count * found.mean
                total[number] = (n + int(found.count), k + int(found.right), weighted)
    # A hospital may add noise to its counts, but a share above 1 does not have an interval
    return [Bin(n, min(k, n), w / n) for _, (n, k, w) in sorted(total.items())]


def merge_bins(ordered: Sequence[Bin], floor: int) -> list[Bin]:
    """Merge neighbouring bins until each has at least ``floor`` samples.

    ``ordered`` are bins from low to high certainty. A bin that is too small is merged with the next
    bins until the sum is large enough. A remainder at the end is merged with the bin before it. The
    result is empty if all bins together have fewer than ``floor`` samples.
    """
    kept: list[Bin] = []
    waiting = Bin(0, 0, 0.0)
    for one in ordered:
        waiting = waiting.with_(one)
        if waiting.count >= floor:
            kept.append(waiting)
            waiting = Bin(0, 0, 0.0)
    if waiting.count and kept:
        kept.append(kept.pop().with_(waiting))
    return kept
