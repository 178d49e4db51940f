"""Histograms of a silo for a survey: a number or a level of each sample, with declared edges.

Edges and levels are declared by the data set, never by the server, which could close them around
one patient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Values = npt.NDArray[np.float64]

_NUMBERS = 2**20  # pixels at once: 8 MB, however large an image is
_TENTHS = tuple(round(0.1 * step, 1) for step in range(1, 10))
_TWENTIETHS = tuple(round(0.05 * step, 2) for step in range(1, 9))
_COLOURS = ("red", "green", "blue")


@dataclass(frozen=True)
class Measure:
    """A feature of all samples of a site.

    Attributes:
        name: the feature's.
        values: per split one number a sample, NaN where it has none; of ``levels`` their places.
        edges: rising; without edges and levels there is no histogram.
        levels: instead of edges.
        may_lack: whether a sample can be without a value, by the data set's own rules.
    """

    name: str
    values: Mapping[str, Values]
    edges: tuple[float, ...] = ()
    levels: Sequence[str] = ()
    may_lack: bool = False

    @property
    def has_histogram(self) -> bool:
        """Whether the feature has a histogram, because edges or levels are declared."""
        return bool(self.levels or self.edges)

    def counts(self, split: str) -> list[int]:
        """Return the histogram of a split; with ``may_lack`` a last cell counts missing values."""
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
    splits = {name: _pixel_statistics(inputs, to_unit) for name, inputs in pictures.items()}
    channels = pictures["train"].shape[1]
    named = ["brightness", "contrast", *(_COLOURS if channels == len(_COLOURS) else ())]
    return [
        Measure(
            name,
            {split: found[:, place] for split, found in splits.items()},
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


def _pixel_statistics(inputs: Tensor, to_unit: Callable[[Tensor], Tensor]) -> npt.NDArray[Any]:
    """Return mean, standard deviation and up to three channels' means of each image."""
    import torch

    count, channels, height, width = inputs.shape
    found = np.zeros((count, 2 + len(_COLOURS)))
    images = max(1, _NUMBERS // max(1, channels * height * width))
    rows = max(1, _NUMBERS // max(1, channels * width))
    for first in range(0, count, images):
        sums, squares = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for top in range(0, height, rows):
            pixels = to_unit(inputs[first : first + images, :, top : top + rows]).double()
            sums = sums + pixels.sum(dim=(2, 3))
            squares = squares + pixels.square().sum(dim=(1, 2, 3))
        means = sums / (height * width)
        mean = means.mean(dim=1)
        variance = squares / (channels * height * width) - mean.square()
        shown = means[:, : len(_COLOURS)]
        columns = [mean[:, None], variance.clamp(min=0).sqrt()[:, None], shown]
        found[first : first + images, : 2 + shown.shape[1]] = torch.cat(columns, dim=1).numpy()
    return found
