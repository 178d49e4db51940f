"""The IDX format of MNIST and its relatives (yann.lecun.com/exdb/mnist), gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.contract.errors import DataError

Bytes = npt.NDArray[np.uint8]

_UNSIGNED_BYTE = 8


def read_idx(path: Path) -> Bytes:
    """Return the unsigned bytes of an IDX file, shaped as its header says.

    Raises:
        DataError: the file is not gzip, is cut short, or is no IDX file of unsigned bytes.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (EOFError, zlib.error):
        raise DataError(f"{path} is cut short: download it again") from None
    except gzip.BadGzipFile:
        raise DataError(f"{path} is damaged or no gzip file: download it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> Bytes:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise DataError(f"{path} is no IDX file of unsigned bytes (first bytes {content[:4]!r})")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if dimensions not in (1, 2, 3, 4) or len(content) < start:
        raise DataError(f"{path} is no IDX file of images or labels: bad or cut header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = math.prod(shape)
    if len(content) - start != expected:
        raise DataError(
            f"{path} holds {len(content) - start} bytes where its header {shape} says {expected}: "
            "download it again"
        )
    try:
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except ValueError:  # a zero length beside lengths that no array can have
        raise DataError(f"{path} is no IDX file: its header says {shape}") from None


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
