"""Metrics of a classifier's probabilities: calibration error, balanced accuracy, AUC and the like.

A metric that the labels leave undefined is left out: there is no AUC of one class. The numbers are
those of torchmetrics, which a test compares; its import costs seconds, so nothing here uses it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CALIBRATION_BINS = 15


def bin_counts(values: Tensor, right: Tensor, bins: int) -> dict[str, float]:
    """Return, per bin of 0..1, ``<bin>.count``, ``<bin>.right`` and ``<bin>.mean`` of values.

    Args:
        values: (n,), 0 to 1; the last bin holds 1.
        right: (n,) bool, whether the prediction is right.
        bins: how many, of equal width.
    """
    places = (values * bins).long().clamp(0, bins - 1)
    figures = {}
    for place in range(bins):
        inside = places == place
        count = int(inside.sum())
        figures[f"{place}.count"] = float(count)
        figures[f"{place}.right"] = float(right[inside].sum())
        figures[f"{place}.mean"] = values[inside].double().mean().item() if count else 0.0
    return figures


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int) -> float:
    """Return the expected calibration error over bins of the largest probability.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.
        bins: how many, of equal width; a probability of 1 has one more of its own.
    """
    confidence, predicted = probabilities.max(dim=1)
    confidence, right = confidence.float(), (predicted == labels).float()
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    places = torch.bucketize(confidence, edges, right=True) - 1
    count, mean, share = (
        torch.zeros_like(edges).scatter_add_(0, places, values)
        for values in (torch.ones_like(confidence), confidence, right)
    )
    gaps = (torch.nan_to_num(share / count) - torch.nan_to_num(mean / count)).abs()
    return (gaps * (count / count.sum())).sum().item()


def roc_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the area under the ROC curve, a scalar.

    Args:
        scores: (n,), larger where a sample is more likely positive; equal scores are one step.
        positive: (n,) bool, of which some are true and some are not.
    """
    false, true = _positives(scores, positive)
    return torch.trapezoid(pad(true, [1, 0]) / true[-1], pad(false, [1, 0]) / false[-1])


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the precision-recall curve as steps (scikit-learn's definition).

    Arguments are those of ``roc_auc``.
    """
    false, true = _positives(scores, positive)
    precision = (true / (true + false)).flip(0)
    recall = pad((true / true[-1]).flip(0), [0, 1])
    return ((recall[:-1] - recall[1:]) * precision).sum().item()


def _positives(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many false and true positives there are from each distinct score on, falling."""
    order = scores.argsort(descending=True)
    ranked, hits = scores[order], positive[order].long()
    # Only the last of equal scores ends a step
    ends = pad(torch.where(ranked[1:] != ranked[:-1])[0], [0, 1], value=len(scores) - 1)
    true = hits.cumsum(dim=0)[ends]
    return 1 + ends - true, true


def classification_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return ``calibration-error`` and, where defined, ``balanced-accuracy``, ``auc`` and so on.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.

    Balanced accuracy is the mean recall over the classes that occur, of which there must be two: of
    one it would be accuracy under another name. The calibration error is the
    expected one over ``CALIBRATION_BINS`` bins of the largest probability (Guo et al. 2017). AUC is
    of the second of two classes, or the mean one-against-rest AUC of several that all occur. For
    two classes ``average-precision`` of the second is the area under the precision-recall curve as
    steps (scikit-learn's definition); answering at random it is that class's share.
    """
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(dim=1)
    occurring = torch.unique(labels).tolist()
    recalls = [(predicted[labels == one] == one).double().mean().item() for one in occurring]
    metrics = {"calibration-error": calibration_error(probabilities, labels, CALIBRATION_BINS)}
    if len(occurring) > 1:
        metrics["balanced-accuracy"] = sum(recalls) / len(recalls)
    if len(occurring) == classes:
        areas = [roc_auc(probabilities[:, one], labels == one) for one in range(classes)]
        metrics["auc"] = torch.stack(areas).mean().item()
    if len(occurring) == classes == 2:
        metrics["average-precision"] = average_precision(probabilities[:, 1], labels == 1)
    return metrics
