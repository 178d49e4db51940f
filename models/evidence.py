"""What a classifier's probabilities are worth beside accuracy, by torchmetrics.

A measurement that the labels leave undefined is left out: there is no AUC of one class.
"""

from __future__ import annotations

import torch
from torch import Tensor

CALIBRATION_BINS = 15


def classification_evidence(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return ``calibration-error`` and, where they are defined, ``balanced-accuracy`` and ``auc``.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.

    Balanced accuracy is the mean recall over the classes that occur, of which there must be two: of
    one it would be accuracy under another name. The calibration error is the
    expected one over ``CALIBRATION_BINS`` bins of the largest probability (Guo et al. 2017). AUC is
    of the second of two classes, or the mean one-against-rest AUC of several that all occur.
    """
    # torchmetrics takes seconds to import, and many messages measure nothing
    from torchmetrics.functional.classification import (
        multiclass_auroc,
        multiclass_calibration_error,
    )

    classes = probabilities.shape[1]
    predicted = probabilities.argmax(dim=1)
    occurring = torch.unique(labels).tolist()
    recalls = [(predicted[labels == one] == one).double().mean().item() for one in occurring]
    found = {
        "calibration-error": multiclass_calibration_error(
            probabilities, labels, classes, n_bins=CALIBRATION_BINS, norm="l1"
        ).item()
    }
    if len(occurring) > 1:
        found["balanced-accuracy"] = sum(recalls) / len(recalls)
    if len(occurring) == classes:
        found["auc"] = multiclass_auroc(probabilities, labels, classes, average="macro").item()
    return found
