"""Classification: one of several classes for each sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.tasks.task import Task

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


class Classification(Task):
    """One of several classes for each sample.

    Labels are class indices (n,) int64, predictions are class probabilities (n, classes).
    """

    name = CLASSIFICATION
    headline = "accuracy"
    always: ClassVar = ("accuracy", "entropy", "loss")
    measured_words = (
        "accuracy, balanced accuracy, AUC, average precision, calibration error, loss, entropy and "
        "the method's own; mean vacuity of an evidential network"
    )
    counted_words = (
        "how many fall into each tenth of confidence and of uncertainty (vacuity of an evidential "
        "network), how many of those are right and their mean; by class how many are found, how "
        "many others are taken for it, and its AUC"
    )
    curves: ClassVar = {
        "accuracy": "accuracy",
        "entropy": "entropy (nats)",
        "perplexity": "codebook perplexity",
        "codebook-loss": "codebook loss (eq. 6)",
        "loss": "loss (nats)",
    }
    progress: ClassVar = (
        ("accuracy", "validation accuracy before training {:.3f}"),
        ("entropy", "entropy {:.3f}"),
        ("perplexity", "perplexity {:.1f}"),
    )
    losses: ClassVar = ("auto", "cross-entropy", "evidential")
    label_type = "int64"
    label_noun = "class"
    fewest_names = 2
    trains_stacked = True

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the cross-entropy of logits (batch, classes) and classes (batch,)."""
        from torch.nn.functional import cross_entropy

        return cross_entropy

    def predict(self, outputs: Tensor) -> Tensor:
        """Map logits (batch, classes) to class probabilities."""
        return outputs.softmax(dim=-1)

    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        """Compute the accuracy, the loss and the other metrics of class probabilities, by name.

        - ``accuracy``: the share of samples whose most probable class is right.
        - ``loss``: the mean negative log-likelihood in nats. Probabilities below 1e-12 count as
          1e-12.
        - ``entropy``: the mean entropy of the probabilities in nats.
        - The metrics of ``classification_metrics``, such as ``auc``.
        """
        from torch.nn.functional import nll_loss

        from fedsilo.models.maths.mc_dropout import predictive_entropy
        from fedsilo.models.measures.classification_metrics import classification_metrics

        # A probability of 0 would make the loss infinite, so it is raised to 1e-12
        losses = nll_loss(predictions.clamp_min(1e-12).log(), labels, reduction="none")
        right = predictions.argmax(dim=1) == labels
        values = {
            "accuracy": right.double().mean().item(),
            "loss": losses.mean().item(),
            "entropy": predictive_entropy(predictions).mean().item(),
        }
        return values | classification_metrics(predictions, labels)

    def counts(self, predictions: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
        """Count the right and wrong predictions of each class and in bins of certainty.

        The metrics are those of ``outcome_counts``, such as ``class.0.right``, with the AUC of each
        class.

        Args:
            predictions: class probabilities, (n, classes).
            labels: (n,) int64.
            minimum: the fewest samples behind a value by class. With fewer samples in all, the
                result is empty. A bin may hold fewer samples.
        """
        from fedsilo.models.measures.outcome_counts import outcome_counts

        return outcome_counts(predictions, labels, minimum)

    def strata(self, labels: Tensor) -> Tensor:
        """Return the stratum of each sample, which is its class."""
        return labels

    def odd_counts(self, counts: Sequence[int]) -> str:
        """Return "all training samples are of one class" if that holds, otherwise an empty string.

        ``counts`` has the number of training samples in each class. It may be empty.
        """
        occurring = [count for count in counts if count]
        if len(occurring) == 1:
            return "all training samples are of one class"
        return ""

    def may_report(self, metric: str, counts: Sequence[int], outputs: int) -> bool:
        """Tell whether a metric is defined for samples with these numbers by class.

        - ``balanced-accuracy`` needs samples of at least two classes.
        - ``auc`` needs samples of every class.
        - ``average-precision`` needs exactly two classes, and samples of both.
        - ``accuracy``, ``entropy``, ``loss`` and ``calibration-error`` are always defined.
        - Any other name gives False.

        Args:
            metric: the metric's name.
            counts: the number of samples in each class.
            outputs: the number of classes.
        """
        occurring = sum(1 for count in counts if count)
        if metric == "balanced-accuracy":
            return occurring > 1
        if metric == "auc":
            return occurring == outputs
        if metric == "average-precision":
            return occurring == outputs == 2
        return metric in ("calibration-error", *self.always)

    def label_fault(self, labels: npt.NDArray[Any], samples: int, names: Sequence[str]) -> str:
        """Explain why an array cannot be the samples' class labels, or return '' if it can.

        The array must have the shape (samples,), an integer type, and values from 0 to the number
        of classes - 1. The explanation is a predicate, which the caller puts after a subject, such
        as "must be a whole number from 0 to 2 ...".

        Args:
            labels: the array.
            samples: the number of samples.
            names: the names of the classes. Only their number is used.
        """
        classes = len(names)
        has_form = labels.shape == (samples,) and labels.dtype.kind in "iu"
        if not has_form or (samples and not 0 <= labels.min() <= labels.max() < classes):
            return (
                f"must be a whole number from 0 to {classes - 1} for each of {samples} samples, "
                f"but is {labels.dtype} of shape {labels.shape}"
            )
        return ""

    def describe(self, names: Sequence[str]) -> str:
        """Describe the prediction by the classes' names, as "which of: a, b"."""
        return f"which of: {', '.join(names) or 'classes without names'}"

    def answer_columns(self, predictions: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return the columns of a table of predictions, one value for each sample.

        "predicted" has the most probable class, by name. ``p.<class>`` has the probability of each
        class.
        """
        columns: dict[str, list[Any]] = {"predicted": self._classes(predictions, names)}
        for name, probabilities in zip(names, predictions.T.tolist(), strict=True):
            columns[f"p.{name}"] = probabilities
        return columns

    def truth_columns(self, labels: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return one column: "truth", the name of each sample's true class."""
        return {"truth": [names[label] for label in labels.tolist()]}

    def summarise(self, predictions: Tensor, names: Sequence[str]) -> str:
        """Count the samples by predicted class, in words such as "3 benign, 0 malignant"."""
        answers = self._classes(predictions, names)
        return ", ".join(f"{answers.count(name)} {name}" for name in names)

    def _classes(self, predictions: Tensor, names: Sequence[str]) -> list[str]:
        return [names[place] for place in predictions.argmax(dim=1).tolist()]

    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        """Return labels with ``counts`` samples of each class: (2, 3) gives (0, 0, 1, 1, 1)."""
        import torch

        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))

    def parts(self, predictions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute how much each sample contributes to the sums of accuracy, loss and entropy.

        A contribution is the sample's value divided by the metric's largest value
        (``part_ranges``). It is clipped to 0..1, which matters for large losses. The predictions
        are probabilities (n, classes), the labels (n,) int64, and each metric's contributions are
        (n,).
        """
        from fedsilo.models.privacy.noisy_metrics import bounded_parts

        return bounded_parts(predictions, labels)

    def part_ranges(self, outputs: int) -> Mapping[str, float]:
        """Return the largest value of a sample in each metric of ``parts``: metric -> value.

        The value is 1 for accuracy, and the natural logarithm of the number of classes
        (``outputs``) for entropy. A sample's loss is clipped to 3 nats.
        """
        from fedsilo.models.privacy.noisy_metrics import LOSS_BOUND

        return {"accuracy": 1.0, "loss": LOSS_BOUND, "entropy": math.log(outputs)}

    def limits(self, outputs: int) -> Mapping[str, tuple[float, float]]:
        """Return the bounds to which each metric is clipped before a secure sum: metric -> bounds.

        Accuracy is from 0 to 1, and the loss from -10 to 10. Entropy is from 0 to the natural
        logarithm of the number of classes.
        """
        entropy = (0.0, math.log(outputs))
        return {**super().limits(outputs), "accuracy": (0.0, 1.0), "entropy": entropy}
