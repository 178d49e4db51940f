"""The IDX format of MNIST and its relatives (yann.lecun.com/exdb/mnist), gzipped.

torchvision reads these files only unpacked, in a folder layout of its own.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.unpacked_size import check_unpacked

Bytes = npt.NDArray[np.uint8]

_PART = 2**22  # bytes


def read_idx(path: Path) -> Bytes:
    """Read a gzipped IDX file of unsigned bytes as an array with the shape in its header.

    Raises:
        DataError: in one of these cases:

            - The file is missing or not gzip.
            - It is not an IDX file of unsigned bytes.
            - Its content is shorter or longer than the header states.
            - Its array is larger than fedsilo's limit for unpacked files, by default 1 GiB.
    """
    try:
        with gzip.open(path) as file:
            shape = _read_shape(file, path)
            length = math.prod(shape)
            content = bytearray()
            # A small file may unpack to any size, so it is read in parts, and at most one byte
            # more than the header says
            while len(content) <= length:
                part = file.read(min(length + 1, _PART))
                if not part:
                    break
                content += part
        if len(content) == length:
            return np.frombuffer(content, np.uint8).reshape(shape)
        fault = f"has {len(content)} bytes, but its header {shape} says {length} bytes"
        if len(content) > length:
            fault = f"has more than the {length} bytes that its header {shape} says"
    except (EOFError, zlib.error):
        fault = "is truncated"
    except gzip.BadGzipFile:
        fault = "is damaged or not a gzip file"
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
    except ValueError:  # a zero length beside lengths that no array can have
        fault = f"is not an IDX file, because its header says {shape}"
    raise DataError(f"{path} {fault}: download it again")


def _read_shape(file: gzip.GzipFile, path: Path) -> tuple[int, ...]:
    """Read the header of an open IDX file, and return the shape of its array (1 to 4 dimensions).

    Raises:
        DataError: the header is cut short, does not declare unsigned bytes, or declares an array
            above fedsilo's limit for unpacked files, by default 1 GiB.
    """
    start = file.read(4)
    # The first 4 bytes: two zeros, the type of the numbers, and the number of dimensions. Then each
    # dimension's length follows, in 4 bytes with the highest first
    is_idx = len(start) == 4 and start[:3] == b"\0\0\x08"  # 8: unsigned bytes
    dimensions = start[3] if is_idx else 0
    lengths = file.read(4 * dimensions)
    if dimensions not in (1, 2, 3, 4) or len(lengths) < 4 * dimensions:
        raise DataError(
            f"{path} is not an IDX file of 8-bit images or labels, because its header is wrong "
            "or cut short: download it again"
        )
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", lengths)
    check_unpacked(path, math.prod(shape))
    return shape


def read_labelled_images(images: Path, labels: Path, classes: int) -> tuple[Bytes, Bytes]:
    """Read a pair of IDX files: images (n, height, width) and labels (n,), both uint8.

    Raises:
        DataError: a file is unusable, the shapes or counts do not match, or a label is not below
            ``classes``.
    """
    pixels, targets = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or targets.ndim != 1 or len(pixels) != len(targets):
        raise DataError(
            f"{images.name} {pixels.shape} and {labels.name} {targets.shape} in {images.parent} "
            "are not images with one label each: download both again"
        )
    refuse_out_of_range(targets, classes, labels)
    return pixels, targets


def refuse_out_of_range(labels: npt.NDArray[np.integer], classes: int, path: Path) -> None:
    """Check that all labels read from a file are in 0..``classes`` - 1.

    Raises:
        DataError: a label is out of range. The error names the file, the first such label and its
            index.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{path}: label {labels[wrong[0]]} of image {wrong[0]} is out of range "
            f"0..{classes - 1}, because the file is damaged or belongs to another data set: "
            "download it again"
        )
