"""One network that trains several sites at once: each layer has a stack of their weights.

A batch holds the rows of one site after another, the same number for each site. A layer without
weights treats each row by itself, so it need not know the sites. A linear layer becomes one
batched product; other layers with weights run under ``torch.func.vmap``.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer


@dataclass
class Rows:
    """The division of a batch into sites; layers read it at each step.

    Attributes:
        sizes: rows of each site. Sites with fewer rows than the largest are padded, and the
            outputs for padding are ignored.
        sources: the generators of the sites' dropout, in the order of the sites.
    """

    sizes: list[int] = field(default_factory=list)
    sources: list[torch.Generator] = field(default_factory=list)

    def split(self, rows: Tensor) -> Tensor:
        """Reshape rows (sites * most, ...) to (sites, most, ...); most is the largest size."""
        return rows.reshape(len(self.sizes), -1, *rows.shape[1:])


class StackedNetwork:
    """Trains one network at several sites at once, all starting from the same weights.

    Args:
        network: the initial network. Only layers without sublayers may have weights. Its layers are
            replaced in place.
        sites: the number of sites.
        rows: the division of each batch into sites, which are the first sites of the stack.

    Attributes:
        network: maps the rows of several sites, each by the weights of its site.
        arrays: parameters and buffers (sites, ...), by their names in the network.
    """

    def __init__(self, network: nn.Module, sites: int, rows: Rows) -> None:
        self.network = network
        self.arrays: dict[str, Tensor] = {}
        self._layers: list[_Layer] = []
        for name, layer in list(self.network.named_modules()):
            is_dropout = isinstance(layer, nn.Dropout) and layer.p > 0
            tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            if not tensors and not is_dropout:
                continue
            if is_dropout:
                self.network.set_submodule(name, _Dropout(layer.p, rows))
                continue
            stacked = _stack(layer, sites, rows)
            self.network.set_submodule(name, stacked)
            self._layers.append(stacked)
            for own_name, array in stacked.arrays.items():
                self.arrays[f"{name}.{own_name}"] = array.data

    def parameters(self) -> list[nn.Parameter]:
        """Return the stacked parameters (sites, ...) that require gradients."""
        trained = []
        for layer in self._layers:
            for array in layer.arrays.values():
                if isinstance(array, nn.Parameter) and array.requires_grad:
                    trained.append(array)
        return trained

    def keep(self, sites: int, optimiser: Optimizer) -> None:
        """Train only the first ``sites`` sites from now on; the remaining sites have finished.

        ``arrays`` still has the final weights of all sites. The optimiser gets the shorter
        parameters and shorter moments, so the remaining sites step as before.

        Args:
            sites: the number of sites that still train, at least 1 and at most as many as now.
                Sites are ordered so that those with fewer steps come last.
            optimiser: the optimiser over all parameters of this network; it is changed in place.
        """
        # A slice is a view: the remaining sites keep training the same memory that ``arrays`` holds
        shorter: dict[Tensor, nn.Parameter] = {}
        for before in self.parameters():
            after = nn.Parameter(before.data[:sites])
            shorter[before] = after
            # The optimiser finds its moments by the parameter object, so they move to the new one
            state = optimiser.state.pop(before, {})
            for name, moment in state.items():
                if isinstance(moment, Tensor) and moment.shape == before.shape:
                    state[name] = moment[:sites]
            optimiser.state[after] = state
        for group in optimiser.param_groups:
            group["params"] = [shorter[before] for before in group["params"]]
        for layer in self._layers:
            for name, array in layer.arrays.items():
                layer.arrays[name] = shorter.get(array, array)


class _Layer(nn.Module):
    """A layer with separate weights for each site, computed under ``torch.vmap``."""

    def __init__(self, layer: nn.Module, sites: int, rows: Rows) -> None:
        super().__init__()
        # A list hides the module: torch would register it, and with it unused weights
        self._of_one = [layer]
        self._rows = rows
        self.arrays: dict[str, Tensor] = {}
        for name, weights in layer.named_parameters():
            stack = weights.detach().repeat(sites, *[1] * weights.ndim)
            self.arrays[name] = nn.Parameter(stack, weights.requires_grad)
        for name, buffer in layer.named_buffers():
            self.arrays[name] = buffer.repeat(sites, *[1] * buffer.ndim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map rows (sites * most, ...), each by the weights of its site."""
        return self.of_sites(self._rows.split(inputs)).flatten(0, 1)

    def of_sites(self, inputs: Tensor) -> Tensor:
        """Map rows (sites, most, ...) to outputs (sites, most, ...), by each site's own weights.

        ``most`` is the largest number of rows of a site; the rows of smaller sites are padded, and
        their padding is mapped like other rows. The first axis has the sites of the current batch,
        which are the first sites of the stack.
        """

        def of_one(arrays: dict[str, Tensor], own: Tensor) -> Tensor:
            mapped: Tensor = functional_call(self._of_one[0], arrays, (own,))
            return mapped

        mapped: Tensor = torch.vmap(of_one)(self.current(), inputs)
        return mapped

    def current(self) -> dict[str, Tensor]:
        """Return name -> array (sites, ...) for the sites in the current batch.

        These are the first sites of the stack, as many as ``rows.sizes`` has entries.
        """
        sites = len(self._rows.sizes)
        current = dict(self.arrays)
        for name, array in self.arrays.items():
            if len(array) != sites:
                current[name] = array[:sites]
        return current


class _Linear(_Layer):
    """A linear layer for several sites, as one batched product."""

    def of_sites(self, inputs: Tensor) -> Tensor:
        """Map rows (sites, most, features) to (sites, most, outputs) by one batched product.

        Inputs with more dimensions are computed under vmap.
        """
        # bmm takes exactly three dimensions; tokens have more
        if inputs.ndim > 3:
            return super().of_sites(inputs)
        arrays = self.current()
        weight, bias = arrays["weight"].mT, arrays.get("bias")
        if bias is None:
            return torch.bmm(inputs, weight)
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight)


class _Norm(_Layer):
    """Batch norm with mean and variance over the rows of a site without its padding."""

    def of_sites(self, inputs: Tensor) -> Tensor:
        """Normalise rows (sites, most, channels, ...), each site with its own statistics.

        Padded rows do not count in the statistics.

        Running statistics are updated as by torch. Without padding, or in eval mode, torch's own
        batch norm is computed under vmap.
        """
        layer, arrays, rows = self._of_one[0], self.current(), self._rows
        assert isinstance(layer, _BatchNorm)
        is_padded = min(rows.sizes) < max(rows.sizes)
        if not is_padded or not layer.training or layer.momentum is None:
            return super().of_sites(inputs)
        # (sites, most, channels, places): the mean of a channel is over rows and places
        places = inputs.unsqueeze(3)
        if inputs.ndim > 3:
            places = inputs.flatten(3)
        sizes = torch.tensor(rows.sizes, device=inputs.device)
        real = torch.arange(places.shape[1], device=inputs.device) < sizes[:, None]
        weights = real[:, :, None, None].to(places.dtype)
        count = (sizes * places.shape[3])[:, None]
        mean = (places * weights).sum((1, 3)) / count
        centred = places - mean[:, None, :, None]
        variance = (centred.square() * weights).sum((1, 3)) / count
        if layer.track_running_stats:
            with torch.no_grad():
                arrays["running_mean"].lerp_(mean, layer.momentum)
                # torch normalises by the biased variance but stores the unbiased one
                arrays["running_var"].lerp_(variance * count / (count - 1), layer.momentum)
                arrays["num_batches_tracked"].add_(1)
        scale = (variance + layer.eps).rsqrt()
        if not layer.affine:
            return (centred * scale[:, None, :, None]).view_as(inputs)
        scale, shift = scale * arrays["weight"], arrays["bias"]
        return (centred * scale[:, None, :, None] + shift[:, None, :, None]).view_as(inputs)


class _Dropout(nn.Module):
    """Dropout whose masks come from each site's own generator.

    A site that trains by itself on a CPU draws the same numbers, so the masks are the same.
    """

    def __init__(self, rate: float, rows: Rows) -> None:
        super().__init__()
        self._keep, self._rows = 1 - rate, rows

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop elements of rows (sites * most, ...) with a mask drawn from each site's generator.

        Kept elements are divided by the rate at which they are kept. Padding is multiplied by 0.
        """
        kept = []
        # Finished sites are not in ``sizes`` any more, but keep their generator
        for size, source in zip(self._rows.sizes, self._rows.sources, strict=False):
            mask = torch.empty(size, *inputs.shape[1:])
            kept.append(mask.bernoulli_(self._keep, generator=source))
        noise = pad_sequence(kept, batch_first=True).flatten(0, 1).div_(self._keep)
        return inputs * noise.to(inputs)


def _stack(layer: nn.Module, sites: int, rows: Rows) -> _Layer:
    """Wrap a layer for several sites: batch norm in ``_Norm``, an ``nn.Linear`` in ``_Linear``.

    Other layers, and subclasses of ``nn.Linear``, are wrapped in ``_Layer``.
    """
    if isinstance(layer, _BatchNorm):
        return _Norm(layer, sites, rows)
    if type(layer) is nn.Linear:  # a subclass may compute something else
        return _Linear(layer, sites, rows)
    return _Layer(layer, sites, rows)
