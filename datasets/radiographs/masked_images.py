"""Load images with a mask each, for segmentation.

The labels of a masked silo are its masks (n, h, w) uint8: 0 for background, 1 for a catheter or
guidewire. It is split like the labelled silo of the same settings, so that no training image of one
task is a test image of the other. It comes from an ``ImageDataSet`` whose images have the mask as
their last channel.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import CLASSIFICATION, SEGMENTATION
from fedsilo.datasets.registry import DATA_SETS, data_set
from fedsilo.datasets.silo.silos import DataSet, Silo, Split
from fedsilo.models.networks.kinds import NetworkShape

MASK_CLASSES = ("background", "catheter")


class MaskedDataSet(DataSet):
    """A data set in which some or all images have masks, and each image has a class too."""

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION, SEGMENTATION)

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the silo ``name`` with the labels that the run's task needs.

        For segmentation only images with masks are loaded, and the masks are the labels. For
        classification all images are loaded, and their classes are the labels.

        Raises:
            DataError: the silo cannot be loaded, or its masks are unusable.
        """
        if settings.task == SEGMENTATION:
            return self.load_masked(name, settings, places)
        return self.load_arrays(name, settings, places)

    def load_arrays(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the silo ``name`` as it is cached, whatever the task; see ``DataSet.load``."""
        return super().load(name, settings, places)

    @abstractmethod
    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the images of silo ``name`` that have masks, with the masks as labels.

        Raises:
            DataError: no silo has this name, none of its images has a mask, or a mask is unusable.
        """


def load_masked_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Load the silo ``name`` of the run's data set for segmentation, with masks as labels.

    Args:
        name: the silo's name.
        settings: the run's settings.
        places: the data directory and the cache directory. If it is None, the settings decide.

    Raises:
        DataError: the data set has no masks, no silo has this name, or a file is unusable.
        SettingError: the data set does not exist.
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
    """Return the names of fedsilo's data sets that have masks, in alphabetical order."""
    return sorted(name for name in DATA_SETS if isinstance(data_set(name), MaskedDataSet))


def masked_silo(silo: Silo) -> Silo:
    """Make a segmentation silo from a silo whose images have a mask (0 or 1) as their last channel.

    The masks become the labels, (n, height, width), and are removed from the inputs. The classes
    become "background" and "catheter". ``silo`` itself is not changed.
    """
    split = split_masks(silo)
    shape = NetworkShape(split.shape.input_shape, len(MASK_CLASSES))
    return replace(split, shape=shape, classes=MASK_CLASSES)


def split_masks(silo: Silo) -> Silo:
    """Make a segmentation silo from a silo whose images have a mask as their last channel.

    A mask has the class index of each pixel. The masks become the labels, (n, height, width), and
    are removed from the inputs. No data are copied. The classes stay the same, because they already
    name the classes of pixels. ``silo`` itself is not changed.
    """
    # The mask is not an input of the network, so the shape has one channel less
    channels, *size = silo.shape.input_shape
    input_shape = (channels - 1, *size)
    return replace(
        silo,
        train=_split_masks(silo.train, input_shape),
        val=_split_masks(silo.val, input_shape),
        test=_split_masks(silo.test, input_shape),
        shape=NetworkShape(input_shape, silo.shape.outputs),
        task=SEGMENTATION,
    )


def _split_masks(split: Split, input_shape: tuple[int, ...]) -> Split:
    """Take the last channel of a split's inputs as the labels, without copying any data.

    Inputs and labels of the result are views of the same tensor. Only an empty split needs
    ``input_shape``, the shape of an image without the mask. Its inputs get the shape (0,
    *input_shape).
    """
    if len(split) == 0:
        inputs = split.inputs.new_zeros((0, *input_shape))
        return Split(inputs, split.inputs.new_zeros((0, *input_shape[1:])))
    return Split(split.inputs[:, :-1], split.inputs[:, -1])
