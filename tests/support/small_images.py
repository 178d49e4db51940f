"""Small data files in the layout of the public ones, whose images tell their own position."""

import gzip
import io
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fedsilo.core.files.locations import Places

IdxWriter = Callable[[Path, npt.NDArray[np.uint8]], Path]


@pytest.fixture(scope="session")
def write_idx() -> IdxWriter:
    """Return a writer of an array of bytes as a gzipped IDX file."""

    def write(path: Path, array: npt.NDArray[np.uint8]) -> Path:
        header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(header + array.tobytes(), mtime=0))
        return path

    return write


@pytest.fixture
def small_places(tmp_path: Path, write_idx: IdxWriter) -> Places:
    """Return a data folder with 200 training and 50 test images for mnist and fmnist.

    Every pixel of training image i is i, of test image i 200 + i; its label is i modulo 10.
    """
    for folder in ("mnist", "fashion_mnist"):
        for part, first, count in (("train", 0, 200), ("t10k", 200, 50)):
            values = np.arange(first, first + count, dtype=np.uint8)
            images = np.broadcast_to(values[:, None, None], (count, 16, 16))
            write_idx(tmp_path / "data" / folder / f"{part}-images-idx3-ubyte.gz", images)
            write_idx(tmp_path / "data" / folder / f"{part}-labels-idx1-ubyte.gz", values % 10)
    return Places(tmp_path / "data", tmp_path / "cache")


@pytest.fixture
def own_log() -> Iterator[io.StringIO]:
    """Collect the lines that go to this machine's own log."""
    text = io.StringIO()
    handler, log = logging.StreamHandler(text), logging.getLogger("flwr")
    log.addHandler(handler)
    yield text
    log.removeHandler(handler)
