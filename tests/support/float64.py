"""Training in float64, in which two orders of the same additions agree to many digits.

In float32 they do not: a processor adds in another order for another shape, ReLU may then take its
other side, and Adam divides a gradient that is zero but for rounding by its own size. How far apart
two float32 trainings end is a matter of the processor, so no tolerance between them is right
everywhere. A float64 training rounds at 1e-16: what is left is a difference of the mathematics.
"""

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.models.networks.encoders import float_inputs

# Models travel and are stored as float32: one more rounding, of half a unit in the last place
RELATIVE = 10 * torch.finfo(torch.float32).eps
ABSOLUTE = RELATIVE / 10  # of weights and metrics, which are of size 1 or less


def train_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every network and batch of this process float64 until the test ends."""
    place, bring = Compute.place, Compute.bring

    def place_double(self: Compute, network: nn.Module) -> nn.Module:
        return place(self, network).double()

    def bring_double(self: Compute, tensor: Tensor) -> Tensor:
        # Images are stored as whole numbers, which a network scales to floats only later
        if tensor.ndim == 4:
            tensor = float_inputs(tensor)
        if tensor.is_floating_point():
            tensor = tensor.double()
        return bring(self, tensor)

    monkeypatch.setattr(Compute, "place", place_double)
    monkeypatch.setattr(Compute, "bring", bring_double)
