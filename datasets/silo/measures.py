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
        if self.levels:
            cells = len(self.levels)
            places = known.astype(np.int64)
        else:
            cells = len(self.edges) + 1
            places = np.searchsorted(np.array(self.edges), known, "right")
        counts: list[int] = np.bincount(places, minlength=cells).tolist()
        if self.may_lack:
            counts.append(len(values) - len(known))
        return counts


@dataclass(frozen=True)
class ColumnWords:
    """The words for people that a schema has for a column.

    Attributes:
        title: what the column is, with its name and unit: "serum cholesterol (chol, mg/dl)".
        levels: level -> its name, with the level itself: "typical angina (1)".
    """

    title: str
    levels: Mapping[str, str] = field(default_factory=dict)

    def level(self, level: str) -> str:
        """Return the name of a level, or the level itself if it has none."""
        return self.levels.get(level, level)


@dataclass(frozen=True)
class LeftOutRows:
    """Samples of no split: their number and, for a table, the number per column.

    A row counts under a column if its value there is missing or out of the schema's range.
    """

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
    statistics = {}
    for split, inputs in pictures.items():
        statistics[split] = _pixel_statistics(inputs, to_unit)
    edges = {"brightness": _TENTHS, "contrast": _TWENTIETHS}
    if pictures["train"].shape[1] == len(_COLOURS):
        edges |= dict.fromkeys(_COLOURS, _TENTHS)
    measures = []
    for column, name in enumerate(edges):
        values = {split: of_split[:, column] for split, of_split in statistics.items()}
        measures.append(Measure(name, values, edges[name]))
    return measures


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
    statistics = np.zeros((count, 2 + len(_COLOURS)))
    # As many images at once as fit into 8 MB; of one larger image, as many rows
    images = max(1, _NUMBERS // max(1, channels * height * width))
    rows = max(1, _NUMBERS // max(1, channels * width))
    for first in range(0, count, images):
        sums = torch.zeros(1, dtype=torch.float64)
        squares = torch.zeros(1, dtype=torch.float64)
        for top in range(0, height, rows):
            pixels = to_unit(inputs[first : first + images, :, top : top + rows]).double()
            sums = sums + pixels.sum(dim=(2, 3))
            squares = squares + pixels.square().sum(dim=(1, 2, 3))
        means = sums / (height * width)
        mean = means.mean(dim=1)
        variance = squares / (channels * height * width) - mean.square()
        shown = means[:, : len(_COLOURS)]
        # Rounding may leave a variance slightly below 0
        columns = [mean[:, None], variance.clamp(min=0).sqrt()[:, None], shown]
        statistics[first : first + images, : 2 + shown.shape[1]] = torch.cat(columns, 1).numpy()
    return statistics
