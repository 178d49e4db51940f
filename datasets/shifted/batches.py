"""CIFAR-10 and CIFAR-100 (cs.toronto.edu/~kriz/cifar.html): binary batches, or python's pickles.

An image is 32x32 pixels, its red plane first, then green and blue. A record of the binary form is
the label's byte, with CIFAR-100 the coarse one's before it, and the pixels. torchvision would load
the pickles without a restriction, and only the complete set.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.io.text_files import file_fault
from fedsilo.datasets.shifted.idx import refuse_out_of_range
from fedsilo.datasets.shifted.pools import Facts, Pool, facts_of
from fedsilo.models.contract.errors import DataError

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

_SIDE = 32  # pixels
_PIXELS = 3 * _SIDE * _SIDE  # bytes of an image


@dataclass(frozen=True)
class Layout:
    """The files of a set, without the ending '.bin' of the binary form's names.

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
    """Return facts of the batches of one form in ``folder``, none if there is no training batch."""
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
    parts = {}
    for name in names:
        pixels, labels = read(layout, folder / name)
        refuse_out_of_range(labels, layout.classes, folder / name)
        # Three planes become one image in colour
        parts[name] = pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), labels
    tested = parts.pop(test)
    images, targets = zip(*parts.values(), strict=True)
    return Pool(np.concatenate(images), np.concatenate(targets), *tested)


def _read_binary(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Return rows of pixels (n, 3072) and labels (n,) of a binary batch."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    size = layout.label_bytes + _PIXELS
    if not len(content) or len(content) % size:
        raise DataError(
            f"{path} has {len(content)} bytes, which are not complete records of '{layout.name}', "
            f"of {size} bytes each: it is truncated or belongs to another data set; "
            "download it again"
        )
    records = content.reshape(-1, size)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Return the same of a python batch."""
    batch, key = read_batch(path), layout.label_key
    if key not in batch or b"data" not in batch:
        raise DataError(
            f"{path} has no '{key.decode()}' or no 'data': it is not a Python batch of "
            f"'{layout.name}'; download it again"
        )
    pixels, labels = batch[b"data"], batch[key]
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(
            f"{path}: its images are not rows of {_PIXELS} bytes, 32x32 pixels in colour (grey "
            "ones have 1024): download it again"
        )
    numbers = isinstance(labels, list) and all(type(n) is int and abs(n) < 2**31 for n in labels)
    if len(pixels) == 0 or not numbers or len(labels) != len(pixels):
        raise DataError(f"{path} has no label for each of {len(pixels)} images: download it again")
    return pixels, np.array(labels, np.int64)


class _Type:
    """The type of an array of bytes; a batch holds no other."""

    def __init__(self, code: Any, *more: Any) -> None:
        if code not in ("u1", b"u1", "|u1", b"|u1"):
            raise TypeError("an array of other than bytes")

    def __setstate__(self, state: Any) -> None:
        """Take no notice: of bytes there is nothing more to say."""


class _Array:
    """An array, once its state came: version, shape, type, whether columns come first, bytes."""

    array: Images | None = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_column, pixels = state
        if not isinstance(dtype, _Type) or by_column or not isinstance(pixels, bytes):
            raise TypeError("an array whose columns come first, or without bytes")
        self.array = np.frombuffer(pixels, np.uint8).reshape(shape)


def _encoded(text: str, encoding: Any) -> bytes:
    """Return bytes, which Python 3 writes as a text by protocol 2."""
    if not isinstance(text, str):
        raise TypeError("an encoding of something other than text")
    return text.encode("latin-1")


_KNOWN = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": None,  # only named, as an argument
    "numpy.dtype": _Type,
    "_codecs.encode": _encoded,
}


# Python's own class, since a few altered bytes make the C one take gigabytes for its memo
class _BatchUnpickler(pickle._Unpickler):
    """Imports nothing and calls nothing that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        named = f"{module}.{name}"
        if named not in _KNOWN:
            raise PermissionError(f"wants to run {named[:80]!r}")
        return _KNOWN[named]


def read_batch(path: Path) -> dict[bytes, Any]:
    """Return a python batch: its lists of labels and names, and its images as uint8 array.

    Keys and texts are bytes, as Python 2 wrote them. No code in the file is run.

    Raises:
        DataError: the file cannot be read, is cut short, no such pickle, or wants to run code.
    """
    if fault := file_fault(path):
        raise DataError(f"{path} {fault}: download it again")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(batch, dict):
            raise TypeError("no dictionary")
        keys = [key if isinstance(key, bytes) else str(key).encode() for key in batch]
        built = (one.array if isinstance(one, _Array) else one for one in batch.values())
        return dict(zip(keys, built, strict=True))
    except PermissionError as error:
        raise DataError(
            f"{path} {error}, which no batch of CIFAR does; nothing of it was run: download it "
            "again from its public source"
        ) from None
    except Exception as error:  # a damaged pickle fails in any way
        raise DataError(
            f"{path} is truncated or not a Python batch of CIFAR ({type(error).__name__}): "
            "download it again"
        ) from None
