"""Images with a mask each, for segmentation: what a data set with masks gives, and how it is found.

A masked silo is cut and cached as the labelled one of the same settings is, so that no image of one
task's training part is in the other's test part. Its maker is an ``ImageDataSet`` whose images have
the mask as one more channel, the last.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsilo.datasets.io.locations import Places, find_places
from fedsilo.datasets.registry import DATA_SETS, data_set
from fedsilo.datasets.silo.silos import DataSet, Silo, Split
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.settings import CommonSettings

if TYPE_CHECKING:
    from torch import Tensor

MASK_CLASSES = ("background", "catheter")


@dataclass(frozen=True)
class MaskedSplit:
    """``inputs`` (n, channels, h, w) as ``Split``'s and ``masks`` (n, h, w) uint8; n may be 0.

    A mask is 0 on the background and 1 on a catheter or guidewire.
    """

    inputs: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.masks)


@dataclass(frozen=True)
class MaskedSilo:
    """What one hospital holds of images with masks.

    Attributes:
        name: the site's name.
        train, val, test: the splits; val and test may be empty.
        classes: the names of the masks' values, from 0.
    """

    name: str
    train: MaskedSplit
    val: MaskedSplit
    test: MaskedSplit
    classes: tuple[str, ...] = MASK_CLASSES

    def splits(self) -> dict[str, MaskedSplit]:
        """Return the splits by name."""
        return {"train": self.train, "val": self.val, "test": self.test}


class MaskedDataSet(DataSet):
    """A data set some of whose images have masks."""

    @abstractmethod
    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> MaskedSilo:
        """Return the images of silo ``name`` that have masks, from the cache or made now.

        Raises:
            DataError: there is no such silo, none of its images has a mask, or one is unusable.
        """


def load_masked_silo(
    name: str, settings: CommonSettings, places: Places | None = None
) -> MaskedSilo:
    """Return the masked silo ``name`` of the settings' data set.

    Raises:
        DataError: the data set has no masks, there is no such silo, or a file is unusable.
    """
    data = data_set(settings.dataset)
    if not isinstance(data, MaskedDataSet):
        raise DataError(
            f"data set '{settings.dataset}' has no masks: take one of "
            f"{', '.join(masked_data_sets())}"
        )
    places = places or find_places(settings.data_dir, settings.cache_dir)
    return data.load_masked(name, settings, places)


def masked_data_sets() -> list[str]:
    """Return the names of the data sets that have masks, sorted."""
    return sorted(name for name in DATA_SETS if isinstance(data_set(name), MaskedDataSet))


def masked_silo(silo: Silo) -> MaskedSilo:
    """Return a silo of 8-bit images whose last channel is the mask, 0 or 1, as a masked one."""
    train, val, test = (_parted(split) for split in (silo.train, silo.val, silo.test))
    return MaskedSilo(silo.name, train, val, test)


def _parted(split: Split) -> MaskedSplit:
    return MaskedSplit(split.inputs[:, :-1], split.inputs[:, -1])  # views of the mapped file
