"""How many samples stand behind a unit's change, and units behind which too few do.

A server that chooses the weights can make a unit answer to a single sample: the unit's change is
then that sample's row (Boenisch et al. 2023, "When the curious abandon honesty"; Fowl et al. 2022,
"Robbing the fed"). Of a linear layer or filter u, G_iu is the sum over positions of the absolute
gradient of sample i's loss at u's output. (Σ_i G_iu)² / Σ_i G_iu² is n if n samples count alike and
1 if one outweighs all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def crowd_of(contributions: Tensor) -> Tensor:
    """Return how many rows effectively stand behind each column's sum, (columns,).

    Args:
        contributions: (n, columns), at least 0. A column of zeros has none: 0.
    """
    total = contributions.sum(dim=0)
    return total.square() / contributions.square().sum(dim=0).clamp_min(torch.finfo().tiny)


@dataclass
class _Unit:
    """What stands behind the units of one layer, and their weights before the training."""

    weight: Tensor
    bias: Tensor | None
    total: Tensor
    squares: Tensor


class Crowd:
    """Watches the layers of a network while it is trained.

    Attributes:
        network: its linear layers and convolutions are watched.
        minimum: samples that must stand behind a unit's change.
        passes: passes over the samples so far: the same sample counts once.
    """

    def __init__(self, network: nn.Module, minimum: int) -> None:
        self.network = network
        self.minimum = minimum
        self.passes = 0
        self._layers: dict[nn.Linear | nn.Conv2d, _Unit] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a block of training, and put units back behind whose change too few stood."""
        layers = [m for m in self.network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        trained = [layer for layer in layers if layer.weight.requires_grad]
        for layer in trained:
            units = torch.zeros(len(layer.weight), dtype=torch.float64, device=layer.weight.device)
            bias = None if layer.bias is None else layer.bias.detach().clone()
            weight = layer.weight.detach().clone()
            self._layers[layer] = _Unit(weight, bias, units, units.clone())
        hooks = [layer.register_forward_hook(self._listen) for layer in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._put_back()

    def _listen(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and isinstance(layer, nn.Linear | nn.Conv2d):
            unit = self._layers[layer]
            last = isinstance(layer, nn.Linear)  # where the units are
            # torch's own is untyped
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: _count(unit, gradient, last)
            )

    def _put_back(self) -> None:
        for layer, unit in self._layers.items():
            # A sample's gradients of all passes add up: (Σ_e g)² <= E Σ_e g² (Cauchy)
            squares = (max(self.passes, 1) * unit.squares).clamp_min(torch.finfo().tiny)
            few = (unit.total.square() / squares < self.minimum) & (unit.total > 0)
            with torch.no_grad():
                layer.weight[few] = unit.weight[few]
                if layer.bias is not None and unit.bias is not None:
                    layer.bias[few] = unit.bias[few]
        self._layers.clear()


def _count(unit: _Unit, gradient: Tensor, units_last: bool) -> None:
    """Add the samples' gradients at the units' outputs: the last axis, or else the second."""
    size = gradient.detach().abs().double()
    size = size if units_last else size.movedim(1, -1)
    each = size.reshape(len(size), -1, size.shape[-1]).sum(dim=1)
    unit.total += each.sum(dim=0)
    unit.squares += each.square().sum(dim=0)
