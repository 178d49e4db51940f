"""The public image sets of the UEFL experiments: how each is decoded and cut into silos.

``digits`` comes with scikit-learn (1,797 real handwritten digits, UCI). The others are read from
the data directory, in the layout of their public sources.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.datasets.shifted.batches import CIFAR10, CIFAR100, decode_batches, list_batches
from fedsilo.datasets.shifted.idx import Bytes, read_labelled_images
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from fedsilo.datasets.shifted.pools import Pool, Source
from fedsilo.datasets.shifted.signs import SIGNS, decode_signs, list_signs


def _decode_digits(_: Path) -> Pool:
    """Load scikit-learn's 8x8 digits, enlarged to 16x16 for networks with three 2x2 poolings.

    The folder is not used.

    Returns:
        A pool with pixels from 0 to 255. The last fifth of the images, in file order, is the test
        part.
    """
    import torch

    # The file that load_digits reads, without the seconds in which scikit-learn imports
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    images, labels = table[:, :-1], table[:, -1].astype(int)
    small = torch.from_numpy(images).reshape(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
    pixels = large.squeeze(1).float().numpy()
    split = len(pixels) * 4 // 5  # no public split exists: the last fifth, in file order, tests
    return Pool(pixels[:split], labels[:split], pixels[split:], labels[split:])


def _decode_idx(folder: Path) -> Pool:
    """Read MNIST's four IDX files in ``folder`` into a ``Pool`` of training and test images.

    The images keep the order of the files.

    Raises:
        DataError: a file is unusable, or training and test images differ in size.
    """
    train, train_labels = _read_idx_pair(folder, "train")
    test, test_labels = _read_idx_pair(folder, "t10k")
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"{folder}: training images are {train.shape[1:]} pixels, but test images "
            f"{test.shape[1:]}: download both again"
        )
    return Pool(train, train_labels, test, test_labels)


def _read_idx_pair(folder: Path, part: str) -> tuple[Bytes, Bytes]:
    """Read images (n, height, width) and labels (n,) of MNIST's part 'train' or 't10k'.

    Raises:
        DataError: a file is missing or unusable, the numbers of images and labels differ, or a
            label is above 9.
    """
    images = folder / f"{part}-images-idx3-ubyte.gz"
    labels = folder / f"{part}-labels-idx1-ubyte.gz"
    return read_labelled_images(images, labels, 10)


_cut = partial(Source, train_size=2000, test_size=500)  # images of a silo in the UEFL notes

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(name="digits", classes=10, mean=(0.3053,), std=(0.3181,), decode=_decode_digits),
        _cut(
            name="mnist", classes=10, mean=(0.1307,), std=(0.3081,), decode=_decode_idx, noise=False
        ),
        _cut(name="fmnist", classes=10, mean=(0.2860,), std=(0.3530,), decode=_decode_idx),
        _cut(
            name="cifar10",
            classes=CIFAR10.classes,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            decode=partial(decode_batches, CIFAR10),
            listed=partial(list_batches, CIFAR10),
            forms=("cifar-10-batches-py",),
        ),
        _cut(
            name="cifar100",
            classes=CIFAR100.classes,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            decode=partial(decode_batches, CIFAR100),
            listed=partial(list_batches, CIFAR100),
            forms=("cifar-100-python",),
            train_size=4000,
        ),
        _cut(
            name="gtsrb",
            classes=SIGNS,
            mean=(0.3403, 0.3121, 0.3214),
            std=(0.2724, 0.2608, 0.2669),
            decode=decode_signs,
            listed=list_signs,
        ),
        *MEDMNIST.values(),
    )
}
