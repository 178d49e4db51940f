"""Malicious weights: a network whose ordinary answer holds rows, and how they are read from it.

All are of the project's ``mlp`` (GELU) and one step over a whole batch. A hidden unit is a sharp
threshold along a direction: its change is the sum of g x over the rows x beyond it, that of its
bias the sum of g, so that a sum, or a difference of two, over one row alone gives the row exactly.

- ``trap`` (Boenisch et al. 2023): directions of each unit's own, thresholds that one row passes.
- ``bins`` (Fowl et al. 2022): one direction, rising thresholds; differences of neighbours.
- ``pairs``: two units of one direction, thresholds in the middle, one row between them.
- ``left-out``: thresholds that all rows but one pass, in a network whose gradient over all rows
  has been trained to 0: the change is that of the one row, although all others stand behind it.

With ``copies`` so many units watch one threshold, which the attacker has found by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.seeding import generator
from fedsilo.models.networks.site_network import SiteNetwork

ATTACKS = ("trap", "bins", "pairs", "left-out")
REPEATED = ("pairs", "left-out")  # those that gain by copies
LAYER = "encoder.layers.0"
_SHARP = 1e3  # how sharply a unit turns on, per standard deviation
_FAINT = 1e-9  # the units' weight in the logits, over _SHARP: they hardly move the probabilities
SHARP_RATE = 1e17  # the learning rate with which such small changes outgrow float32's rounding
_STEEP = 2e4  # a hyperplane that an epoch's steps hardly move
_LINEAR = 50.0  # so far up GELU is the identity
_QUIET = 1e9  # the regression's unit is so large that its own change is small


@dataclass(frozen=True)
class Attack:
    """One attack: its name, how many units watch the same threshold, and its random numbers."""

    name: str
    copies: int = 1
    seed: int = 0

    def plant(self, network: SiteNetwork, known: Tensor, count: int, fitted: Tensor) -> None:
        """Put the weights into ``network``.

        ``known`` (m, features) are rows of the attacker's own, by which thresholds are set for a
        batch of ``count``; with copies they are the batch's. ``fitted`` (features + 1,) is a
        logistic regression, which ``left-out`` needs.
        """
        weights, bias = network.get_submodule(LAYER).parameters()
        out, out_bias = network.get_submodule("head.1").parameters()
        directions, thresholds = self._thresholds(len(weights), known, count)
        with torch.no_grad():
            weights.copy_(directions * _SHARP)
            bias.copy_(-thresholds * _SHARP)
            out.copy_(torch.tensor([[1.0], [-1.0]]) * _FAINT / _SHARP)
            out_bias.zero_()
            if self.name == "left-out":  # the last unit is the regression
                weights[-1], bias[-1] = fitted[:-1] * _QUIET, (fitted[-1] + _LINEAR) * _QUIET
                out[:, -1] = torch.tensor([0.0, 1 / _QUIET])
                out_bias[1] = -_LINEAR

    def _thresholds(self, units: int, known: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return each unit's direction (units, features) and threshold (units,)."""
        rng = generator(self.seed, self.name)
        groups = 1 if self.name == "bins" else units // (self.copies * self._together)
        directions = torch.randn(groups, known.shape[1], generator=rng)
        directions /= directions.norm(dim=1, keepdim=True)
        directions = directions.repeat_interleave(-(-units // groups), 0)[:units]
        levels = {
            "trap": torch.full((units,), 1 - 1 / count),
            "bins": torch.arange(1, units + 1) / (units + 1),
            "pairs": 0.5 + (torch.arange(units) % 2) / count,
            "left-out": torch.full((units,), 1 / count),
        }[self.name]
        if self.copies > 1:  # halfway between the batch's rows
            middle = len(known) // 2 if self.name == "pairs" else 0
            levels = (middle + 0.5 + torch.arange(units) % self._together) / (len(known) - 1)
        ordered = (directions @ known.T).sort(dim=1).values  # (units, m)
        place = levels * (len(known) - 1)
        low = place.long().clamp(max=len(known) - 2)[:, None]
        below, above = ordered.gather(1, low), ordered.gather(1, low + 1)
        return directions, (below + (above - below) * (place[:, None] - low)).squeeze(1)

    @property
    def _together(self) -> int:
        return 2 if self.name == "pairs" else 1

    def read(self, changes: Tensor) -> Tensor:
        """Return the rows (candidates, features) in the hidden layer's ``changes``."""
        if self.name == "left-out":
            changes = changes[:-1]
        size = self.copies * self._together
        grouped = changes[: len(changes) // size * size].unflatten(
            0, (-1, self.copies, self._together)
        )
        averaged = grouped.mean(1).flatten(0, 1)
        if self.name == "bins":
            averaged = averaged.diff(dim=0)
        if self.name == "pairs":
            averaged = averaged[0::2] - averaged[1::2]
        rows = averaged[:, :-1] / averaged[:, -1:]
        return rows[rows.isfinite().all(1)]


def regression(split: Split, steps: int = 60) -> Tensor:
    """Return a logistic regression (features + 1,) of the second class, to a gradient of 0.

    The server reaches it by asking the hospital alone for rounds of ``logistic``.
    """
    rows = torch.cat([split.inputs, torch.ones(len(split), 1)], 1).double()
    wanted = split.labels.double()
    weights = torch.zeros(rows.shape[1], dtype=torch.float64)
    for _ in range(steps):  # Newton; a trace of ridge keeps columns that never vary
        p = (rows @ weights).sigmoid()
        curvature = (rows * (p * (1 - p))[:, None]).T @ rows + 1e-9 * torch.eye(len(weights))
        weights -= torch.linalg.solve(curvature, rows.T @ (p - wanted))
    return weights.float()


def hyperplane_network(network: SiteNetwork, direction: Tensor, threshold: float) -> None:
    """Put one hyperplane into a ``logistic`` network: rows on their class's side add nothing."""
    with torch.no_grad():
        weights, bias = network.get_submodule("head.1").parameters()
        weights.copy_(torch.stack([-direction, direction]) * _STEEP)
        bias.copy_(torch.tensor([threshold, -threshold]) * _STEEP)
