"""A network with its preprocessing: from samples as they are read to class probabilities."""

import torch
from torch import Tensor, nn

from fedsilo.models.contract.site_facts import FeatureStatistics
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

PixelStatistics = tuple[Tensor, Tensor]


class ProbabilityModel(nn.Module):
    """Class probabilities of rows as they are read, or of pixels, in one pass without dropout.

    ``rows`` are the statistics that a table's features are standardised by. With ``pixels``, mean
    and standard deviation (channels, 1, 1) at 0..1, inputs are pixels of 0..255 to standardise.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: SiteNetwork,
        rows: FeatureStatistics | None = None,
        pixels: PixelStatistics | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.kind = "rows" if rows else "pixels" if pixels else "images"
        mean, std = pixels or (torch.zeros(1), torch.ones(1))
        if rows:
            mean, std = torch.from_numpy(rows.mean), torch.from_numpy(rows.std)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.eval()

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return inputs (batch, *input_shape) as the network takes them, float32.

        A missing value of a row, NaN, becomes the mean. Images of 8 or 16 bits are scaled by
        ``float_inputs``, as in training.
        """
        if self.kind == "rows":
            return ((inputs.double() - self.mean) / self.std).nan_to_num(nan=0.0).float()
        if self.kind == "pixels":
            return (inputs / 255 - self.mean) / self.std
        return float_inputs(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to class probabilities (batch, classes), float32."""
        return torch.softmax(self.network(self.prepare(inputs)).float(), dim=-1)
