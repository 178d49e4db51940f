"""Regression: a number for each sample, such as a length of stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fedsilo.core.tasks import REGRESSION
from fedsilo.models.tasks.task import Task, describe_range

if TYPE_CHECKING:
    from torch import Tensor

LOSS_BOUND = 3.0  # a sample's larger loss, in squared standard deviations, counts as 3


class Regression(Task):
    """A number for each sample.

    Labels are (n,) float32 in the outcome's unit. The network has one output, in standard
    deviations from the outcome's mean (``scale``), so that the same learning rates suit grams and
    kilograms. Predictions (n, 1) are in the outcome's unit again.
    """

    name = REGRESSION
    headline = "mae"
    shown: ClassVar = ("mae", "rmse", "r2", "loss")
    measured_words = "mean absolute error, root mean square error, R2 and loss"
    counted_words = (
        "how many fall into each tenth of the predictions, and the mean prediction and outcome of "
        "each tenth with enough samples"
    )
    curves: ClassVar = {
        "mae": "mean absolute error",
        "rmse": "root mean square error",
        "r2": "R²",
        "loss": "loss",
    }
    progress: ClassVar = (("mae", "validation MAE before training {:.3f}"),)
    answer_words: ClassVar = {
        "predicted": "the predicted number, in the outcome's unit",
        "truth": "the outcome, if it is known",
    }
    output_name = "outcome"
    output_meaning = "the predicted number, in the outcome's unit"
    report = "fedsilo.reports.tasks.regression"
    losses: ClassVar = ("auto", "squared", "huber")
    label_noun = "outcome"

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the training loss, a function of outputs (batch, 1) and labels (batch,).

        The function returns the mean over the batch, a scalar. The network's outputs are in
        standard deviations of the outcome, so the labels are standardised first. The loss is the
        squared error. If 'train.loss' is "huber", it is half the squared error up to one standard
        deviation and grows linearly beyond.
        """

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return self._losses(outputs[:, 0], self._standardise(labels)).mean()

        return loss

    def predict(self, outputs: Tensor) -> Tensor:
        """Map outputs (batch, 1) to numbers in the outcome's unit."""
        mean, deviation = self.scale
        return outputs.double() * deviation + mean

    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics ``mae``, ``rmse``, ``loss`` and, if it is defined, ``r2``.

        - ``mae`` and ``rmse``: the mean absolute error and the root mean square error, in the
          outcome's unit.
        - ``loss``: the mean of the training loss, on standardised predictions and outcomes.
        - ``r2``: 1 - a / b, where a is the sum of squared errors and b is the sum of squared
          deviations of these outcomes from their mean. Left out if all outcomes are equal.

        Args:
            predictions: predicted numbers in the outcome's unit, (n, 1).
            labels: outcomes in the same unit, (n,).
        """
        predicted, observed = predictions[:, 0].double(), labels.double()
        errors = predicted - observed
        values = {
            "mae": errors.abs().mean().item(),
            "rmse": errors.square().mean().sqrt().item(),
            "loss": self._losses(*map(self._standardise, (predicted, observed))).mean().item(),
        }
        spread = (observed - observed.mean()).square().sum()
        if spread > 0:
            values["r2"] = (1 - errors.square().sum() / spread).item()
        return values

    def counts(self, predictions: Tensor, labels: Tensor, minimum: int) -> dict[str, float]:
        """Compute the sample count, mean prediction and mean outcome in ten bins of predictions.

        The edges of the bins are the deciles of a normal distribution with the training outcomes'
        mean and standard deviation (``scale``). Bins may therefore hold different numbers of
        samples. Bin 0 has the lowest predictions. An empty bin, or a bin with fewer than
        ``minimum`` samples, is left out.

        Args:
            predictions: predicted numbers in the outcome's unit, (n, 1).
            labels: outcomes in the same unit, (n,).
            minimum: the fewest samples of a bin.

        Returns:
            ``outcome.<bin>.count``, ``outcome.<bin>.predicted`` and ``outcome.<bin>.observed`` ->
            value.
        """
        from fedsilo.models.measures.regression_metrics import outcome_bins

        return outcome_bins(predictions[:, 0].double(), labels.double(), self.scale, minimum)

    def describe(self, names: Sequence[str]) -> str:
        """Describe the prediction by the outcome's name and unit, as "a number: days"."""
        return f"a number: {', '.join(names)}"

    def answer_columns(self, predictions: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return one column: "predicted", the predicted numbers in the outcome's unit."""
        return {"predicted": predictions[:, 0].tolist()}

    def truth_columns(self, labels: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return one column: "truth", the outcomes in their unit."""
        return {"truth": labels.tolist()}

    def summarise(self, predictions: Tensor, names: Sequence[str]) -> str:
        """Summarise the predictions in a clause, such as "bmi from 18.8 to 56.4, median 31.9".

        The clause begins with ``names[0]``, the outcome's name. Without predictions, it is only
        this name.
        """
        if not len(predictions):
            return names[0]
        return f"{names[0]} {describe_range(predictions[:, 0])}"

    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        """Make placeholder labels, all 0: one for each declared sample, (n,) float32."""
        import torch

        return torch.zeros(sum(counts))

    def parts(self, predictions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute each sample's contribution, 0 to 1, to the site's loss, a sum that gets noise.

        Predictions and outcomes are first standardised by ``scale``. A sample's loss is the squared
        error, or Huber's loss if 'train.loss' is 'huber'. A loss above 3 counts as 3, and is then
        divided by 3. If it is NaN, the contribution is 1, because a NaN in the sum would reveal
        that sample.

        Args:
            predictions: predicted numbers in the outcome's unit, (n, 1).
            labels: outcomes in the same unit, (n,).

        Returns:
            "loss" -> contributions, (n,) float64.
        """
        import torch

        predicted, observed = predictions[:, 0].double(), labels.double()
        losses = self._losses(*map(self._standardise, (predicted, observed)))
        return {"loss": torch.nan_to_num(losses / LOSS_BOUND, nan=1.0).clamp(0.0, 1.0)}

    def part_ranges(self, outputs: int) -> Mapping[str, float]:
        """Return the loss that a contribution of 1 in ``parts`` stands for, as "loss": 3."""
        return {"loss": LOSS_BOUND}

    def _standardise(self, values: Tensor) -> Tensor:
        mean, deviation = self.scale
        return (values - mean) / deviation

    def _losses(self, predicted: Tensor, observed: Tensor) -> Tensor:
        """Return each sample's loss, (n,), for standardised predictions and outcomes, (n,) each.

        The loss is the squared error. If 'train.loss' is 'huber', errors above 1 have a linear
        loss.
        """
        from torch.nn.functional import huber_loss, mse_loss

        if self.settings.loss == "huber":
            return huber_loss(predicted, observed, reduction="none")
        return mse_loss(predicted, observed, reduction="none")
