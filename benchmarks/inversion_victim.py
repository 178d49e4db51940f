"""The hospital of ``inversion.py``: its data, one answer of the app's own training, and its bounds.

An answer is what training has changed, per unit of learning rate: of one step of plain SGD the
gradient. A unit is a row of a linear layer with its bias, a filter, or a channel of batch norm.
The bounds of a real site are modelled here as functions of that answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import train_locally
from fedsilo.client_app.training.standardised import with_figures
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.seeding import generator
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.maths.standardisation import pooled_statistics, sums_of
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import SiteNetwork

# Dropout would only hinder the attacker, who does not know its masks
_COMMON = {"method": "fedavg", "dropout": 0.0, "mc-passes": 0, "optimiser": "sgd", "device": "cpu"}
_HONEST = {"optimiser": "adam", "learning-rate": 0.01, "local-epochs": 1, "batch-size": 16}
_UNITS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d)


def settings_of(values: Mapping[str, Any]) -> CommonSettings:
    """Return the run's settings, ``values`` over those that all parts of the benchmark share."""
    return build(CommonSettings, {**_COMMON, **values})


@dataclass(frozen=True)
class Hospitals:
    """Training splits by hospital as networks take them, and what they are; the first is robbed."""

    splits: dict[str, Split]
    task: Task

    @property
    def victim(self) -> Split:
        """The training split of the hospital that is attacked."""
        return next(iter(self.splits.values()))

    @property
    def others(self) -> Split:
        """What the attacker has of the same kind: the next hospital's samples."""
        return list(self.splits.values())[1]


def open_heart(data: Path, cache: Path) -> Hospitals:
    """Return Hungary and the three others, standardised by figures pooled over all four."""
    settings = settings_of({"dataset": "heart", "data-dir": str(data), "cache-dir": str(cache)})
    silos = [load_silo(name, settings) for name in silo_names(settings)]
    figures = pooled_statistics([sums_of(silo.train.inputs) for silo in silos])
    ready = {silo.name: with_figures(silo, figures).train for silo in silos}
    order = sorted(ready, key=lambda name: (name != "hungary", -len(ready[name])))
    return Hospitals({name: ready[name] for name in order}, silos[0].task)


def open_mnist(data: Path, cache: Path) -> Hospitals:
    """Return three silos of MNIST that are not rotated, 28 x 28, standardised as for training."""
    settings = settings_of({"dataset": "mnist", "data-dir": str(data), "cache-dir": str(cache)})
    silos = [load_silo(name, settings) for name in silo_names(settings)[:3]]
    return Hospitals({silo.name: silo.train for silo in silos}, silos[0].task)


def trained_network(
    hospitals: Hospitals, settings: CommonSettings, rounds: int, most: int = 600
) -> SiteNetwork:
    """Return the network as it starts from the seed, after ``rounds`` of FedAvg over hospitals."""
    network = build_classifier(settings, hospitals.task)
    honest = replace(settings, **{key.replace("-", "_"): v for key, v in _HONEST.items()})
    compute = choose_compute("cpu", "fp32", 1)
    for round_ in range(rounds):
        total: dict[str, Tensor] = {}
        for name, split in hospitals.splits.items():
            local = copy.deepcopy(network)
            part = Split(split.inputs[:most], split.labels[:most])
            train_locally(local, part, honest, compute, (round_, name))
            for key, array in exchanged_arrays(local).items():
                total[key] = total.get(key, 0) + array.double() / len(hospitals.splits)
        load_exchanged(network, {key: array.float() for key, array in total.items()})
    return network


def drawn(split: Split, count: int, *key: int | str) -> Split:
    """Return ``count`` samples of ``split``, drawn by ``key``; all of it if there are no more."""
    chosen = torch.randperm(len(split), generator=generator(0, *key))[:count]
    return Split(split.inputs[chosen], split.labels[chosen])


@dataclass(frozen=True)
class Answer:
    """What training has changed, and the samples behind each unit's change.

    Attributes:
        changes: by module, a unit a row (units, values): weights, then the bias.
        pulls: by module, (samples, units): the size of a sample's gradient at a unit's output.
        energies: by linear module, (units,): the sum over samples of the squared length of what
            each adds to the unit's change.
    """

    changes: dict[str, Tensor]
    pulls: dict[str, Tensor]
    energies: dict[str, Tensor]


@contextmanager
def _watched(network: nn.Module, seen: dict[str, list[tuple[Tensor, Tensor]]]) -> Iterator[None]:
    """Note in ``seen``, by module, the gradients at its outputs and its inputs, step by step."""

    def watch(name: str, module: nn.Module) -> list[Any]:
        entered: list[Tensor] = []

        def forward(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
            entered.append(inputs[0].detach())

        def backward(_: nn.Module, __: Any, outputs: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, []).append((outputs[0].detach(), entered.pop()))

        return [
            module.register_forward_hook(forward),
            module.register_full_backward_hook(backward),
        ]

    units = [(n, m) for n, m in network.named_modules() if isinstance(m, _UNITS)]
    handles = [handle for name, module in units for handle in watch(name, module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def answer(network: SiteNetwork, split: Split, settings: CommonSettings) -> Answer:
    """Return what a hospital answers that trains ``network`` on ``split`` as ``settings`` say."""
    local, seen = copy.deepcopy(network), {}
    with _watched(local, seen):
        compute = choose_compute("cpu", "fp32", 1)
        train_locally(local, split, settings, compute, (1, "site"))
    changes, pulls, energies = {}, {}, {}
    before = dict(network.named_modules())
    for name, steps in seen.items():
        module = local.get_submodule(name)
        changes[name] = _rows(before[name], module) / settings.learning_rate
        sizes = [
            grads.double().flatten(2).norm(dim=2) if grads.ndim > 2 else grads.double().abs()
            for grads, _ in steps
        ]
        pulls[name] = torch.cat(sizes)
        if isinstance(module, nn.Linear):
            lengths = torch.cat([x.double().square().sum(1) + 1 for _, x in steps])
            energies[name] = (pulls[name].square() * lengths[:, None]).sum(0)
    return Answer(changes, pulls, energies)


def _rows(before: nn.Module, after: nn.Module) -> Tensor:
    """Return what was taken from each unit of a module, (units, values), float64."""
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    parts = [
        (old[n].double() - new[n].double()).detach().flatten(1)
        if old[n].ndim > 1
        else (old[n].double() - new[n].double()).detach()[:, None]
        for n in ("weight", "bias")
        if n in old
    ]
    return torch.cat(parts, dim=1)


def crowd(pulls: Tensor) -> Tensor:
    """Return how many samples effectively stand behind each unit: (sum |g|)^2 / sum g^2."""
    return pulls.sum(0).square() / pulls.square().sum(0).clamp_min(1e-300)


@dataclass(frozen=True)
class Bounds:
    """What a hospital does to an answer before it leaves.

    Attributes:
        least: a unit behind whose change fewer samples stand keeps its weights; 0: none does.
        blur: standard deviation of Gaussian noise on each value, in units of ``measure``; 0: none.
        measure: 'change', the root mean square of the unit's change; 'samples', in a linear layer,
            the root of the sum of squares of what each sample adds to it, per value: in that
            samples cannot cancel each other; 'both', the root of the sum of the two squares;
            'layer', the L2 norm of the layer's whole change, as in differential privacy when all
            else that leaves is small.
    """

    least: float = 0
    blur: float = 0
    measure: str = "change"

    def leaves(self, told: Answer, messages: int, rng: torch.Generator) -> dict[str, Tensor]:
        """Return the mean of what leaves in ``messages`` answers of the same weights."""
        kept = {
            name: change * (crowd(told.pulls[name]) >= self.least)[:, None]
            for name, change in told.changes.items()
        }
        out = {}
        for name, change in kept.items():
            scale = self._scale(told, name, change)
            noise = torch.randn(change.shape, generator=rng, dtype=change.dtype)
            sent = (change.abs().sum(1, keepdim=True) > 0).double()  # no noise on what stays
            out[name] = change + sent * noise * (self.blur / messages**0.5) * scale[:, None]
        return out

    def _scale(self, told: Answer, name: str, change: Tensor) -> Tensor:
        """Return each unit's ``measure`` (units,)."""
        if self.measure == "layer":
            return change.norm().expand(len(change))
        square = change.square().mean(1)
        if self.measure != "change" and name in told.energies:
            added = told.energies[name] / change.shape[1]
            square = added if self.measure == "samples" else square + added
        return square.sqrt()
