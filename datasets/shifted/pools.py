"""The public images that silos are cut from, decoded once into memory-mapped arrays.

``digits`` ships with scikit-learn (1,797 real handwritten digits, UCI); the others are files of
the data directory, laid out as their public sources lay them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datasets.io.digests import json_digest
from datasets.io.locations import Places, RemoteFile, find_files
from datasets.io.sealed_folders import open_sealed
from datasets.shifted.idx import read_labelled_images
from models.contract.errors import DataError

FloatImages = npt.NDArray[Any]


@dataclass(frozen=True)
class Pool:
    """Grey images (n, height, width) on the 0..255 scale and labels (n,), in file order."""

    train_images: FloatImages
    train_labels: npt.NDArray[Any]
    test_images: FloatImages
    test_labels: npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A data set: where it lies, how it is decoded, and how the UEFL notes cut it.

    ``mean`` and ``std`` standardise pixels (0..1 scale) by the published figures of the whole
    training set. A silo size of 0 shares the pool out equally.
    """

    name: str
    classes: int
    mean: float
    std: float
    decode: Callable[[Path], Pool]
    train_size: int = 0
    test_size: int = 0
    noise: bool = True
    folder: str = ""
    url: str = ""
    files: tuple[RemoteFile, ...] = field(default=())


def _decode_digits(_: Path) -> Pool:
    """Double the 8x8 digits to 16x16, so that three 2x2 poolings leave a 2x2 map."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(images).reshape(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
    pixels = large.squeeze(1).float().numpy()
    split = len(pixels) * 4 // 5  # no public split exists: the last fifth, in file order, tests
    return Pool(pixels[:split], labels[:split], pixels[split:], labels[split:])


def _decode_idx(folder: Path) -> Pool:
    train = read_labelled_images(
        folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz", 10
    )
    test = read_labelled_images(
        folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz", 10
    )
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{folder}: training images are {train[0].shape[1:]} pixels and test images "
            f"{test[0].shape[1:]}: download both again"
        )
    return Pool(*train, *test)


_MNIST_FILES = (
    RemoteFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    RemoteFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    RemoteFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    RemoteFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)
_FASHION_FILES = (
    RemoteFile("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    RemoteFile("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    RemoteFile("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
    RemoteFile("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
)

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", 10, mean=0.3053, std=0.3181, decode=_decode_digits),
        Source(
            "mnist",
            10,
            mean=0.1307,
            std=0.3081,
            decode=_decode_idx,
            noise=False,
            train_size=2000,
            test_size=500,
            folder="mnist",
            files=_MNIST_FILES,
            url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
        Source(
            "fmnist",
            10,
            mean=0.2860,
            std=0.3530,
            decode=_decode_idx,
            train_size=2000,
            test_size=500,
            folder="fashion_mnist",
            files=_FASHION_FILES,
            url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
    )
}


def source_key(source: Source, folder: Path) -> str:
    """Return a fingerprint of the source's files: name, size and time of change of each."""
    facts = [
        [f.name, (folder / f.name).stat().st_size, (folder / f.name).stat().st_mtime_ns]
        for f in source.files
    ]
    return json_digest([source.name, str(folder.resolve()) if facts else "", facts])[:16]


def open_pool(source: Source, places: Places) -> tuple[Pool, str]:
    """Return the decoded arrays, memory-mapped, and their key; decode only the first time."""
    folder = find_files(source, places)
    key = source_key(source, folder)
    target = places.cache / f"{source.name}-{key}"
    names = ("train_images", "train_labels", "test_images", "test_labels")

    def fill(work: Path) -> None:
        pool = source.decode(folder)
        for name in names:
            np.save(work / f"{name}.npy", getattr(pool, name))

    def read(found: Path) -> Pool:
        try:
            return Pool(*(np.load(found / f"{name}.npy", mmap_mode="r") for name in names))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"the decoded data in {found} are damaged ({error}): remove that folder, it is "
                "made again"
            ) from None

    return open_sealed(target, fill, read), key
