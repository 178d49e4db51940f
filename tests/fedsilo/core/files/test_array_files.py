"""Arrays of an npz file: read as numpy wrote them, and refused with the file and the reason."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.files.array_files import read_arrays
from tests.support.errors import refuses

MOST = 10_000  # bytes of one array


def _npy(array: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asanyarray(array), **options)
    return content.getvalue()


def _write(path: Path, content: bytes, name: str = "x.npy", **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.zeros((0, 4))]
)
def test_arrays_are_read_in_their_order_and_others_left(array: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, other=np.ones(2), x=array, y=np.array(["a", "b"]))
    found = read_arrays(path, ["y", "x"], MOST)
    assert list(found) == ["y", "x"]
    assert np.array_equal(found["x"], array)
    assert found["x"].flags.f_contiguous == array.flags.f_contiguous
    assert found["y"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    "content",
    [
        b"no array",
        _npy(np.arange(6))[:-1],  # a value is cut
        _npy(np.arange(6)) + b"more",
        _npy(np.array([{}], dtype=object), allow_pickle=True),
        _npy(np.arange(6)).replace(b"(6,), ", b"(-6,),"),
        _npy(np.arange(6)).replace(b"(6,), ", b"(6.,),"),
        b"\x93NUMPY\x09\x00" + _npy(np.arange(6))[8:],  # a version of the future
        _npy(np.zeros(MOST)),
    ],
)
def test_what_numpy_did_not_write_is_refused(content: bytes, tmp_path: Path) -> None:
    with refuses(DataError, tmp_path / "a.npz"):
        read_arrays(_write(tmp_path / "a.npz", content), ["x"], MOST)


def test_a_missing_array_or_file_and_another_packing_are_named(tmp_path: Path) -> None:
    with refuses(DataError, tmp_path / "none.npz"):
        read_arrays(tmp_path / "none.npz", ["x"], MOST)
    path = _write(tmp_path / "a.npz", _npy(np.arange(6)))
    with refuses(DataError, path, "'y'"):
        read_arrays(path, ["y"], MOST)
    _write(path, _npy(np.arange(6)), compression=zipfile.ZIP_BZIP2)
    with refuses(DataError, path, "'deflate'"):
        read_arrays(path, ["x"], MOST)
    _write(path, _npy(np.arange(6)))
    packed = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(mark) + place] |= 1  # a password
    path.write_bytes(packed)
    with refuses(DataError, path, "numpy"):
        read_arrays(path, ["x"], MOST)
