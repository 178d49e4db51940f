"""Decode image files to arrays of one size with Pillow, and report all unreadable files together.

Colour constancy is the method shades of grey: the illuminant is the power mean of each channel
(Finlayson and Trezzi 2004), and the image is divided by it, so that the illuminant becomes grey.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import abbreviate, printable
from fedsilo.datasets.silo.measures import Measure

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]

# Only some of Pillow's formats, because for others it starts programs
PICTURES = ("JPEG", "PNG", "TIFF", "BMP", "WEBP")
MOST_PIXELS = 89_478_485  # Pillow warns above this; a mammogram has 25 million
# Tags of a TIFF
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
_WIDE_MODES = ("I", "F")  # more than 8 bits a channel: Pillow would clip them to white
_WIDE_COLOURS = re.compile(";16[BLN]")
TRUNCATED = "is truncated or damaged"
_TOO_LARGE = f"has more than {MOST_PIXELS} pixels, by its header: save it smaller"
ALL = "all"  # name of the only split in histograms of files
_WITH_HEADERS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "PPM")
_SIDES = (64.0, 128.0, 256.0, 512.0, 768.0, 1024.0, 1536.0, 2048.0, 3072.0, 4096.0)
_DEPTHS = (2.0, 9.0, 17.0, 25.0)
_BITS = {"1": 1, "L": 8, "P": 8, "LA": 16, "RGB": 24, "YCbCr": 24, "RGBA": 32, "CMYK": 32}
_GREY_POWER = 6
_NAMED_FAULTS = 5


class BrokenImageError(Exception):
    """An image file cannot be decoded; the message is the reason, without the file's name."""


@dataclass(frozen=True)
class Fault:
    """An image that could not be decoded: its file name within the folder, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Decoded:
    """The images of the files that could be decoded, and the faults of the other files.

    Attributes:
        images: (k, channels, size, size), uint8, or int16 for radiographs (see ``Split``).
        kept: index of each image in the list of files, (k,).
        faults: the files that could not be decoded.
    """

    images: npt.NDArray[Any]
    kept: npt.NDArray[np.int64]
    faults: tuple[Fault, ...]


def decode_image(path: Path, size: int, constancy: bool = False) -> Pixels:
    """Decode an image file to RGB, uint8 (3, size, size).

    The image is turned upright by its EXIF data, cropped to its central square, and resized with
    antialiasing. If ``constancy`` is true, the colour of the light in which the picture was taken
    is removed afterwards (``shades_of_grey``).

    Raises:
        BrokenImageError: the file is missing, truncated or not an image, or has more than 8 bits
            per channel or too many pixels.
    """
    with opened_image(path, PICTURES) as image:
        pixels = _central_square(image, size)
    return shades_of_grey(pixels) if constancy else pixels


@contextmanager
def opened_image(path: Path, formats: tuple[str, ...]) -> Iterator[Image]:
    """Open an image file for a ``with`` block, and turn reading errors into ``BrokenImageError``.

    The size in the header is checked before the block runs. The pixels are decoded only inside the
    block. An error inside the block therefore becomes a ``BrokenImageError`` too.

    Args:
        path: the file.
        formats: the accepted formats, such as 'PNG', in Pillow's spelling.

    Raises:
        BrokenImageError: the file cannot be read as an image of these formats, is above 1 GiB, or
            has no pixels or more than 89 million. A tile above 89 million pixels is also refused.
        MemoryError: the image does not fit into memory.
    """
    from PIL import Image, UnidentifiedImageError

    check_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
            opened = Image.open(path, formats=formats)
        with opened as image:
            check_pixels(image.height, image.width)
            _check_tiles(image)
            yield image
    except (BrokenImageError, MemoryError):
        raise
    except Image.DecompressionBombError:
        fault = _TOO_LARGE
    except UnidentifiedImageError:
        fault = f"is not an image ({', '.join(formats)})"
    except Exception as error:  # decoders raise nearly anything on damaged files
        fault = read_fault(error)
    else:
        return
    raise BrokenImageError(fault)


def read_fault(error: Exception) -> str:
    """Explain why a file cannot be read, from the error that the attempt raised.

    The text is a predicate to put after the file's name. A ``FileNotFoundError`` gives "is
    missing". Any other error of the operating system gives "cannot be read" and the system's
    reason. All other errors are taken for those of a decoder, and give "is truncated or damaged".
    """
    if isinstance(error, FileNotFoundError):
        return "is missing"
    # Errors of the system have a number, but those that decoders raise have none
    if isinstance(error, OSError) and error.errno:
        return f"cannot be read: {error.strerror}"
    return TRUNCATED


def check_file(path: Path) -> None:
    """Refuse a path that must not be opened: a pipe, a device or a file of more than 1 GiB.

    Callers check a path before they open it, because opening a pipe would wait forever. A folder
    and a missing file pass, because reading them raises a clearer error. The content of a file is
    not checked.

    Raises:
        BrokenImageError: the path is a pipe, a device or a file of more than 1 GiB.
    """
    fault = file_fault(path)
    if fault:
        raise BrokenImageError(fault)


def check_pixels(height: int, width: int) -> None:
    """Check an image's size before the image is decoded.

    Only the number of pixels counts, not the proportions.

    Raises:
        BrokenImageError: the image has no pixels, or more than 89 million (``MOST_PIXELS``).
    """
    has_pixels = height > 0 and width > 0
    if not has_pixels or height * width > MOST_PIXELS:
        raise BrokenImageError(_TOO_LARGE if has_pixels else "has no pixels, by its header")


def _check_tiles(image: Image) -> None:
    """Check the size of the tiles in a TIFF, because each tile is decoded as a whole.

    Images of other formats, and a TIFF without tiles, pass.

    Raises:
        BrokenImageError: a tile has more than 89 million pixels, or a damaged header states no
            whole number as its size.
    """
    tags = getattr(image, "tag_v2", {})
    width = tags.get(_TILE_WIDTH, 1)
    height = tags.get(_TILE_HEIGHT, 1)
    are_numbers = isinstance(width, int) and isinstance(height, int)
    if not are_numbers or width * height > MOST_PIXELS:
        raise BrokenImageError(
            f"has tiles of more than {MOST_PIXELS} pixels: save it without tiles"
        )


def is_wide(image: Image) -> bool:
    """Tell from the header whether an image has more than 8 bits per channel."""
    # Pillow reports an 8-bit mode for colours of 16 bits; only the tile shows the stored bits
    stored = str(getattr(image, "tile", ""))
    return image.mode.split(";")[0] in _WIDE_MODES or bool(_WIDE_COLOURS.search(stored))


def refuse_wide(image: Image) -> None:
    """Check that an image has at most 8 bits per channel.

    Raises:
        BrokenImageError: the image has more than 8 bits per channel.
    """
    if is_wide(image):
        raise BrokenImageError("has more than 8 bits per channel: save it with 8")


def _central_square(image: Image, size: int) -> Pixels:
    """Turn an opened image upright, crop its central square, and resize it to RGB (3, size, size).

    The result is uint8. The EXIF data decide how the image is turned, and ``image`` itself is
    changed. To save time, a large JPEG may be decoded at a lower resolution. Both sides then keep
    at least twice ``size`` pixels.

    Raises:
        BrokenImageError: the image has more than 8 bits per channel.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    refuse_wide(image)
    # A large JPEG is decoded at a half, a quarter, ... of its size, which saves time and memory
    image.draft("RGB", (2 * size, 2 * size))
    # This works in place, because a copy may take a hundred megabytes
    ImageOps.exif_transpose(image, in_place=True)
    upright = image.convert("RGB")
    width, height = upright.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    # An odd difference gives half pixels, which Pillow's resizing allows
    box = (left, top, left + side, top + side)
    square = upright.resize((size, size), Resampling.BILINEAR, box=box)
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def shades_of_grey(pixels: Pixels) -> Pixels:
    """Remove the colour of the light from RGB pixels (3, height, width), and keep their brightness.

    The light in a channel is estimated as the power mean of the channel's pixels, with power 6.
    Each channel is scaled so that all three estimates become their root mean square. If they are
    equal already, the pixels do not change. A black channel stays black.

    Returns:
        The pixels, uint8, rounded and clipped to 0..255.
    """
    channels = pixels.astype(np.float64)
    light = (channels**_GREY_POWER).mean(axis=(1, 2)) ** (1 / _GREY_POWER)
    # The root mean square over channels, so that a light that is grey already gives gains of 1
    norm = np.sqrt((light**2).mean())
    # A black channel has no light to divide by, and stays black
    gain = np.divide(norm, light, out=np.ones(3), where=light > 0)
    corrected: Pixels = np.rint(channels * gain[:, None, None]).clip(0, 255).astype(np.uint8)
    return corrected


def decode_each(
    names: Sequence[str],
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    decode: Callable[[str], npt.NDArray[Any]],
) -> Decoded:
    """Decode images one by one into one array, and leave out the images that cannot be decoded.

    Args:
        names: the images' names.
        shape: the shape of every image, (channels, size, size).
        dtype: the type of the array of images.
        decode: a function that takes a name and returns the pixels. If it raises
            ``BrokenImageError``, the image is left out. Any other error is raised.

    Returns:
        The decoded images, their positions in ``names``, and a fault (name and reason) for each
        image that was left out.
    """
    images = np.empty((len(names), *shape), dtype=dtype)
    kept: list[int] = []
    faults: list[Fault] = []
    for place, name in enumerate(names):
        try:
            images[len(kept)] = decode(name)
            kept.append(place)
        except BrokenImageError as error:
            faults.append(Fault(name, str(error)))
    return Decoded(images[: len(kept)], np.array(kept, dtype=np.int64), tuple(faults))


def check_faults(
    faults: Sequence[Fault], images: int, safe_names: Mapping[str, str], policy: str, where: str
) -> None:
    """Raise an error if some of a site's images could not be decoded and must not be skipped.

    The error may reach the server, and a file's name may contain a patient's name. The error
    therefore shows safe names. The real names are logged first, on this machine only.

    Args:
        faults: the images that could not be decoded.
        images: the number of all images, decoded or not, which the error states.
        safe_names: an image's file name -> its safe name, for every image in ``faults``.
        policy: the value of 'data.broken-images'. Only 'skip' allows faults.
        where: the site's name for errors.

    Raises:
        DataError: there are faults, and ``policy`` is not 'skip'. The error has their number, and
            the safe names and reasons of the first five.
    """
    if not faults or policy == "skip":
        return
    log_names(where, [(safe_names[fault.name], fault.name) for fault in faults])
    reasons = []
    for fault in faults[:_NAMED_FAULTS]:
        reasons.append(f"{safe_names[fault.name]} {fault.reason}")
    if len(faults) > _NAMED_FAULTS:
        reasons.append(f"and {len(faults) - _NAMED_FAULTS} more")
    raise DataError(
        f"{where}: {len(faults)} of {images} images cannot be used: {'; '.join(reasons)}: fix "
        "them, or set 'data.broken-images' to 'skip'"
    )


def log_names(where: str, images: Sequence[tuple[str, str]]) -> None:
    """Log the real file names behind the safe names that an error shows, on this machine only.

    A file whose two names are equal is dropped. Of the remaining files, the first five are named
    and the rest are counted.

    Args:
        where: the site's name.
        images: for each file, its safe name and its real name.
    """
    # If both names are equal, the error already names the file
    named = []
    for called, name in images:
        if called != name:
            named.append(f"{called} is {abbreviate(name, 60, 40)}")
    if named:
        names = printable(describe(named))
        logging.getLogger("flwr").warning("fedsilo: %s: %s", printable(where), names)


def describe(names: Sequence[Any], most: int = _NAMED_FAULTS) -> str:
    """Join the first ``most`` names with commas, and add how many more there are."""
    listed = ", ".join(map(str, names[:most]))
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed


@dataclass(frozen=True)
class ImageHeader:
    """Width and height of an image file in pixels, and its bits per pixel."""

    width: int
    height: int
    bits: int


def picture_header(path: Path) -> ImageHeader:
    """Read width, height and bits per pixel of an image file without decoding its pixels.

    The bits are those of all channels together, such as 24 for RGB. They are 0 for a colour mode
    that fedsilo does not know.

    Raises:
        BrokenImageError: the file is missing, is not an image, or has too many pixels.
    """
    with opened_image(path, _WITH_HEADERS) as image:
        bits = _BITS.get(image.mode, 0)
        if image.mode.startswith("I"):  # Pillow's modes of more than 8 bits
            bits = 16
        return ImageHeader(image.width, image.height, bits)


def header_measures(paths: Iterable[Path], read: Callable[[Path], ImageHeader]) -> list[Measure]:
    """Collect the widths, heights and bits per pixel of image files, for histograms.

    Files for which ``read`` raises ``BrokenImageError`` are left out.

    Args:
        paths: the image files.
        read: a function that reads the header of a file.

    Returns:
        Three measures, named 'width', 'height' and 'bits a pixel'. A measure has values for each
        split. Here all files count as one split with the name 'all'.
    """
    headers: list[ImageHeader] = []
    for path in paths:
        with suppress(BrokenImageError):  # such files are counted as left out
            headers.append(read(path))
    rows = [(header.width, header.height, header.bits) for header in headers]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return [
        Measure("width", {ALL: columns[:, 0]}, _SIDES),
        Measure("height", {ALL: columns[:, 1]}, _SIDES),
        Measure("bits a pixel", {ALL: columns[:, 2]}, _DEPTHS),
    ]
