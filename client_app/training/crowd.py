"""How many samples stand behind a unit's change, and how much each of them adds to it.

A server that chooses the weights can make a unit answer to a single sample: the unit's change is
then that sample's row (Boenisch et al. 2023, "When the curious abandon honesty"; Fowl et al. 2022,
"Robbing the fed"). Of a linear layer's unit or a filter u, G_iu is the sum over positions of the
absolute gradient of sample i's loss at u's output. Behind u stand Σ_i G_iu / max_i G_iu samples: n
if n count alike, 1 if one outweighs all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.contract.errors import RefusedError

_TINY = torch.finfo(torch.float64).tiny
Layer = nn.Linear | nn.Conv2d


@dataclass
class _Units:
    """A layer's weights before the training, and per unit what its samples added.

    Attributes:
        weight, bias: before.
        total: Σ_i G_iu.
        peaks: sum over the passes of max_i G_iu: no sample's share of all passes is larger.
        peak: max_i G_iu of this pass.
        energy: Σ_i (G_iu ‖(a_i, 1)‖)², where a_i is what the unit saw of sample i.
        net: the sum of the steps' gradients, (units, inputs).
    """

    weight: Tensor
    bias: Tensor | None
    total: Tensor
    peaks: Tensor
    peak: Tensor
    energy: Tensor
    net: Tensor


class Crowd:
    """Watches a network's linear layers and convolutions while it is trained.

    Args:
        network: is trained in place.
        minimum: samples that must stand behind a unit's change, else the unit is put back; 1 and
            less: nothing is watched.
        shares: is told, by parameter name, how much larger than a unit's change what its samples
            added to it is, (units,): they may cancel out but for one.
    """

    def __init__(self, network: nn.Module, minimum: int, shares: dict[str, Tensor]) -> None:
        self.network = network
        self.minimum = minimum
        self.shares = shares
        self._passes = 0
        self._layers: dict[Layer, _Units] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a block of training; put units back at its end behind which too few stood.

        Raises:
            RefusedError: too few stood behind every unit: nothing would be left of the training.
        """
        if self.minimum > 1:
            layers = [m for m in self.network.modules() if isinstance(m, Layer)]
            self._layers = {m: _units(m) for m in layers if m.weight.requires_grad}
        hooks = [layer.register_forward_hook(self._listen) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.next_pass()
        self._tell_shares()
        self._put_back()

    def next_pass(self) -> None:
        """Take note that the samples come again."""
        for units in self._layers.values():
            units.peaks += units.peak
            units.peak.zero_()
        self._passes += 1

    def add_step(self) -> None:
        """Take note of the gradients by which a step is taken."""
        for layer, units in self._layers.items():
            if layer.weight.grad is not None:
                units.net += layer.weight.grad.detach().flatten(1).double()

    def _listen(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not (output.requires_grad and isinstance(layer, Layer)):
            return
        units, seen = self._layers[layer], inputs[0].detach().double()
        if isinstance(layer, nn.Linear):
            norms = (seen.square().sum(dim=-1, keepdim=True) + 1).sqrt()
        else:  # of a patch, by the mean over the image
            fan_in = layer.weight[0].numel()
            norms = (fan_in * seen.square().mean(dim=(1, 2, 3)) + 1).sqrt().view(-1, 1, 1, 1)
        output.register_hook(  # type: ignore[no-untyped-call]  # torch's own is untyped
            lambda gradient: _count(units, gradient, norms, isinstance(layer, nn.Linear))
        )

    def _tell_shares(self) -> None:
        names = {module: name for name, module in self.network.named_modules()}
        for layer, units in self._layers.items():
            energy = max(self._passes - 1, 1) * units.energy / units.net.shape[1]
            share = (energy / units.net.square().mean(dim=1).clamp_min(_TINY)).sqrt().cpu()
            for part in ("weight", "bias"):
                key = f"{names[layer]}.{part}"
                self.shares[key] = torch.maximum(share, self.shares.get(key, share))

    def _put_back(self) -> None:
        few = {
            layer: units.total < self.minimum * units.peaks
            for layer, units in self._layers.items()
            if units.total.any()
        }
        if few and all(bool((one | (self._layers[m].total == 0)).all()) for m, one in few.items()):
            raise RefusedError(
                f"fewer than {self.minimum} samples stand behind the change of every unit "
                "('minimum-batch'): ask for more steps, larger batches or whole passes, or leave "
                "the site out"
            )
        for layer, one in few.items():
            units = self._layers[layer]
            with torch.no_grad():
                layer.weight[one] = units.weight[one]
                if layer.bias is not None and units.bias is not None:
                    layer.bias[one] = units.bias[one]


def _units(layer: Layer) -> _Units:
    weight = layer.weight.detach().clone()
    none = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    return _Units(
        weight,
        None if layer.bias is None else layer.bias.detach().clone(),
        none,
        none.clone(),
        none.clone(),
        none.clone(),
        torch.zeros_like(weight.flatten(1), dtype=torch.float64),
    )


def _count(units: _Units, gradient: Tensor, norms: Tensor, units_last: bool) -> None:
    """Add a batch's gradients at the units' outputs, whose axis is the last one or the second.

    ``norms`` of what the units saw are of the same axes, 1 in place of the units.
    """
    size = gradient.detach().abs().double()
    added = size * norms
    if not units_last:
        size, added = size.movedim(1, -1), added.movedim(1, -1)
    each, added = (x.reshape(len(x), -1, x.shape[-1]).sum(dim=1) for x in (size, added))
    units.total += each.sum(dim=0)
    units.peak = torch.maximum(units.peak, each.amax(dim=0))
    units.energy += added.square().sum(dim=0)
