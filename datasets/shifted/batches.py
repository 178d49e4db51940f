"""CIFAR-10 and CIFAR-100 (cs.toronto.edu/~kriz/cifar.html): binary batches, or python's pickles.

An image is 32x32 pixels, its red plane first, then green and blue. A record of the binary form is
the label's byte, with CIFAR-100 the coarse one's before it, and the pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.shifted.pickles import read_batch
from fedsilo.datasets.shifted.pools import Facts, Pool, facts_of
from fedsilo.models.contract.errors import DataError

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

_SIDE = 32  # pixels
_PIXELS = 3 * _SIDE * _SIDE  # bytes of an image


@dataclass(frozen=True)
class Layout:
    """The files of a set, without the ending '.bin' that the binary form's have.

    Attributes:
        name: the data set.
        train, test: training files in order, and the test file.
        label_bytes: of a binary record; the last is the label.
        label_key: the labels in a python batch.
        classes: labels are 0 to one less.
    """

    name: str
    train: tuple[str, ...]
    test: str
    label_bytes: int
    label_key: bytes
    classes: int


CIFAR10 = Layout(
    "cifar10", tuple(f"data_batch_{n}" for n in range(1, 6)), "test_batch", 1, b"labels", 10
)
CIFAR100 = Layout("cifar100", ("train",), "test", 2, b"fine_labels", 100)


def list_batches(layout: Layout, folder: Path) -> Facts:
    """Return facts of the batches in ``folder``, of one form; none if none trains."""
    for ending in (".bin", ""):
        train = facts_of(folder, [f"{name}{ending}" for name in layout.train])
        if train:
            return train + facts_of(folder, [f"{layout.test}{ending}"])
    return []


def decode_batches(layout: Layout, folder: Path) -> Pool:
    """Return the images of all training batches that are there, and of the test batch.

    Raises:
        DataError: a file is missing, cut short, of another record size or no batch, or a label is
            out of range.
    """
    names = [fact[0] for fact in list_batches(layout, folder)]
    ending = ".bin" if names and names[0].endswith(".bin") else ""
    test = f"{layout.test}{ending}"
    if test not in names or len(names) < 2:
        raise DataError(
            f"{folder} lacks {test}, the test images: run 'fedsilo fetch {layout.name} "
            f"--data-dir {folder.parent}'"
        )
    read = _read_binary if ending else _read_python
    parts = {name: read(layout, folder / name) for name in names}
    tested = parts.pop(test)
    images, labels = zip(*parts.values(), strict=True)
    return Pool(np.concatenate(images), np.concatenate(labels), *tested)


def _read_binary(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Return images (n, 32, 32, 3) and labels (n,) of a binary batch."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    size = layout.label_bytes + _PIXELS
    if not len(content) or len(content) % size:
        raise DataError(
            f"{path} has {len(content)} bytes, which are no whole records of '{layout.name}', of "
            f"{size} bytes each: it is cut short or of another set; download it again"
        )
    records = content.reshape(-1, size)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    return _in_colour(records[:, layout.label_bytes :]), _in_range(labels, layout, path)


def _read_python(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Return the same of a python batch."""
    batch = read_batch(path)
    key = layout.label_key
    if key not in batch or b"data" not in batch:
        raise DataError(
            f"{path} has no '{key.decode()}' or no 'data': it is no python batch of "
            f"'{layout.name}'; download it again"
        )
    pixels, labels = batch[b"data"], batch[key]
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(
            f"{path}: its images are no rows of {_PIXELS} bytes, 32x32 pixels in colour (grey ones "
            "have 1024): download it again"
        )
    if len(pixels) == 0 or not _are_numbers(labels) or len(labels) != len(pixels):
        raise DataError(f"{path} has no label for each of {len(pixels)} images: download it again")
    return _in_colour(pixels), _in_range(np.array(labels, np.int64), layout, path)


def _are_numbers(labels: Any) -> bool:
    return isinstance(labels, list) and all(
        type(label) is int and abs(label) < 2**31 for label in labels
    )


def _in_colour(pixels: Images) -> Images:
    """Return (n, 32, 32, 3) of rows of three planes."""
    return pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


def _in_range(labels: Labels, layout: Layout, path: Path) -> Labels:
    wrong = np.flatnonzero((labels < 0) | (labels >= layout.classes))
    if len(wrong):
        raise DataError(
            f"{path}: label {labels[wrong[0]]} of image {wrong[0]} is out of range "
            f"0..{layout.classes - 1}: the file is damaged or of another set; download it again"
        )
    return labels
