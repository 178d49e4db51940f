"""Decode radiographs of 8 to 16 bits to square pictures with one channel.

As in the Fed-Align-CL paper (section IV), empty rows and columns at the edges are cut off. The rest
is resized to the wanted height and padded on the right to a square.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.seeding import derive_seed
from fedsilo.datasets.images.decoding import BrokenImageError, opened_image
from fedsilo.datasets.radiographs.vendor_profiles import Grey, Profile

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "TIFF")
_DEPTHS = {"L": 8, "I;16": 16, "I;16B": 16, "I;16L": 16, "I": 16}  # Pillow's modes of grey
_EMPTY = 1 / 256  # pixels below this share of the span from darkest to brightest are air
_LEVELS = 65535  # the largest number of 16 bits
_INT16_ZERO = 32768
_PHOTOMETRIC = 262  # TIFF's tag that decides whether 0 is white


def read_grey(path: Path, bits: int) -> Grey:
    """Decode a grey PNG or TIFF to (height, width), float32, from 0 for black to 1 for white.

    The pixel values are divided by 2^bits - 1. In a TIFF whose value 0 means white, they are
    inverted.

    Args:
        path: the file.
        bits: the declared bits per pixel, 8 to 16.

    Raises:
        BrokenImageError: the file is missing or damaged, has several pages, is not grey, or does
            not fit ``bits``.
    """
    with opened_image(path, _FORMATS) as image:
        values, depth = _grey_values(image)
        white_is_zero = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
    top = check_depth(depth, int(values.max()), bits)
    # Pillow inverts files of 8 bits itself, but not files of 16
    if white_is_zero and depth > 8:
        values = top - values
    picture: Grey = values.astype(np.float32)
    # The division is in place, because a picture may have 89 million pixels
    picture /= np.float32(top)
    return picture


def _grey_values(image: Image) -> tuple[npt.NDArray[Any], int]:
    """Return a grey image's pixels, (height, width), and the stored bits per pixel, 8 or 16.

    The pixels keep the file's type, and are not inverted.

    Raises:
        BrokenImageError: the image has several pages, is not grey, or has a value outside 0..65535.
    """
    pages = getattr(image, "n_frames", 1)
    fault = ""
    if pages > 1:
        fault = f"has {pages} pages: save one image per file"
    elif image.mode not in _DEPTHS:
        fault = f"is not grey of 8 or 16 bits (it has Pillow's mode {image.mode}): convert it"
    if fault:
        raise BrokenImageError(fault)
    # The file's own type is kept; int64 would take 8 times the memory
    values = np.asarray(image)
    if values.min() < 0 or values.max() > _LEVELS:
        raise BrokenImageError("has values that need more than 16 bits a pixel")
    return values, _DEPTHS[image.mode]


def check_depth(depth: int, largest: int, bits: int) -> int:
    """Check that a file has the declared depth, and return the largest allowed value, 2^bits - 1.

    A file stores 8 bits per pixel if 8 are declared, and 16 if 9 to 16 are declared.

    Args:
        depth: the bits per pixel that the file stores.
        largest: the largest value in the file.
        bits: the declared bits per pixel, 8 to 16.

    Raises:
        BrokenImageError: the file stores another number of bits, or ``largest`` is above 2^bits -
            1.
    """
    top: int = 2**bits - 1
    stored = 8 if bits <= 8 else 16  # files hold whole bytes
    fault = ""
    if depth != stored:
        fault = f"has {depth} bits a pixel, but {bits} are declared"
    elif largest > top:
        fault = f"has values above {top}, but {bits} bits a pixel are declared"
    if fault:
        raise BrokenImageError(fault)
    return top


def fit_square(picture: Grey, size: int) -> Grey:
    """Crop empty edges from ``picture`` (height, width), and fit the rest into (size, size).

    A row or column at an edge is empty if all its pixels exceed the darkest pixel by at most 1/256
    of the span from darkest to brightest. The rest is resized bilinearly so that its longer side is
    ``size``, and put at the top left. The remaining area gets the value of the darkest pixel.

    Raises:
        BrokenImageError: all pixels of ``picture`` or of the result are equal.
    """
    darkest, brightest = picture.min(), picture.max()
    # The threshold is relative, because air is not equally dark on all machines
    within = picture > darkest + (brightest - darkest) * np.float32(_EMPTY)
    rows = np.flatnonzero(within.any(axis=1))
    columns = np.flatnonzero(within.any(axis=0))
    if not len(rows):
        raise BrokenImageError("is empty: all its pixels are equal")
    cropped = picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    # The paper scales to the height only, but then a picture wider than high would not fit
    scale = size / max(cropped.shape)
    height = max(1, round(cropped.shape[0] * scale))
    width = max(1, round(cropped.shape[1] * scale))
    square = np.full((size, size), darkest, dtype=np.float32)
    square[:height, :width] = resize(cropped, height, width)
    if square.min() == square.max():
        raise BrokenImageError("is empty: all its pixels are equal but for its edges")
    return square


def resize(picture: Grey, height: int, width: int) -> Grey:
    """Resize ``picture`` bilinearly, with antialiasing, to a float32 array (height, width).

    The aspect ratio may change. Values are averaged but not scaled, so 0..1 stays 0..1.
    """
    from PIL import Image
    from PIL.Image import Resampling

    # Pillow reads the buffer as it lies in memory, so a view with strides would be garbled
    image = Image.fromarray(np.ascontiguousarray(picture, dtype=np.float32))
    return np.asarray(image.resize((width, height), Resampling.BILINEAR))


def as_rendered(picture: Grey, profile: Profile | None, *key: str | int) -> npt.NDArray[np.int16]:
    """Convert a picture to int16 (1, height, width), as one vendor's X-ray machine would render it.

    A profile first blurs the picture, then adds noise, and then applies its tone curve. At the end
    brightness 0..1 becomes -32768..32767, rounded to whole numbers. Brightness outside 0..1 is
    clipped.

    Args:
        picture: brightness from 0 to 1, (height, width).
        profile: the blur, noise and tone curve of the vendor's machines. With None, the picture is
            only converted to int16.
        key: what identifies the image, such as its file name. It seeds the noise, so the same image
            always gets the same noise.
    """
    if profile:
        rng = np.random.default_rng(derive_seed(0, "vendor-noise", *key))
        picture = profile.render(picture, rng)
    return as_int16(picture)[None]


def as_int16(picture: Grey) -> npt.NDArray[np.int16]:
    """Convert brightness 0..1 to int16: 0..65535 minus 32768. Values outside are clipped."""
    levels = np.rint(picture.clip(0, 1) * np.float32(_LEVELS))
    shifted: npt.NDArray[np.int16] = (levels - _INT16_ZERO).astype(np.int16)
    return shifted
