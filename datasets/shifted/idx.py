"""The IDX format of MNIST and its relatives (yann.lecun.com/exdb/mnist), gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsilo.models.contract.errors import DataError

Bytes = npt.NDArray[np.uint8]

_UNSIGNED_BYTE = 8
_MOST_BYTES = 2**26  # MNIST's training images are 47 million
_PART = 2**22  # bytes


def read_idx(path: Path) -> Bytes:
    """Return the unsigned bytes of an IDX file, shaped as its header says.

    Of what follows the header no more is unpacked than it says, so that no small file takes all
    memory.

    Raises:
        DataError: the file is not gzip, is cut short, holds more than its header says, or is no IDX
            file of unsigned bytes.
    """
    try:
        with gzip.open(path) as file:
            shape = _shape(file, path)
            content, whole = _read(file, math.prod(shape))
    except (EOFError, zlib.error):
        raise DataError(f"{path} is cut short: download it again") from None
    except gzip.BadGzipFile:
        raise DataError(f"{path} is damaged or no gzip file: download it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not whole:
        held = "more" if len(content) == math.prod(shape) else f"{len(content)} bytes"
        raise DataError(
            f"{path} holds {held} where its header {shape} says {math.prod(shape)} bytes: download "
            "it again"
        )
    try:
        return content.reshape(shape)
    except ValueError:  # a zero length beside lengths that no array can have
        raise DataError(f"{path} is no IDX file: its header says {shape}") from None


def _shape(file: gzip.GzipFile, path: Path) -> tuple[int, ...]:
    """Read the header and return the shape that it says."""
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] != _UNSIGNED_BYTE:
        raise DataError(f"{path} is no IDX file of unsigned bytes")
    dimensions = start[3]
    lengths = file.read(4 * dimensions)
    if dimensions not in (1, 2, 3, 4) or len(lengths) < 4 * dimensions:
        raise DataError(f"{path} is no IDX file of images or labels: bad or cut header")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", lengths)
    if math.prod(shape) > _MOST_BYTES:
        raise DataError(f"{path} is no IDX file that can be used: its header says {shape}")
    return shape


def _read(file: gzip.GzipFile, length: int) -> tuple[Bytes, bool]:
    """Return up to ``length`` bytes, and whether the file holds so many and no more.

    It is read in parts, so that memory is taken for what there is only.
    """
    content = bytearray()
    while len(content) < length and (part := file.read(min(length - len(content), _PART))):
        content += part
    whole = len(content) == length and not file.read(1)
    return np.frombuffer(content, np.uint8), whole


def read_labelled_images(images: Path, labels: Path, classes: int) -> tuple[Bytes, Bytes]:
    """Return images (n, height, width) and labels (n,) of a pair of IDX files.

    Raises:
        DataError: a file is unusable, the counts differ, or a label is out of range.
    """
    pixels, targets = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or targets.ndim != 1 or len(pixels) != len(targets):
        raise DataError(
            f"{images.name} {pixels.shape} and {labels.name} {targets.shape} in {images.parent} "
            "are no images with one label each"
        )
    wrong = np.flatnonzero(targets >= classes)
    if len(wrong):
        raise DataError(
            f"{labels}: label {targets[wrong[0]]} of image {wrong[0]} is out of range "
            f"0..{classes - 1}"
        )
    return pixels, targets
