"""How many samples stand behind a unit's change, and how much each of them adds to it.

A server that chooses the weights can make a unit answer to a single sample: the unit's change is
then that sample's row (Boenisch et al. 2023, "When the curious abandon honesty"; Fowl et al. 2022,
"Robbing the fed"). Of a linear layer's unit or a filter u, G_iu is the sum over positions of the
absolute gradient of sample i's loss at u's output. Behind u stand Σ_i G_iu / max_i G_iu samples: n
if n count alike, 1 if one outweighs all others. Of a channel's running mean and variance in batch
norm the same holds of how far each sample's mean lies from its batch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsilo.models.contract.errors import RefusedError

_NUMBERS = 2**24  # held at once
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
        energy: Σ_i of the squared norm of sample i's own gradient of the unit's weights and bias.
        net: the sum of the steps' gradients, (units, inputs).
    """

    weight: Tensor
    bias: Tensor | None
    total: Tensor
    peaks: Tensor
    peak: Tensor
    energy: Tensor
    net: Tensor


@dataclass
class _Channels:
    """A batch norm's statistics before the training, and what samples added; as ``_Units``."""

    mean: Tensor
    variance: Tensor
    total: Tensor
    peaks: Tensor
    peak: Tensor


class UnitGuard:
    """Watches a network's linear layers and convolutions while it is trained.

    Attributes:
        put_back: the share of units that were put back.

    Args:
        network: is trained in place. Of a sample that it views twice the larger part is known, by
            which it counts twice: units then need twice as many.
        minimum: samples that must stand behind a unit's change, else the unit is put back; 1 and
            less: nothing is watched.
        shares: is told, by parameter name, how much larger than a unit's change what its samples
            added to it is, (units,): they may cancel out but for one.
    """

    def __init__(self, network: nn.Module, minimum: int, shares: dict[str, Tensor]) -> None:
        self.network = network
        self.minimum = minimum
        self.views = int(getattr(network, "views", 1))
        self.shares = shares
        self.put_back = 0.0
        self._passes = 0
        self._layers: dict[Layer, _Units] = {}
        self._norms: dict[_BatchNorm, _Channels] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a block of training; put units back at its end behind which too few stood."""
        if self.minimum > 1:
            layers = [m for m in self.network.modules() if isinstance(m, Layer)]
            self._layers = {m: _units(m) for m in layers if m.weight.requires_grad}
            norms = [m for m in self.network.modules() if isinstance(m, _BatchNorm)]
            self._norms = {m: _channels(m) for m in norms if m.running_mean is not None}
        hooks = [layer.register_forward_hook(self._listen) for layer in self._layers]
        hooks += [norm.register_forward_hook(self._see) for norm in self._norms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.next_pass()
        self._tell_shares()
        self._put_back()

    def next_pass(self, batches: Sequence[Tensor] = ()) -> None:
        """Note that the samples are seen again, in these batches of sample numbers.

        Raises:
            RefusedError: too few different samples would be behind a step.
        """
        watched: list[_Units | _Channels] = [*self._layers.values(), *self._norms.values()]
        for each in watched:
            each.peaks += each.peak
            each.peak.zero_()
        self._passes += 1
        there = min((len(set(batch.tolist())) for batch in batches), default=self.minimum)
        if there < self.minimum:
            raise RefusedError(
                f"{there} samples would stand behind an optimiser step, and at least "
                f"{self.minimum} must ('minimum-batch'): ask for larger batches, or leave the "
                "site out"
            )

    def add_step(self) -> None:
        """Take note of the gradients by which a step is taken."""
        for layer, units in self._layers.items():
            if layer.weight.grad is not None:
                units.net += layer.weight.grad.detach().flatten(1).double()

    def _listen(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not (output.requires_grad and isinstance(layer, Layer)):
            return
        units, seen = self._layers[layer], inputs[0].detach()
        output.register_hook(  # type: ignore[no-untyped-call]  # torch's own is untyped
            lambda gradient: _count(units, layer, seen, gradient.detach())
        )

    def _see(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if norm.training and isinstance(norm, _BatchNorm):
            seen = inputs[0].detach().double()
            means = seen.reshape(*seen.shape[:2], -1).mean(dim=2)
            _add(self._norms[norm], (means - means.mean(dim=0)).abs())

    def _tell_shares(self) -> None:
        names = {module: name for name, module in self.network.named_modules()}
        for layer, units in self._layers.items():
            energy = max(self._passes - 1, 1) * self.views * units.energy / units.net.shape[1]
            share = (energy / units.net.square().mean(dim=1).clamp_min(_TINY)).sqrt().cpu()
            for part in ("weight", "bias"):
                key = f"{names[layer]}.{part}".removeprefix(".")
                self.shares[key] = torch.maximum(share, self.shares.get(key, share))

    def _put_back(self) -> None:
        minimum = self.minimum * self.views
        few = {
            layer: units.total < minimum * units.peaks
            for layer, units in self._layers.items()
            if units.total.any()
        }
        for norm, channels in self._norms.items():
            one = channels.total < minimum * channels.peaks
            if norm.running_mean is not None and norm.running_var is not None:
                norm.running_mean[one] = channels.mean[one]
                norm.running_var[one] = channels.variance[one]
        behind = [bool(x) for one in few.values() for x in one]
        self.put_back = sum(behind) / len(behind) if behind else 0.0
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


def _channels(norm: _BatchNorm) -> _Channels:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None  # asked before
    assert variance is not None
    none = torch.zeros(len(mean), dtype=torch.float64, device=mean.device)
    return _Channels(mean.clone(), variance.clone(), none, none.clone(), none.clone())


def _add(behind: _Units | _Channels, each: Tensor) -> None:
    """Add what each sample of a batch adds to each unit, (batch, units)."""
    behind.total += each.sum(dim=0)
    behind.peak = torch.maximum(behind.peak, each.amax(dim=0))


def _count(units: _Units, layer: Layer, seen: Tensor, gradient: Tensor) -> None:
    """Add a batch's gradients at the units' outputs, of what the units saw."""
    saw, told = _by_position(layer, seen.float(), gradient.float())
    _add(units, told.abs().sum(dim=2).double())
    at_once = max(1, _NUMBERS // (told.shape[1] * (saw.shape[1] + 1)))
    for part, of in zip(torch.split(saw, at_once), torch.split(told, at_once), strict=True):
        weight = torch.bmm(of, part.transpose(1, 2)).square().sum(dim=(0, 2))
        units.energy += (weight + of.sum(dim=2).square().sum(dim=0)).double()


def _by_position(layer: Layer, seen: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs (batch, inputs, positions) and gradients (batch, units, positions)."""
    batch = len(gradient)
    if isinstance(layer, nn.Linear):
        saw = seen.reshape(batch, -1, seen.shape[-1])
        return saw.transpose(1, 2), gradient.reshape(batch, -1, gradient.shape[-1]).transpose(1, 2)
    padding = layer.padding
    if isinstance(padding, str):
        reach = zip(layer.dilation, layer.kernel_size, strict=True)
        padding = tuple(d * (k - 1) // 2 if padding == "same" else 0 for d, k in reach)
    patches = nn.functional.unfold(seen, layer.kernel_size, layer.dilation, padding, layer.stride)
    return patches, gradient.flatten(2)
