"""Images with a mask each, for segmentation: what a data set with masks gives, and how it is found.

A masked silo's labels are its masks (n, h, w) uint8: 0 on the background, 1 on a catheter or
guidewire. It is cut and cached as the labelled one of the same settings is, so that no image of one
task's training part is in the other's test part. Its maker is an ``ImageDataSet`` whose images have
the mask as one more channel, the last.
"""

from abc import abstractmethod
from dataclasses import replace

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import DATA_SETS, data_set
from fedsilo.datasets.silo.silos import DataSet, Silo, Split
from fedsilo.models.networks.kinds import Task

MASK_CLASSES = ("background", "catheter")


class MaskedDataSet(DataSet):
    """A data set some of whose images have masks."""

    @abstractmethod
    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Return the images of silo ``name`` that have masks, from the cache or made now.

        Raises:
            DataError: there is no such silo, none of its images has a mask, or one is unusable.
        """


def load_masked_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
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


def masked_silo(silo: Silo) -> Silo:
    """Return a silo of 8-bit images whose last channel is the mask, 0 or 1, as a masked one."""
    channels, *size = silo.task.input_shape
    return replace(
        silo,
        train=_split_masks(silo.train),
        val=_split_masks(silo.val),
        test=_split_masks(silo.test),
        task=Task((channels - 1, *size), len(MASK_CLASSES)),
        classes=MASK_CLASSES,
    )


def _split_masks(split: Split) -> Split:
    """Make the last channel of images the labels; both are views of the mapped file."""
    return Split(split.inputs[:, :-1], split.inputs[:, -1])
