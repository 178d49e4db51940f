"""What painted pictures are made of: coordinates, smooth noise and soft edges."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Field = npt.NDArray[Any]  # float32 (size, size), or (3, size, size) for colours


@lru_cache(maxsize=4)
def grid(size: int) -> tuple[Field, Field, Field]:
    """Return x, y (from -1 to 1) and the distance from the centre squared, each (size, size)."""
    line = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    y, x = np.meshgrid(line, line, indexing="ij")
    return x, y, x * x + y * y


@lru_cache(maxsize=32)
def spline(size: int, knots: int) -> Field:
    """Return (size, knots + 3): cubic B-splines over the image's side."""
    place = (np.arange(size) + 0.5) / size * knots
    away = np.abs(place[:, None] - (np.arange(knots + 3) - 1))
    near = 2 / 3 - away**2 + away**3 / 2
    far = (2 - away).clip(0) ** 3 / 6
    return np.where(away < 1, near, far).astype(np.float32)


def noise(rng: np.random.Generator, size: int, knots: int, across: int = 0) -> Field:
    """Return a smooth random field (size, size), about of unit variance.

    Args:
        rng: draws it.
        size: pixels of a side.
        knots: waves from top to bottom.
        across: waves from left to right; 0: as many.
    """
    down, along = spline(size, knots), spline(size, across or knots)
    values = rng.standard_normal((down.shape[1], along.shape[1]), dtype=np.float32)
    smooth: Field = 2 * (down @ values @ along.T)
    return smooth


def falling(excess: Field, slope: float) -> Field:
    """Return a weight that falls from 1 to 0 as ``excess`` rises through 0."""
    weight: Field = 1 / (1 + np.exp((excess * slope).clip(-30, 30)))
    return weight
