"""Metrics of a classifier's probabilities: calibration error, balanced accuracy, AUC and others.

A metric that is undefined for the given labels is left out, such as AUC if only one class occurs.
The values equal those of torchmetrics, as a test checks; torchmetrics takes seconds to import, so
it is not used.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CALIBRATION_BINS = 15


def bin_counts(values: Tensor, right: Tensor, bins: int) -> dict[str, float]:
    """Count samples and right predictions in equal ranges, or bins, of certainty from 0 to 1.

    Args:
        values: the certainty of each sample, (n,). A value on an edge falls in the upper bin. The
            value 1 falls in the last bin.
        right: whether each prediction is right, (n,) bool.
        bins: the number of bins.

    Returns:
        Three numbers for each bin, numbered from 0 for the least certainty: ``<bin>.count``
        samples, ``<bin>.right`` right predictions and the mean certainty ``<bin>.mean``. The mean
        of an empty bin is 0.
    """
    # A value of exactly 1 would be in a bin of its own; the clamp puts it into the last one
    places = (values * bins).long().clamp(0, bins - 1)
    counts = {}
    for place in range(bins):
        inside = places == place
        count = int(inside.sum())
        counts[f"{place}.count"] = float(count)
        counts[f"{place}.right"] = float(right[inside].sum())
        counts[f"{place}.mean"] = 0.0
        if count:
            counts[f"{place}.mean"] = values[inside].double().mean().item()
    return counts


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int) -> float:
    """Compute the expected calibration error of class probabilities, 0 to 1.

    The confidence of a sample is its largest probability. Samples are put into bins of confidence.
    The gap of a bin is the absolute difference between accuracy and mean confidence. The error is
    the mean gap, weighted by the number of samples in each bin.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: the true classes, (n,) int64.
        bins: the number of bins of equal width. Confidences of exactly 1 have one more bin.
    """
    confidence, predicted = probabilities.max(dim=1)
    confidence, right = confidence.float(), (predicted == labels).float()
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    places = torch.bucketize(confidence, edges, right=True) - 1
    # Per bin the number of samples, and the sums of their confidences and of the right answers
    empty = torch.zeros_like(edges)
    count = empty.scatter_add(0, places, torch.ones_like(confidence))
    confidences = empty.scatter_add(0, places, confidence)
    hits = empty.scatter_add(0, places, right)
    # An empty bin is 0 / 0, which counts as no gap
    gaps = (torch.nan_to_num(hits / count) - torch.nan_to_num(confidences / count)).abs()
    return (gaps * (count / count.sum())).sum().item()


def roc_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Compute the area under the ROC curve by the trapezoidal rule, a scalar from 0 to 1.

    Samples with equal scores share one threshold. As a consequence, a positive and a negative
    sample with equal scores count as a pair that is half right.

    Args:
        scores: (n,), larger for samples that are more likely positive.
        positive: whether each sample is positive, (n,) bool. Both values must occur.
    """
    # The 0 in front is the point of a threshold above all scores, where the curve begins
    false, true = _count_positives(scores, positive)
    return torch.trapezoid(pad(true, [1, 0]) / true[-1], pad(false, [1, 0]) / false[-1])


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Compute the area under the precision-recall curve as a sum of steps, as scikit-learn does.

    The result is from 0 to 1.

    Args:
        scores: (n,), larger for samples that are more likely positive. Equal scores form one step.
        positive: whether each sample is positive, (n,) bool. True must occur.
    """
    false, true = _count_positives(scores, positive)
    # Flipped, so that recall falls from 1. The 0 at its end is a threshold above all scores, so
    # each precision has the width of its own step of recall
    precision = (true / (true + false)).flip(0)
    recall = pad((true / true[-1]).flip(0), [0, 1])
    return ((recall[:-1] - recall[1:]) * precision).sum().item()


def _count_positives(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Count false and true positives with each distinct score as threshold, highest first.

    Returns:
        False positives (k,) and true positives (k,), for k distinct scores.
    """
    order = scores.argsort(descending=True)
    ranked, hits = scores[order], positive[order].long()
    # Samples of equal score cannot be separated, so only the last of them ends a step. Steps
    # between them would make the area depend on the order of the samples
    ends = pad(torch.where(ranked[1:] != ranked[:-1])[0], [0, 1], value=len(scores) - 1)
    true = hits.cumsum(dim=0)[ends]
    # ``ends`` counts from 0: at place i there are i + 1 samples above the threshold
    return 1 + ends - true, true


def classification_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute classification metrics by name, without those that the labels do not define.

    - ``calibration-error``: the expected calibration error over 15 bins of the largest probability
      (Guo et al. 2017). It is always defined.
    - ``balanced-accuracy``: the mean recall over the classes that occur, at least two.
    - ``auc``: with two classes the AUC of the second one, and otherwise the mean AUC of each class
      against the rest. All classes must occur.
    - ``average-precision``: the area under the precision-recall curve of the second of two classes.
      Both must occur.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: the true classes, (n,) int64.
    """
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(dim=1)
    occurring = torch.unique(labels).tolist()
    recalls = [(predicted[labels == one] == one).double().mean().item() for one in occurring]
    # This metric is defined for any labels, each of the others only for some
    metrics = {"calibration-error": calibration_error(probabilities, labels, CALIBRATION_BINS)}
    if len(occurring) > 1:
        metrics["balanced-accuracy"] = sum(recalls) / len(recalls)
    if len(occurring) == classes:
        areas = [roc_auc(probabilities[:, one], labels == one) for one in range(classes)]
        metrics["auc"] = torch.stack(areas).mean().item()
    if len(occurring) == classes == 2:
        metrics["average-precision"] = average_precision(probabilities[:, 1], labels == 1)
    return metrics
