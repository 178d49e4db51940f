"""Read CIFAR-10 and CIFAR-100 (cs.toronto.edu/~kriz/cifar.html): binary batches or pickles.

An image has 32x32 pixels, stored as a red, a green and a blue plane. A binary record is the label's
byte (in CIFAR-100 after the coarse label's byte) and then the pixels. torchvision reads only the
complete set, but here some of its training batches are enough.
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
    """The files of one CIFAR set.

    Attributes:
        name: the data set's name.
        train, test: names of the training files in order, and of the test file; binary files have
            '.bin' added.
        label_bytes: bytes before the pixels of a binary record; the last of them is the label.
        label_key: key of the labels in a Python batch.
        classes: number of labels, which start at 0.
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
    """List the batch files of a CIFAR set in ``folder``, either all binary or all Python pickles.

    The binary files are listed if at least one binary training batch exists. Otherwise the pickles
    are listed. ``layout`` has the names of the data set's files.

    Returns:
        [name, size in bytes, modification time in ns] of each training batch, and then of the test
        batch if it exists. [] if there is no training batch.
    """
    for ending in (".bin", ""):
        # The binary form goes first, because it cannot contain code as a pickle can
        train = facts_of(folder, [f"{name}{ending}" for name in layout.train])
        if train:
            return train + facts_of(folder, [f"{layout.test}{ending}"])
    return []


def decode_batches(layout: Layout, folder: Path) -> Pool:
    """Decode the CIFAR batches in ``folder`` into a ``Pool`` of training and test images.

    Training batches are joined in the order of their numbers, and missing ones are skipped.

    Raises:
        DataError: in one of these cases:

            - The test batch or every training batch is missing.
            - A binary file does not consist of complete records.
            - A pickle's MD5 is not the one that the authors of CIFAR published.
            - A label is out of range.
    """
    names = [fact[0] for fact in list_batches(layout, folder)]
    is_binary = bool(names) and names[0].endswith(".bin")
    test = layout.test
    if is_binary:
        test = f"{layout.test}.bin"
    missing = ""
    if not names:
        missing = "all batches of training images"
    elif test not in names:
        missing = f"{test}, the test images"
    if missing:
        raise DataError(
            f"{folder} lacks {missing}: run 'fedsilo fetch {layout.name} "
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
    """Read a batch of images: (n, 32, 32, 3) uint8, with their labels, (n,) int64.

    ``is_binary`` is False for a Python pickle.

    Raises:
        DataError: the file cannot be read, a label is out of range, a binary file has the wrong
            size, or a pickle has the wrong MD5.
    """
    if is_binary:
        pixels, labels = _read_binary(layout, path)
    else:
        pixels, labels = _read_python(layout, path)
    refuse_out_of_range(labels, layout.classes, path)
    # Three planes become one image in colour
    return pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), labels


def _read_binary(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Read a binary batch: pixels (n, 3072) uint8, and labels (n,) int64.

    Each image is stored as three planes of 1024 pixels: red, green and blue. If a record has
    several label bytes, the last one is the label. The range of labels is not checked here.

    Raises:
        DataError: the file cannot be read, is empty, or does not consist of complete records.
    """
    content = np.frombuffer(_read_file(path), np.uint8)
    size = layout.label_bytes + _PIXELS
    if not len(content) or len(content) % size:
        raise DataError(
            f"{path} has {len(content)} bytes, but must contain complete records of "
            f"'{layout.name}', {size} bytes each; it is truncated or belongs to another data set: "
            "download it again"
        )
    records = content.reshape(-1, size)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1].astype(np.int64)


def _read_python(layout: Layout, path: Path) -> tuple[Images, Labels]:
    """Read a pickled batch of CIFAR: pixels (n, 3072) uint8, and labels (n,) int64.

    The MD5 is checked before the file is unpickled, because a pickle can run code. The range of
    labels is not checked here.

    Raises:
        DataError: the file cannot be read, or its MD5 is not the one that the authors published.
    """
    content = _read_file(path)
    # These bytes are checked and then opened: a pickle of other bytes could run any code
    checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if checksum != _published_digests(layout)[path.name]:
        raise DataError(
            f"{path} is not the file that {layout.name}'s authors published (its MD5 differs), and "
            "other files are not opened, because a Python batch can run code: download it again, "
            "or take the binary form"
        )
    batch = pickle.loads(content, encoding="latin1")
    return batch["data"], np.array(batch[layout.label_key], np.int64)


def _read_file(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        DataError: the file cannot be read. The error gives the operating system's reason.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): check that this user may read it"
        ) from None


def _published_digests(layout: Layout) -> dict[str, str]:
    """Return file name -> MD5 of the published Python batches, as torchvision lists them."""
    from torchvision import datasets

    published = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[layout.name]
    return dict([*published.train_list, *published.test_list])
