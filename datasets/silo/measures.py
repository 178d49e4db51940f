"""What a survey counts of a silo: a number or a level of each sample, with the declared edges.

Edges and levels are declared by the data set, never by who asks: whoever could choose them could
close them around one patient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Values = npt.NDArray[np.float64]

_NUMBERS = 2**20  # pixels at once: 8 MB of each copy, however large an image is
_TENTHS = tuple(round(0.1 * step, 1) for step in range(1, 10))
_TWENTIETHS = tuple(round(0.05 * step, 2) for step in range(1, 9))
_COLOURS = ("red", "green", "blue")


@dataclass(frozen=True)
class Measure:
    """A feature of all samples of a site.

    Attributes:
        name: the feature's.
        values: per split one number a sample, NaN where it has none; of ``levels`` their places.
        edges: rising; empty: no histogram can be made.
        levels: instead of edges.
        may_lack: whether a sample can be without a value, by the data set's own rules.
    """

    name: str
    values: Mapping[str, Values]
    edges: tuple[float, ...] = ()
    levels: tuple[str, ...] = ()
    may_lack: bool = False

    @property
    def counted(self) -> bool:
        """Whether it has a histogram."""
        return bool(self.levels or self.edges)

    def counts(self, split: str) -> list[int]:
        """Return the histogram of a split, where one can lack at last those without a value."""
        values = self.values[split]
        known = values[~np.isnan(values)]
        edges = np.array(self.edges)
        places = known.astype(np.int64) if self.levels else np.searchsorted(edges, known, "right")
        cells = len(self.levels) or len(self.edges) + 1
        counts = [int(count) for count in np.bincount(places, minlength=cells)]
        return [*counts, len(values) - len(known)] if self.may_lack else counts


@dataclass(frozen=True)
class LeftOutRows:
    """Samples of no split: their number and, of a table, those without a value by column."""

    count: int
    missing: Mapping[str, int] = field(default_factory=dict)


def picture_measures(
    pictures: Mapping[str, Tensor], to_unit: Callable[[Tensor], Tensor]
) -> list[Measure]:
    """Return brightness and contrast of each image, of colour images the mean of each channel too.

    Args:
        pictures: per split (n, channels, height, width).
        to_unit: makes of a batch numbers from 0 (black) to 1 (white).
    """
    splits = {name: _picture_figures(inputs, to_unit) for name, inputs in pictures.items()}
    channels = pictures["train"].shape[1]
    named = ["brightness", "contrast", *(_COLOURS if channels == len(_COLOURS) else ())]
    return [
        Measure(
            name,
            {split: figures[:, place] for split, figures in splits.items()},
            _TWENTIETHS if name == "contrast" else _TENTHS,
        )
        for place, name in enumerate(named)
    ]


def unit_pixels(batch: Tensor) -> Tensor:
    """Return 8-bit images, or radiographs of 16 bits less 32768, from 0 to 1."""
    import torch

    if batch.dtype == torch.uint8:
        return batch.double().div_(255)
    if batch.dtype == torch.int16:
        return batch.double().add_(32768).div_(65535)
    return batch.double()


def _picture_figures(inputs: Tensor, to_unit: Callable[[Tensor], Tensor]) -> npt.NDArray[Any]:
    """Return mean, standard deviation and channels' means of each image."""
    import torch

    parts = [np.empty((0, 2 + len(_COLOURS)))]
    at_once = _NUMBERS // max(1, math.prod(inputs.shape[1:]))
    for start in range(0, len(inputs), max(1, at_once)):
        if at_once:
            pixels = to_unit(inputs[start : start + at_once])
            means, whole = pixels.flatten(2).mean(dim=2), pixels.flatten(1)
            mean, deviation = whole.mean(dim=1), whole.std(dim=1, correction=0)
        else:
            mean, deviation, means = _figures_by_rows(inputs[start : start + 1], to_unit)
        figures = torch.zeros(len(means), 2 + len(_COLOURS), dtype=torch.float64)
        figures[:, 0], figures[:, 1] = mean, deviation
        channels = min(means.shape[1], len(_COLOURS))
        figures[:, 2 : 2 + channels] = means[:, :channels]
        parts.append(figures.numpy())
    return np.concatenate(parts)


def _figures_by_rows(
    image: Tensor, to_unit: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, standard deviation and channels' means of one large image (1, channels, h, w).

    Some rows at a time, whose figures are joined by Chan et al. 1979.
    """
    import torch

    rows = max(1, _NUMBERS // (image.shape[1] * image.shape[3]))
    count, mean, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    sums = torch.zeros(1, image.shape[1], dtype=torch.float64)
    for start in range(0, image.shape[2], rows):
        pixels = to_unit(image[:, :, start : start + rows])
        sums += pixels.flatten(2).sum(dim=2)
        whole = pixels.flatten(1)
        apart, more = whole.mean(dim=1) - mean, whole.shape[1]
        squares = squares + whole.var(dim=1, correction=0) * more
        squares = squares + apart**2 * (count * more / (count + more))
        count, mean = count + more, mean + apart * (more / (count + more))
    return mean, (squares / count).sqrt(), sums / (image.shape[2] * image.shape[3])
