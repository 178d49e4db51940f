from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.datasets.io.array_files import Wanted, read_arrays
from fedsilo.models.contract.errors import DataError
from tests.fuzz.reply_mutations import npy

WANTED = {"x": Wanted("iu", 8, ((None,), (None, 2)), 100, "up to 100 whole numbers")}


def archive(folder: Path, **members: bytes) -> Path:
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(f"{name}.npy", content)
    return path


def written(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("array", [np.arange(7), np.arange(6).reshape(3, 2), np.zeros(0, "u1")])
def test_an_array_that_is_wanted_is_read(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    for made in (array, np.asfortranarray(array)):
        assert np.array_equal(read_arrays(archive(tmp_path, x=written(made)), WANTED)["x"], array)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (written(np.zeros(3)), r"x is float64 \(3,\), and must be up to 100 whole numbers"),
        (written(np.zeros(101, int)), r"x is int64 \(101,\)"),
        (written(np.zeros((3, 3), int)), r"x is int64 \(3, 3\)"),
        (npy("<i8", "(2000000000000,)", b""), "is damaged or no npz file"),
        (npy("|O", "(1,)", b"\x80\x04N."), "cannot be loaded when allow_pickle=False"),
        (npy("<i8", "(2,)", bytes(8)), "expected 16 bytes got 8"),
        (b"no array", "x is no array"),
        (b"", "x is no array"),
    ],
)
def test_a_member_of_another_kind_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        read_arrays(archive(tmp_path, x=content), WANTED)


@pytest.mark.filterwarnings("ignore:Reading `.npy`")
def test_any_header_that_is_damaged_is_read_or_refused(tmp_path: Path) -> None:
    """Of some, numpy's own reader lets errors of Python's tokenizer through."""
    whole, refused = written(np.arange(6)), list[str]()
    for at in range(len(whole) - 48):
        for damage in (b"\0", b"{", b"'", b"\n ", b'"""'):
            content = whole[:at] + damage + whole[at + len(damage) :]
            path = archive(tmp_path, x=content)
            try:
                assert read_arrays(path, WANTED)["x"].dtype.kind in "iu"
            except DataError as error:  # nothing else
                refused.append(str(error))
    assert len(refused) > len(whole)
    assert all("a.npz" in told and told.isprintable() for told in refused)


def test_an_array_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="array 'x' is missing"):
        read_arrays(archive(tmp_path, y=written(np.zeros(3, int))), WANTED)


def test_what_is_no_archive_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match="is damaged or no npz file"):
        read_arrays(tmp_path / "a.npz", WANTED)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_arrays(tmp_path / "b.npz", WANTED)
