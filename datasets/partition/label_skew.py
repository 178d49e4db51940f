"""How many of a label's samples each silo gets: by a Dirichlet sample, or by few labels a silo.

Equations:
  (Dirichlet) Hsu, Qi and Brown 2019, as Li et al. 2022 have it: of each label the silos' shares are
    one sample of a symmetric Dirichlet -> dirichlet_shares
  (labels) Li et al. 2022, #C = k: each silo holds k labels, whose samples its holders share evenly
    -> label_shares

Rows are shuffled by a seed; a silo's shares are the same in training, validation and test.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.partition.label_sets import Labels, Rows
from fedsilo.models.contract.errors import SettingError

Shares = npt.NDArray[np.float64]


def dirichlet_shares(
    classes: int, silos: int, concentration: float, rng: np.random.Generator
) -> Shares:
    """Return (classes, silos) shares of each label, 1 in all."""
    shares = rng.dirichlet(np.full(silos, concentration), classes)
    return np.nan_to_num(shares)  # a concentration near 0 leaves nothing to divide by


def label_shares(classes: int, silos: int, held: int, rng: np.random.Generator) -> Shares:
    """Return (classes, silos) shares of each label among its silos, each of which holds ``held``.

    Labels are dealt out in turn, so that holders of two labels differ by one silo at most.

    Raises:
        SettingError: silos cannot hold so many, or some label would be at none.
    """
    if held > classes or held * silos < classes:
        raise SettingError(
            f"setting 'labels-per-silo' is {held}, and {silos} silos share {classes} labels: it "
            f"must be {-(-classes // silos)} to {classes}"
        )
    order, holds = rng.permutation(classes), np.zeros((classes, silos))
    for silo in range(silos):
        holds[order[np.arange(silo * held, (silo + 1) * held) % classes], silo] = 1
    shares: Shares = holds / holds.sum(axis=1, keepdims=True)
    return shares


def dealt(
    labels: Mapping[str, Labels], shares: Shares, rng: np.random.Generator
) -> list[dict[str, Rows]]:
    """Return each silo's rows of the parts, ascending: of each label its share, at random."""
    silos = shares.shape[1]
    found: list[dict[str, Rows]] = [{} for _ in range(silos)]
    for part, of_part in labels.items():
        own: list[list[Rows]] = [[] for _ in range(silos)]
        for label, of_label in enumerate(shares):
            rows = rng.permutation(np.flatnonzero(of_part == label))
            edges = np.rint(np.cumsum(of_label) * len(rows)).astype(int)
            for silo, piece in enumerate(np.split(rows, edges[:-1])):
                own[silo].append(piece)
        for silo, pieces in enumerate(own):
            found[silo][part] = np.sort(np.concatenate(pieces)) if pieces else np.empty(0, np.int64)
    return found
