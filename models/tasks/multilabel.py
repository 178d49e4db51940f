"""Multi-label: several findings in each sample, each of them present or absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar

from fedsilo.core.tasks import MULTI_LABEL
from fedsilo.models.tasks.task import Task

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_THRESHOLD = 0.5  # a finding is said to be present from this probability on
LOSS_BOUND = 3.0  # nats; a sample's larger loss counts as 3


class MultiLabel(Task):
    """Several findings in each sample, each of them present or absent.

    Labels are 0 or 1 for each finding, (n, findings) float32. The network has an output per
    finding, and predictions are the findings' probabilities (n, findings), which need not sum to 1.
    """

    name = MULTI_LABEL
    headline = "auc"
    shown: ClassVar = ("auc", "average-precision", "loss")
    measured_words = "mean AUC and mean average precision over the findings, and loss"
    counted_words = (
        "by finding, with enough samples that have it and that lack it, how many have it, and its "
        "AUC"
    )
    curves: ClassVar = {
        "auc": "mean AUC",
        "average-precision": "mean average precision",
        "loss": "loss (nats)",
    }
    progress: ClassVar = (("auc", "validation AUC before training {:.3f}"),)
    answer_words: ClassVar = {
        "predicted": "the findings with a probability of at least 0.5, ';' between them",
        "p.<finding>": "probability of the finding; these need not sum to 1",
        "truth": "the findings that are present, if they are known",
    }
    output_meaning = "the probability of each finding; these need not sum to 1"
    report = "fedsilo.reports.tasks.multilabel"
    label_noun = "finding"

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the binary cross-entropy of logits and labels (batch, findings), a mean."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits

    def predict(self, outputs: Tensor) -> Tensor:
        """Map logits (batch, findings) to probabilities."""
        return outputs.sigmoid()

    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the loss, and the mean AUC and average precision over findings, by name.

        ``loss`` is in nats per finding. ``auc`` and ``average-precision`` are averaged over the
        findings that some samples have and others lack. Without such a finding, only the loss is
        returned.
        """
        from fedsilo.models.measures.finding_metrics import mean_over_findings

        loss = self._losses(predictions, labels).mean().item()
        return {"loss": loss, **mean_over_findings(predictions, labels > 0.5)}

    def counts(self, predictions: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
        """Compute each finding's number of positive samples, and its AUC, as metrics by name.

        Finding k has ``finding.<k>.count`` and ``finding.<k>.auc``. It is left out if fewer than
        ``minimum`` samples have it or fewer than ``minimum`` lack it.

        Args:
            predictions: the probability of each finding, (n, findings).
            labels: (n, findings). A label above 0.5 is positive.
            minimum: the fewest positive and the fewest negative samples. Below 1 it counts as 1.
        """
        from fedsilo.models.measures.finding_metrics import finding_counts

        return finding_counts(predictions, labels > 0.5, minimum)

    def describe(self, names: Sequence[str]) -> str:
        """Describe the prediction by the findings' names, as "which are present: a, b"."""
        return f"which are present: {', '.join(names)}"

    def answer_columns(self, predictions: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return a table's columns: "predicted", and then ``p.<finding>`` for each finding.

        "predicted" has the names of a sample's findings with a probability of at least 0.5, joined
        by semicolons. For a sample without such a finding it is empty. ``p.<finding>`` has the
        probabilities.
        """
        columns: dict[str, list[Any]] = {"predicted": _present(predictions, names)}
        for name, probabilities in zip(names, predictions.T.tolist(), strict=True):
            columns[f"p.{name}"] = probabilities
        return columns

    def truth_columns(self, labels: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return one column: "truth", the names of each sample's findings, joined by semicolons."""
        return {"truth": _present(labels, names)}

    def summarise(self, predictions: Tensor, names: Sequence[str]) -> str:
        """State how many samples have each finding, in words such as "3 oedema, 0 effusion".

        A sample has a finding if its probability is at least 0.5. Without samples, all numbers are
        0.
        """
        counts = (predictions >= _THRESHOLD).sum(dim=0).tolist()
        return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))

    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        """Return zeros (n, outputs) for the declared number of samples."""
        import torch

        return torch.zeros(sum(counts), outputs)

    def label_fault(self, labels: npt.NDArray[Any], samples: int, names: Sequence[str]) -> str:
        """Explain why an array cannot be the labels of the samples, or return '' if it can.

        The array must have the shape (samples, findings), a type of numbers or booleans, and only
        the values 0 and 1. The explanation is a predicate, such as "must be 0 or 1 ...", which the
        caller puts after a subject. It may name the first finding with a wrong value.

        Args:
            labels: the array.
            samples: the number of samples.
            names: the names of the findings.
        """
        import numpy as np

        wanted = f"0 or 1 for each of {samples} samples and {len(names)} findings"
        if labels.shape != (samples, len(names)) or labels.dtype.kind not in "iufb":
            return f"must be {wanted}, but is {labels.dtype} of shape {labels.shape}"
        for place, name in enumerate(names):
            if not np.isin(labels[:, place], (0, 1)).all():
                return f"must be {wanted}, but finding '{name}' has another value"
        return ""

    def parts(self, predictions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute each sample's contribution, 0 to 1, to the site's loss, a sum that gets noise.

        A sample's loss is the mean of its findings' cross-entropies. A loss above 3 nats counts as
        3, and is then divided by 3. If it is NaN, the contribution is 1, because a NaN in the sum
        would reveal that sample.

        Args:
            predictions: the findings' probabilities, (n, findings).
            labels: 0 or 1 for each finding, (n, findings).

        Returns:
            "loss" -> contributions, (n,) float64.
        """
        import torch

        losses = self._losses(predictions, labels).mean(dim=1)
        return {"loss": torch.nan_to_num(losses / LOSS_BOUND, nan=1.0).clamp(0.0, 1.0)}

    def part_ranges(self, outputs: int) -> Mapping[str, float]:
        """Return the loss that a contribution of 1 in ``parts`` stands for, as "loss": 3."""
        return {"loss": LOSS_BOUND}

    def _losses(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each sample and finding, (n, findings) float64."""
        # A probability of 0 would make the loss infinite, so it is at least 1e-12
        right = labels.double() * predictions + (1 - labels.double()) * (1 - predictions)
        return -right.clamp_min(1e-12).log()


def _present(values: Tensor, names: Sequence[str]) -> list[str]:
    """Join the names whose value in a row of (n, findings) is at least 0.5, for each row."""
    texts = []
    for row in (values >= _THRESHOLD).tolist():
        texts.append(";".join(compress(names, row)))
    return texts
