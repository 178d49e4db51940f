"""A network with its preprocessing, from raw samples to predictions."""

import torch
from torch import Tensor, nn

from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.tasks.task import Task

PixelStatistics = tuple[Tensor, Tensor]


class ProbabilityModel(nn.Module):
    """Computes predictions from raw samples, in one pass without dropout.

    Args:
        network: the trained network, whose mode becomes eval.
        rows: statistics that standardise the features of a table; None for images.
        pixels: mean and standard deviation (channels, 1, 1) on the 0..1 scale, which standardise
            pixels of 0..255. None to scale images by ``float_inputs``. Ignored if ``rows`` is set.
        task: maps the network's outputs to predictions; None for class probabilities.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: SiteNetwork,
        rows: FeatureStatistics | None = None,
        pixels: PixelStatistics | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.task = task
        self.kind = "images"
        mean, std = torch.zeros(1), torch.ones(1)
        if rows:
            self.kind = "rows"
            mean, std = torch.from_numpy(rows.mean), torch.from_numpy(rows.std)
        elif pixels:
            self.kind = "pixels"
            mean, std = pixels
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.eval()

    def prepare(self, inputs: Tensor) -> Tensor:
        """Convert raw inputs (batch, *input_shape) to the float32 that the network takes.

        - Rows of a table are standardised by the training mean and standard deviation of each
          feature. A missing value (NaN) then becomes 0, which stands for the mean.
        - Pixels are divided by 255 and standardised by their channel, if the model was built with
          ``pixels``, the channels' means and standard deviations.
        - Any other images are scaled as in training: uint8 to -1..1, int16 by each image's own mean
          and standard deviation.
        """
        if self.kind == "rows":
            # After standardisation the mean is 0. float64, because training standardises in it too
            return ((inputs.double() - self.mean) / self.std).nan_to_num(nan=0.0).float()
        if self.kind == "pixels":
            return (inputs / 255 - self.mean) / self.std
        return float_inputs(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map raw inputs (batch, *input_shape) to float32 predictions (batch, outputs).

        The inputs are prepared by ``prepare`` first. With a task, its ``predict`` turns the
        network's outputs into predictions. Without a task, a softmax turns them into class
        probabilities.
        """
        outputs = self.network(self.prepare(inputs)).float()
        if self.task is None:
            return torch.softmax(outputs, dim=-1)
        return self.task.predict(outputs).float()
