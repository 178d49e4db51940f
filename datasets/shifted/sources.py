"""The public images by name: where they are, how they are decoded, how the UEFL notes cut them.

``digits`` ships with scikit-learn (1,797 real handwritten digits, UCI); the others are files of
the data directory, laid out as their public sources lay them out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.public_files import RemoteFile
from fedsilo.datasets.shifted.batches import CIFAR10, CIFAR100, Layout, decode_batches, list_batches
from fedsilo.datasets.shifted.idx import read_labelled_images
from fedsilo.datasets.shifted.pools import Pool, Source
from fedsilo.datasets.shifted.signs import SIGNS, decode_signs, list_signs
from fedsilo.models.contract.errors import DataError


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
    train, test = (
        read_labelled_images(
            folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz", 10
        )
        for part in ("train", "t10k")
    )
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{folder}: training images are {train[0].shape[1:]} pixels and test images "
            f"{test[0].shape[1:]}: download both again"
        )
    return Pool(*train, *test)


_MNIST_FILES = (
    RemoteFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    RemoteFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    RemoteFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    RemoteFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
)
_FASHION_FILES = (
    RemoteFile("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    RemoteFile("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
    RemoteFile("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    RemoteFile("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
)
# The archive that torchvision takes, GTSRB-Training_fixed.zip, is the smaller one of a preliminary
# round: 26,640 images
_GTSRB_FILES = (
    RemoteFile(
        *("GTSRB_Final_Training_Images.zip", "f33fd80ac59bff73c82d25ab499e03a3", 276_294_756, "")
    ),
    RemoteFile(
        *("GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185", 88_978_620, "")
    ),
    RemoteFile(
        *("GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5", 99_620),
        unpacked="GTSRB/Final_Test",
    ),
)


def _cifar(layout: Layout, md5: str, size: int, folders: tuple[str, str], **figures: Any) -> Source:
    """Return CIFAR-10 or CIFAR-100; ``folders`` are those of the binary and of the python form."""
    archive = RemoteFile(f"{layout.name[:5]}-{layout.classes}-binary.tar.gz", md5, size, "")
    return Source(
        layout.name,
        folders[0],
        url="https://www.cs.toronto.edu/~kriz/",
        licence="none is stated; cite Krizhevsky 2009",
        terms="no licence is stated; the source asks to cite Krizhevsky 2009",
        files=(archive,),
        classes=layout.classes,
        decode=partial(decode_batches, layout),
        listed=partial(list_batches, layout),
        forms=folders[1:],
        test_size=500,
        **figures,
    )


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", classes=10, mean=(0.3053,), std=(0.3181,), decode=_decode_digits),
        Source(
            "mnist",
            classes=10,
            mean=(0.1307,),
            std=(0.3081,),
            decode=_decode_idx,
            noise=False,
            train_size=2000,
            test_size=500,
            folder="mnist",
            files=_MNIST_FILES,
            url="https://ossci-datasets.s3.amazonaws.com/mnist/",
            licence="CC BY-SA 3.0",
        ),
        Source(
            "fmnist",
            classes=10,
            mean=(0.2860,),
            std=(0.3530,),
            decode=_decode_idx,
            train_size=2000,
            test_size=500,
            folder="fashion_mnist",
            files=_FASHION_FILES,
            url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            licence="MIT",
        ),
        _cifar(
            *(CIFAR10, "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
            ("cifar-10-batches-bin", "cifar-10-batches-py"),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            train_size=2000,
        ),
        _cifar(
            *(CIFAR100, "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
            ("cifar-100-binary", "cifar-100-python"),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            train_size=4000,
        ),
        Source(
            "gtsrb",
            classes=SIGNS,
            mean=(0.3403, 0.3121, 0.3214),
            std=(0.2724, 0.2608, 0.2669),
            decode=decode_signs,
            train_size=2000,
            test_size=500,
            folder="GTSRB",
            listed=list_signs,
            files=_GTSRB_FILES,
            url="https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/",
            licence="for research; none is stated",
            terms="for research, as far as is known; no licence is stated",
        ),
    )
}
