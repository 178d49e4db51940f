"""Histograms that a silo reports in a survey: one number or level per sample, in declared bins.

The data set declares the bin edges and levels, never the server, because a server could close its
edges around a single patient.
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
    """One feature of all samples at a site, with the bins for its histogram.

    Attributes:
        name: the feature's name.
        values: split -> one number per sample, (n,): the value, or with ``levels`` the level's
            index; NaN if the sample has no value.
        edges: rising bin edges; a value equal to an edge falls into the bin above it.
        levels: the names of a categorical feature's levels; excludes ``edges``. Without edges and
            levels there is no histogram.
        may_lack: whether the data set's own rules allow a sample without a value.
    """

    name: str
    values: Mapping[str, Values]
    edges: tuple[float, ...] = ()
    levels: Sequence[str] = ()
    may_lack: bool = False

    @property
    def has_histogram(self) -> bool:
        """Whether edges or levels are declared, so that the feature has a histogram."""
        return bool(self.levels or self.edges)

    def counts(self, split: str) -> list[int]:
        """Count the samples of a split in each bin of the feature's histogram.

        If the feature is categorical, each of its levels is a bin. Otherwise ``edges`` separate the
        bins: the first bin is for values below the first edge, and the last for values from the
        last edge on.

        Returns:
            One count per bin. If ``may_lack`` is true, the count of missing values follows.
            Otherwise missing values are not counted.
        """
        values = self.values[split]
        known = values[~np.isnan(values)]
        if self.levels:
            cells = len(self.levels)
            places = known.astype(np.int64)
        else:
            cells = len(self.edges) + 1
            # "right" puts a value that equals an edge into the cell above it
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
    """The number of samples that are in no split and, for a table, a number per column.

    A left-out row counts under each column whose value is missing or, if the schema drops such
    rows, outside the column's range.
    """

    count: int
    missing: Mapping[str, int] = field(default_factory=dict)


def picture_measures(
    pictures: Mapping[str, Tensor], to_unit: Callable[[Tensor], Tensor]
) -> list[Measure]:
    """Compute each image's brightness (mean pixel) and contrast (standard deviation of its pixels).

    Colour images also get the means of their red, green and blue channels.

    Args:
        pictures: split -> images (n, channels, height, width). The split 'train' is required,
            because it tells whether the images have colours.
        to_unit: converts a batch of stored pixels to numbers from 0 (black) to 1 (white).

    Returns:
        One ``Measure`` per statistic: the values of each split, and bin edges for a histogram. The
        edges of contrast are 0.05, 0.1, ... 0.4. The edges of other statistics are 0.1, 0.2, ...
        0.9.
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
    """Convert stored pixels of any shape to float64, with black as 0 and white as 1.

    - uint8 is converted from 0..255.
    - int16 is converted from -32768..32767.
    - Other types must already be in 0..1, and are not scaled.
    """
    import torch

    if batch.dtype == torch.uint8:
        return batch.double().div_(255)
    if batch.dtype == torch.int16:
        return batch.double().add_(32768).div_(65535)
    return batch.double()


def _pixel_statistics(inputs: Tensor, to_unit: Callable[[Tensor], Tensor]) -> npt.NDArray[Any]:
    """Compute five statistics of each image: mean, standard deviation and three channel means.

    Mean and standard deviation cover all channels. The mean of a channel that the images do not
    have is 0. Large images are converted in strips, which limits the memory. ``to_unit`` converts
    stored pixels to 0..1.

    Returns:
        An array (n, 5): mean, standard deviation, and the means of channels 1 to 3.
    """
    import torch

    count, channels, height, width = inputs.shape
    statistics = np.zeros((count, 2 + len(_COLOURS)))
    # As many images at once as fit into 8 MB; of one larger image, as many rows
    images = max(1, _NUMBERS // max(1, channels * height * width))
    rows = max(1, _NUMBERS // max(1, channels * width))
    for first in range(0, count, images):
        # The first addition broadcasts sums to (images, channels), and squares to (images,)
        sums = torch.zeros(1, dtype=torch.float64)
        squares = torch.zeros(1, dtype=torch.float64)
        for top in range(0, height, rows):
            pixels = to_unit(inputs[first : first + images, :, top : top + rows]).double()
            sums = sums + pixels.sum(dim=(2, 3))
            squares = squares + pixels.square().sum(dim=(1, 2, 3))
        means = sums / (height * width)
        mean = means.mean(dim=1)
        # Channels have equally many pixels, so the mean of their means is that of all pixels
        variance = squares / (channels * height * width) - mean.square()
        shown = means[:, : len(_COLOURS)]
        # Rounding may leave a variance slightly below 0
        columns = [mean[:, None], variance.clamp(min=0).sqrt()[:, None], shown]
        statistics[first : first + images, : 2 + shown.shape[1]] = torch.cat(columns, 1).numpy()
    return statistics
