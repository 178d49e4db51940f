"""CIFAR-10 and CIFAR-100 (cs.toronto.edu/~kriz/cifar.html): binary batches, or Python's pickles.

An image is 32x32 pixels, its red plane first, then green and blue. A record of the binary form is
the label's byte, with CIFAR-100 the coarse one's before it, and the pixels. torchvision reads only
the complete set; a part of one is enough here.
"""

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.datasets.shifted.idx import refuse_out_of_range
from fedsilo.datasets.shifted.pools import Facts, Pool, facts_of

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
    label_key: str
    classes: int


CIFAR10 = Layout(
    "cifar10", tuple(f"data_batch_{n}" for n in range(1, 6)), "test_batch", 1, "labels", 10
)
CIFAR100 = Layout("cifar100", ("train",), "test", 2, "fine_labels", 100)


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
    is_binary = bool(names) and names[0].endswith(".bin")
    test = layout.test
    if is_binary:
        test = f"{layout.test}.bin"
    if test not in names or len(names) < 2:
        raise DataError(
            f"{folder} lacks {test}, the test images: run 'fedsilo fetch {layout.name} "
            f"--data-dir {folder.parent}'"
        )
    names.remove(test)
    train = [_read_batch(layout, folder / name, is_binary) for name in names]
    images, labels = zip(*train, strict=True)
    return Pool(
        np.concatenate(images),
        np.concatenate(labels),
        *_read_batch(layout, folder / test, is_binary),
    )


def _read_batch(layout: Layout, path: Path, is_binary: bool) -> tuple[Images, Labels]:
    """Read the images (n, 32, 32, 3) and labels (n,) of a batch."""
    if is_binary:
        pixels, labels = _read_binary(layout, path)
    else:
        pixels, labels = _read_python(layout, path)
    refuse_out_of_range(labels, layout.classes, path)
    # Three planes become one image in colour
    return pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), labels


def _read_binary(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Return rows of pixels (n, 3072) and labels (n,) of a binary batch."""
    content = np.frombuffer(_read_file(path), np.uint8)
    size = layout.label_bytes + _PIXELS
    if not len(content) or len(content) % size:
        raise DataError(
            f"{path} has {len(content)} bytes, but must hold complete records of '{layout.name}' "
            f"of {size} bytes each; it is truncated or belongs to another data set: "
            "download it again"
        )
    records = content.reshape(-1, size)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Return rows of pixels (n, 3072) and labels (n,) of a Python batch, the published file.

    Raises:
        DataError: the file cannot be read, or its MD5 is not the published one.
    """
    content = _read_file(path)
    # These bytes are checked and then opened: a pickle of other bytes could run any code
    checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if checksum != _published_digests(layout)[path.name]:
        raise DataError(
            f"{path} is not the file that {layout.name}'s authors published (its MD5 differs), but "
            "no other is opened, because a Python batch can run code: download it again, or take "
            "the binary form"
        )
    batch = pickle.loads(content, encoding="latin1")
    return batch["data"], np.array(batch[layout.label_key], np.int64)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): check that this user may read it"
        ) from None


def _published_digests(layout: Layout) -> dict[str, str]:
    """Return name -> MD5 of each published Python batch, as torchvision lists them."""
    from torchvision import datasets

    published = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[layout.name]
    return dict([*published.train_list, *published.test_list])
