"""One network that trains several sites at once: each layer has a stack of their weights.

A batch holds the rows of one site after another, the same number for each site. A layer without
weights treats each row by itself, so it need not know the sites. A linear layer becomes one
batched product; other layers with weights run under ``torch.func.vmap``.
"""

from collections.abc import Sequence
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
        states: the states of the generators that draw the sites' dropout, in the order of the
            sites. They belong to generators of the device of the inputs, and advance as masks are
            drawn.
        counts: ``sizes`` as a tensor (sites,) on the device of the inputs. None to copy ``sizes``
            there at each use, for which a GPU has to wait.
    """

    sizes: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    counts: Tensor | None = None

    def split(self, rows: Tensor) -> Tensor:
        """Reshape rows (sites * most, ...) to (sites, most, ...); most is the largest size."""
        return rows.reshape(len(self.sizes), -1, *rows.shape[1:])

    def counts_on(self, device: torch.device) -> Tensor:
        """Return the number of rows of each site as a tensor (sites,) on ``device``.

        If the caller has set ``counts``, this tensor is returned unchanged, and must already be on
        ``device``.
        """
        if self.counts is None:
            return torch.tensor(self.sizes, device=device)
        return self.counts


class StackedNetwork:
    """Trains one network at several sites at once, each starting from its own weights.

    Args:
        networks: each site's network, at least one; they differ only in the values of their arrays.
            Only layers without sublayers may have weights. The layers of the first network are
            replaced in place, and the other networks are unchanged.
        rows: the division of each batch into sites, which are the first sites of the stack.

    Attributes:
        network: the first network, which now maps the rows of several sites, each by the weights
            of its site. Its parameters and buffers have their usual names and a first axis of
            sites.
        trained: the stacked parameters (sites, ...) that require gradients, by their names in the
            network. After ``keep`` they are other parameters, which have only the remaining sites.
        arrays: the trained parameters and all buffers (sites, ...) of all sites, by name.
    """

    def __init__(self, networks: Sequence[nn.Module], rows: Rows) -> None:
        self.network = networks[0]
        # A list, because the loop replaces the very modules that ``named_modules`` walks over
        for name, layer in list(self.network.named_modules()):
            is_dropout = isinstance(layer, nn.Dropout) and layer.p > 0
            tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            if not tensors and not is_dropout:
                continue
            if is_dropout:
                self.network.set_submodule(name, _Dropout(layer.p, rows).train(layer.training))
                continue
            stacked = _stack([network.get_submodule(name) for network in networks], rows)
            self.network.set_submodule(name, stacked)
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in self.network.named_parameters():
            if parameter.requires_grad:
                self.trained[name] = parameter
        self.arrays = dict(self.network.named_buffers())
        for name, parameter in self.trained.items():
            self.arrays[name] = parameter.data

    def keep(self, sites: int, optimiser: Optimizer) -> None:
        """Train only the first ``sites`` sites from now on, because the later sites have finished.

        The parameters and the optimiser's moments are cut to these sites. ``arrays`` still holds
        the weights of all sites: the cut parameters share its memory.

        Args:
            sites: the number of sites that still train, at least 1 and at most as many as now.
                Sites are ordered so that those with fewer steps come last.
            optimiser: the optimiser over all parameters of this network, which is changed in place.
        """
        # A slice is a view: the remaining sites keep training the same memory that ``arrays`` holds
        shorter: dict[Tensor, nn.Parameter] = {}
        for path, before in self.trained.items():
            after = nn.Parameter(before.data[:sites])
            shorter[before] = self.trained[path] = after
            layer, _, own_name = path.rpartition(".")
            setattr(self.network.get_submodule(layer), own_name, after)
            # The optimiser finds its moments by the parameter object, so they move to the new one
            state = optimiser.state.pop(before, {})
            for name, moment in state.items():
                if isinstance(moment, Tensor) and moment.shape == before.shape:
                    state[name] = moment[:sites]
            optimiser.state[after] = state
        for group in optimiser.param_groups:
            group["params"] = [shorter[before] for before in group["params"]]


class _Layer(nn.Module):
    """A layer with separate weights for each site, computed under ``torch.vmap``.

    Its parameters and buffers have the names of the layer's, and a first axis of sites.

    Args:
        layers: the same layer of each site's network.
        rows: the division of each batch into sites.
    """

    def __init__(self, layers: Sequence[nn.Module], rows: Rows) -> None:
        super().__init__()
        # A list hides the module: torch would register it, and with it unused weights
        self._of_one = [layers[0]]
        self._rows = rows
        for name, weights in layers[0].named_parameters():
            stack = torch.stack([layer.get_parameter(name).detach() for layer in layers])
            self.register_parameter(name, nn.Parameter(stack, weights.requires_grad))
        for name, _ in layers[0].named_buffers():
            self.register_buffer(name, torch.stack([layer.get_buffer(name) for layer in layers]))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map rows (sites * most, ...), each by the weights of its site."""
        return self.map_each_site(self._rows.split(inputs)).flatten(0, 1)

    def map_each_site(self, inputs: Tensor) -> Tensor:
        """Apply the layer to the rows of several sites at once, each site with its own weights.

        Args:
            inputs: (sites, most, ...), where ``most`` is the number of rows at the largest site.
                The sites are the first ones of the stack. Rows that pad a smaller site are mapped
                too.

        Returns:
            The outputs, (sites, most, ...).
        """

        def of_one(arrays: dict[str, Tensor], own: Tensor) -> Tensor:
            mapped: Tensor = functional_call(self._of_one[0], arrays, (own,))
            return mapped

        mapped: Tensor = torch.vmap(of_one)(self.current_arrays(), inputs)
        return mapped

    def current_arrays(self) -> dict[str, Tensor]:
        """Return the stacked arrays of the sites in the current batch: name -> (sites, ...).

        The arrays are the layer's weights and buffers. The batch has rows of the first sites of the
        stack, and ``rows.sizes`` has one entry for each of these sites. A change of the arrays in
        place reaches the stack.
        """
        sites = len(self._rows.sizes)
        current: dict[str, Tensor] = {}
        for arrays in (self._parameters, self._buffers):
            for name, array in arrays.items():
                if array is not None:
                    current[name] = array
                    if len(array) != sites:
                        current[name] = array[:sites]
        return current


class _Linear(_Layer):
    """A linear layer for several sites, as one batched product."""

    def map_each_site(self, inputs: Tensor) -> Tensor:
        """Apply each site's linear layer to the site's rows, all sites at once.

        Args:
            inputs: (sites, most, features), where ``most`` is the number of rows at the largest
                site. Inputs may have more dimensions, such as tokens, before the features.

        Returns:
            The outputs, (sites, most, outputs), with the same further dimensions.
        """
        # bmm takes exactly three dimensions; tokens have more
        if inputs.ndim > 3:
            return super().map_each_site(inputs)
        arrays = self.current_arrays()
        weight, bias = arrays["weight"].mT, arrays.get("bias")
        if bias is None:
            return torch.bmm(inputs, weight)
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight)


class _Norm(_Layer):
    """Batch norm with mean and variance over the rows of a site without its padding."""

    def map_each_site(self, inputs: Tensor) -> Tensor:
        """Apply batch norm to rows (sites, most, channels, ...), with each site's own statistics.

        A site with fewer than ``most`` rows is padded at the end. In training mode, a site's mean
        and variance are those of its real rows, and they update the running statistics. In eval
        mode, any running statistics are used.
        """
        layer, arrays, rows = self._of_one[0], self.current_arrays(), self._rows
        assert isinstance(layer, _BatchNorm)
        is_padded = min(rows.sizes) < max(rows.sizes)
        if not is_padded or not layer.training:
            return super().map_each_site(inputs)
        # (sites, most, channels, places): the mean of a channel is over rows and places
        places = inputs.unsqueeze(3)
        if inputs.ndim > 3:
            places = inputs.flatten(3)
        sizes = rows.counts_on(inputs.device)
        real = torch.arange(places.shape[1], device=inputs.device) < sizes[:, None]
        weights = real[:, :, None, None]
        count = (sizes * places.shape[3])[:, None]
        mean = (places * weights).sum((1, 3)) / count
        centred = places - mean[:, None, :, None]
        variance = (centred.square() * weights).sum((1, 3)) / count
        if layer.track_running_stats:
            with torch.no_grad():
                arrays["num_batches_tracked"].add_(1)
                factor: float | Tensor
                if layer.momentum is None:  # the running statistics are means over all batches
                    factor = 1 / arrays["num_batches_tracked"][:, None].to(mean.dtype)
                else:
                    factor = layer.momentum
                arrays["running_mean"].lerp_(mean, factor)
                # torch normalises by the biased variance but stores the unbiased one
                arrays["running_var"].lerp_(variance * count / (count - 1), factor)
        scale = (variance + layer.eps).rsqrt()
        if not layer.affine:
            return (centred * scale[:, None, :, None]).view_as(inputs)
        scale, shift = scale * arrays["weight"], arrays["bias"]
        return (centred * scale[:, None, :, None] + shift[:, None, :, None]).view_as(inputs)


class _Dropout(nn.Module):
    """Dropout whose masks come from each site's own generator.

    A site that trains by itself on the same device draws the same masks, because torch's own
    dropout draws them here too.
    """

    def __init__(self, rate: float, rows: Rows) -> None:
        super().__init__()
        self._rate, self._rows = rate, rows

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop elements of rows (sites * most, ...) with a mask drawn from each site's generator.

        Kept elements are divided by the rate at which they are kept. A site with fewer than
        ``most`` rows is padded at its end, and the padding becomes 0. In eval mode the rows are
        returned unchanged.
        """
        if not self.training:
            return inputs
        kept, states = [], self._rows.states
        # Torch's dropout reads only this generator. Its state is in memory of the CPU, so that
        # exchanging it makes no GPU wait
        shared = default_generator(inputs.device)
        before = shared.get_state()
        # Finished sites are not in ``sizes`` any more, but keep their state
        for number, size in enumerate(self._rows.sizes):
            shared.set_state(states[number])
            kept.append(nn.functional.dropout(inputs.new_ones(size, *inputs.shape[1:]), self._rate))
            states[number] = shared.get_state()
        shared.set_state(before)
        return inputs * pad_sequence(kept, batch_first=True).flatten(0, 1)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of ``device`` from which torch's functions draw by default."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _stack(layers: Sequence[nn.Module], rows: Rows) -> _Layer:
    """Join the corresponding layers of several sites' networks to compute all sites at once.

    A batch norm becomes a ``_Norm``, and an exact ``nn.Linear`` a ``_Linear``. Any other layer
    becomes a ``_Layer``. ``rows`` tells how many rows of a batch each site has.
    """
    if isinstance(layers[0], _BatchNorm):
        return _Norm(layers, rows)
    if type(layers[0]) is nn.Linear:  # a subclass may compute something else
        return _Linear(layers, rows)
    return _Layer(layers, rows)
