"""Segmentation: the class of each pixel of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from fedsilo.core.errors import SettingError
from fedsilo.core.tasks import SEGMENTATION
from fedsilo.models.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = 1e-12  # probabilities below are raised to it, so that the loss is finite


class Segmentation(Task):
    """The class of each pixel; class 0 is the background.

    Labels are masks (n, h, w) uint8 with the class of each pixel, predictions are class
    probabilities (n, classes, h, w). A sample's stratum is the class with the most pixels besides
    the background, or 0 if the mask is empty.
    """

    name = SEGMENTATION
    headline = "dice"
    shown: ClassVar = ("dice", "iou", "surface-distance", "hausdorff-95", "loss")
    measured_words = (
        "Dice and IoU of the masks, distances between their outlines, loss and the method's own"
    )
    counted_words = "Dice, IoU and distances by class, of each class that enough images have"
    fewest_names = 2
    curves: ClassVar = {
        "dice": "Dice",
        "iou": "IoU",
        "hausdorff-95": "95 % Hausdorff distance (pixels)",
        "loss": "loss (nats)",
    }
    progress: ClassVar = (("dice", "validation Dice before training {:.3f}"),)
    report = "fedsilo.reports.tasks.segmentation"
    losses: ClassVar = ("auto", "cross-entropy")
    label_type = "uint8"
    output_meaning = "class probabilities of each pixel"
    label_noun = "mask"
    network = "fedsilo.models.networks.segmentation.pixel_classifier:build_pixel_classifier"
    why_not_private: ClassVar = (
        "has a Dice loss over a batch, which mixes its patients, so no bound per patient holds"
    )

    def check(self, is_table: bool) -> None:
        """Check that the run's settings, and the metric of early stopping, suit the task.

        Args:
            is_table: ignored.

        Raises:
            SettingError: in one of these cases:

                - 'train.loss' is not a loss of the task.
                - Class weights are set.
                - 'machine.vectorised' is above 1.
                - Training is private.
                - 'server.early-stopping-metric' is neither "none" nor in ``shown``.
        """
        super().check(is_table)
        metric = self.settings.early_stopping_metric
        if metric not in ("none", *self.shown):
            raise SettingError(
                f"'server.early-stopping-metric' is '{metric}', but task '{self.name}' measures "
                f"{', '.join(self.shown)}: choose one of these, or 'none'"
            )

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the cross-entropy plus 'train.dice-weight' times the soft Dice loss."""
        from fedsilo.models.maths.mask_losses import PixelLoss

        return PixelLoss(self.settings.dice_weight)

    def predict(self, outputs: Tensor) -> Tensor:
        """Map pixel logits (batch, classes, h, w) to class probabilities of the same shape."""
        return outputs.softmax(dim=1)

    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        """Compute the loss and the mean mask metrics, such as ``dice``, by name.

        ``loss`` is the mean negative log-likelihood of the pixels' classes, in nats, without the
        Dice loss. The mask metrics are those of ``overall_metrics``. They are absent if all
        predicted and all true masks are only background.
        """
        from torch.nn.functional import nll_loss

        from fedsilo.models.measures.mask_metrics import overall_metrics

        loss = nll_loss(predictions.clamp_min(_LEAST).log(), labels.long()).item()
        classes = predictions.shape[1]
        return {"loss": loss} | overall_metrics(predictions.argmax(dim=1), labels, classes)

    def counts(self, predictions: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
        """Compute each class's mask metrics: ``class.<c>.<metric>`` -> value.

        The background is left out. The metrics are ``dice``, ``iou``, ``surface-distance`` and
        ``hausdorff-95``. Each is an average over the images in which the predicted or the true mask
        has the class. A class with fewer than ``minimum`` such images is left out.

        Args:
            predictions: class probabilities, (n, classes, h, w). The most probable class of a pixel
                is its predicted class.
            labels: each pixel's true class, (n, h, w).
            minimum: the fewest images of a class.
        """
        from fedsilo.models.measures.mask_metrics import class_metrics

        classes = predictions.shape[1]
        return class_metrics(predictions.argmax(dim=1), labels, classes, minimum)

    def strata(self, labels: Tensor) -> Tensor:
        """Return the stratum of each mask, (n,) int64: the class with the most pixels.

        The background is ignored. On a tie the lower class is taken. Empty masks have stratum 0.
        """
        from fedsilo.models.measures.mask_metrics import dominant_classes

        return dominant_classes(labels)

    def odd_counts(self, counts: Sequence[int]) -> str:
        """Return "all training masks are empty" if that holds, otherwise an empty string.

        Args:
            counts: the number of training images in each stratum. An image's stratum is the class,
                other than the background, with the most pixels in its mask. Empty masks have
                stratum 0, so ``counts[0]`` counts them. An empty sequence means that the numbers
                are unknown.
        """
        if counts and 0 < counts[0] == sum(counts):
            return "all training masks are empty"
        return ""

    def describe(self, names: Sequence[str]) -> str:
        """Describe the prediction in a clause: "the class of each pixel: background, vessel"."""
        return f"the class of each pixel: {', '.join(names)}"

    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        """Return masks of one pixel, (n, 1, 1) uint8, with ``counts`` masks of each class."""
        import torch

        classes = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return classes.to(torch.uint8)[:, None, None]
