"""Copy the data that travel: python benchmarks/gpu_kit/cut_data.py SET FROM TO, SET one of these.

grey: of MNIST and Fashion-MNIST the first 20,000 training and 5,000 test images, which hold all
that nine silos of 2,000 and 500 take, since they are cut in file order. fashion: Fashion-MNIST
whole, since 'split.partition=unseen' takes images from all of it. mammograms: mini-MIAS whole.
signs: GTSRB whole, as one archive.
"""

import gzip
import lzma
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

_TRAIN, _TEST = 20_000, 5_000  # images


def grey(source: Path, target: Path) -> None:
    """Copy the first images of MNIST and Fashion-MNIST."""
    for name in ("mnist", "fashion_mnist"):
        for part, count in (("train", _TRAIN), ("t10k", _TEST)):
            for kind in ("images-idx3", "labels-idx1"):
                file = f"{name}/{part}-{kind}-ubyte.gz"
                cut_idx(source / file, target / file, count)


def cut_idx(source: Path, target: Path, count: int) -> None:
    """Write the first ``count`` items of a gzipped IDX file, the same bytes each time."""
    with gzip.open(source) as file:
        start = file.read(4)
        shape = struct.unpack(f">{start[3]}I", file.read(4 * start[3]))
        size = 1
        for length in shape[1:]:
            size *= length
        kept = min(count, shape[0])
        content = start + struct.pack(f">{start[3]}I", kept, *shape[1:]) + file.read(kept * size)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(content)


def fashion(source: Path, target: Path) -> None:
    """Copy Fashion-MNIST."""
    shutil.copytree(source / "fashion_mnist", target / "fashion_mnist")


def mammograms(source: Path, target: Path) -> None:
    """Copy mini-MIAS."""
    shutil.copytree(source / "mini_mias", target / "mini_mias")


def signs(source: Path, target: Path) -> None:
    """Pack GTSRB; a pixel's colours as differences from the pixel before save a fourteenth."""
    target.mkdir(parents=True, exist_ok=True)
    filters = [
        {"id": lzma.FILTER_DELTA, "dist": 3},
        {"id": lzma.FILTER_LZMA2, "preset": 6, "pb": 0, "lc": 4},
    ]
    with (
        lzma.open(target / "signs.tar.xz", "wb", filters=filters) as file,
        tarfile.open(fileobj=file, mode="w|") as packed,
    ):
        packed.add(source / "GTSRB", "GTSRB")


SETS: Mapping[str, Callable[[Path, Path], None]] = {
    "grey": grey,
    "fashion": fashion,
    "mammograms": mammograms,
    "signs": signs,
}


if __name__ == "__main__":
    name, source, target = sys.argv[1:]
    SETS[name](Path(source), Path(target))
