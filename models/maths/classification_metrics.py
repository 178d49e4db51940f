"""What a classifier's probabilities are worth beside accuracy, by torchmetrics.

A measurement that the labels leave undefined is left out: there is no AUC of one class.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def classification_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return ``calibration-error`` and, where defined, ``balanced-accuracy``, ``auc`` and so on.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.

    Balanced accuracy is the mean recall over the classes that occur, of which there must be two: of
    one it would be accuracy under another name. The calibration error is the
    expected one over ``CALIBRATION_BINS`` bins of the largest probability (Guo et al. 2017). AUC is
    of the second of two classes, or the mean one-against-rest AUC of several that all occur. Of two
    classes ``average-precision`` of the second is the area under the precision-recall curve as
    steps (scikit-learn's definition); answering at random it is that class's share.
    """
    # torchmetrics takes seconds to import, and many messages measure nothing
    from torchmetrics.functional.classification import (
        binary_average_precision,
        multiclass_auroc,
        multiclass_calibration_error,
    )

    classes = probabilities.shape[1]
    predicted = probabilities.argmax(dim=1)
    occurring = torch.unique(labels).tolist()
    recalls = [(predicted[labels == one] == one).double().mean().item() for one in occurring]
    metrics = {
        "calibration-error": multiclass_calibration_error(
            probabilities, labels, classes, n_bins=CALIBRATION_BINS, norm="l1"
        ).item()
    }
    if len(occurring) > 1:
        metrics["balanced-accuracy"] = sum(recalls) / len(recalls)
    if len(occurring) == classes:
        metrics["auc"] = multiclass_auroc(probabilities, labels, classes, average="macro").item()
    if len(occurring) == classes == 2:
        metrics["average-precision"] = binary_average_precision(probabilities[:, 1], labels).item()
    return metrics
