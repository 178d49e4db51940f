"""Read masks of classes: image files whose pixel values stand for classes, declared by value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.one_line import join_names
from fedsilo.datasets.images.decoding import BrokenImageError, opened_image

# Formats without loss: JPEG would blur the values at the edges of a class
FORMATS = ("PNG", "TIFF", "BMP", "GIF")
LARGEST_VALUE = 65535
MOST_CLASSES = 255
_UNKNOWN = 255

ClassMask = npt.NDArray[np.uint8]
# Value of a pixel in a file -> its class; ``_UNKNOWN`` for a value that is not declared
ValueTable = npt.NDArray[np.uint8]


def value_table(classes: Mapping[str, Sequence[str]]) -> ValueTable:
    """Build a table (65536,) that maps the value of a pixel in a mask to the index of its class.

    The entry is 255 for a value that no class declares. If two classes declare a value, the later
    class counts.

    Args:
        classes: class -> its pixel values, whole numbers from 0 to 65535 as strings. The index of a
            class is its position in this mapping. The first class is the background.
    """
    table = np.full(LARGEST_VALUE + 1, _UNKNOWN, dtype=np.uint8)
    for number, values in enumerate(classes.values()):
        table[[int(value) for value in values]] = number
    return table


def read_class_mask(path: Path, height: int, width: int, table: ValueTable) -> ClassMask:
    """Read a mask file as the class index of each pixel, uint8 (height, width).

    The stored value of a pixel decides its class. With a palette, this is the index into the
    palette. With one bit per pixel it is 0 or 1. An alpha channel is ignored. An image with colour
    channels is accepted only if they are equal at each pixel.

    Args:
        path: the file, in one of ``FORMATS``.
        height: the height of the image that the mask belongs to, in pixels.
        width: the width of that image.
        table: the class of each value (``value_table``).

    Raises:
        BrokenImageError: the file cannot be read, has another size than its image, shows colours,
            or has a value that is not declared. The error's text begins with "has a mask that".
    """
    try:
        with opened_image(path, FORMATS) as image:
            # The header has the size, so a mask of another size is not decoded
            if image.size != (width, height):
                raise BrokenImageError(
                    f"has {image.width}x{image.height} pixels, but its image {width}x{height}"
                )
            values = _grey_values(np.asarray(image), np.array(image.getbands()))
        return _classes_of(values, table)
    except BrokenImageError as error:
        raise BrokenImageError(f"has a mask that {error}") from None


def _grey_values(pixels: npt.NDArray[Any], bands: npt.NDArray[np.str_]) -> npt.NDArray[np.int64]:
    """Reduce the pixels of a mask to one value each, (h, w) int64, without the alpha band.

    Args:
        pixels: (h, w), or (h, w, b) with b bands.
        bands: the names of the bands, such as 'R'. 'A' is the alpha band, and all others are
            colours.

    Raises:
        BrokenImageError: the colour channels of a pixel differ.
    """
    values = pixels
    if pixels.ndim == 3:
        colours = pixels[..., bands != "A"]
        values = colours[..., 0]
        if (colours != values[..., None]).any():
            raise BrokenImageError("is in colour: save each class as a grey value")
    return values.astype(np.int64)


def _classes_of(values: npt.NDArray[np.int64], table: ValueTable) -> ClassMask:
    """Look up the class of each value, as uint8 in an array of the same shape as ``values``.

    Raises:
        BrokenImageError: ``table`` has no class for a value. The error names the smallest such
            value.
    """
    inside = (values >= 0) & (values <= LARGEST_VALUE)
    classes = table[np.where(inside, values, 0)]
    unknown = ~inside | (classes == _UNKNOWN)
    if unknown.any():
        known = join_names(map(str, np.flatnonzero(table != _UNKNOWN).tolist()))
        raise BrokenImageError(
            f"has the value {values[unknown].min()}, but the declared values are {known}"
        )
    return classes
