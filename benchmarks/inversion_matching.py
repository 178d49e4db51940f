"""Gradient inversion: samples whose gradient is what the hospital answered; weights are honest.

- ``cosine`` (Geiping et al. 2020): 1 - cosine similarity of the gradients, for images plus total
  variation, by Adam on the sign of its gradient. Labels are known to the attacker.
- ``l2`` (Zhu et al. 2019, labels known): squared distance of the gradients, by L-BFGS.
- ``analytic``: in a linear layer with a bias, each unit's weights over its bias; exact of one row.

The attacker knows how many samples there are, and takes training of several steps for one step
over all samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsilo.models.contract.seeding import generator
from fedsilo.models.networks.site_network import SiteNetwork

_FIRST_LINEAR = ("encoder.layers.0", "head.1")


@dataclass(frozen=True)
class Effort:
    """How hard the attacker tries: starts, of which the best match counts, and iterations."""

    starts: int
    iterations: int
    variation: float = 0.0  # weight of total variation


def gradient_rows(network: nn.Module, loss: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Return the gradient of ``loss`` by module, a unit a row, that can be differentiated again."""
    parameters = [list(network.get_submodule(name).parameters()) for name in names]
    flat = [parameter for group in parameters for parameter in group]
    grads = iter(torch.autograd.grad(loss, flat, create_graph=True))
    return {
        name: torch.cat([next(grads).reshape(len(group[0]), -1) for _ in group], dim=1)
        for name, group in zip(names, parameters, strict=True)
    }


def invert(
    network: SiteNetwork,
    told: dict[str, Tensor],
    labels: Tensor,
    shape: tuple[int, ...],
    attack: str,
    effort: Effort,
    seed: int,
) -> Tensor:
    """Return reconstructed samples (n, *shape) for ``told``, the mean gradient by module."""
    if attack == "analytic":
        name = next(name for name in _FIRST_LINEAR if name in told)
        rows = told[name][:, :-1] / told[name][:, -1:]
        return rows[rows.isfinite().all(1)]
    kind = torch.float32 if len(shape) > 1 else torch.float64
    model = copy.deepcopy(network).to(kind).train()
    there = {name: rows.abs().sum(1) > 0 for name, rows in told.items()}  # what a bound kept back
    target = torch.cat([rows[there[name]].flatten() for name, rows in told.items()]).to(kind)

    def mismatch(samples: Tensor) -> Tensor:
        rows = gradient_rows(model, model.loss(samples, labels), list(told))
        found = torch.cat([rows[name][there[name]].flatten() for name in told])
        if attack == "l2":
            return (found - target).square().sum() / target.square().sum()
        return 1 - torch.cosine_similarity(found, target, dim=0) + effort.variation * _tv(samples)

    best, least = torch.zeros(len(labels), *shape), float("inf")
    if not len(target):
        return best
    search = _by_lbfgs if attack == "l2" else _by_signs
    for start in range(effort.starts):
        rng = generator(seed, attack, start)
        samples = torch.randn(len(labels), *shape, generator=rng, dtype=kind).requires_grad_()
        search(samples, mismatch, effort.iterations)
        left = float(mismatch(samples).detach())
        if left < least:
            best, least = samples.detach(), left
    return best


def _tv(samples: Tensor) -> Tensor:
    if samples.ndim < 4:
        return torch.zeros((), dtype=samples.dtype)
    down, right = samples.diff(dim=2).abs().mean(), samples.diff(dim=3).abs().mean()
    return down + right


def _by_signs(samples: Tensor, mismatch: Callable[[Tensor], Tensor], iterations: int) -> None:
    """Search by Adam on signs, with the rate divided by 10 after 3/8, 5/8 and 7/8 of the way."""
    optimiser = torch.optim.Adam([samples], lr=0.1)
    stops = [iterations * eighths // 8 for eighths in (3, 5, 7)]
    rates = torch.optim.lr_scheduler.MultiStepLR(optimiser, stops, gamma=0.1)
    for _ in range(iterations):
        (samples.grad,) = torch.autograd.grad(mismatch(samples), samples)
        samples.grad.sign_()
        optimiser.step()
        rates.step()


def _by_lbfgs(samples: Tensor, mismatch: Callable[[Tensor], Tensor], iterations: int) -> None:
    optimiser = torch.optim.LBFGS(
        [samples],
        max_iter=iterations,
        history_size=30,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
    )

    def closure() -> Tensor:
        value = mismatch(samples)
        (samples.grad,) = torch.autograd.grad(value, samples)
        return value.detach()

    optimiser.step(closure)
