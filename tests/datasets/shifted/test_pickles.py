"""The reader of python batches: what CIFAR's hold, and nothing that runs."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.datasets.shifted.batches import read_batch
from fedsilo.models.contract.errors import DataError
from tests.support.colour import flat_planes, python2_batch, read_or_refused

PLANES = flat_planes(7, 3)
BATCH = python2_batch(PLANES, [4, 0, 9])


def _read(tmp_path: Path, content: bytes) -> dict[bytes, Any]:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    return read_batch(path)


def _same(one: dict[bytes, Any], two: dict[bytes, Any]) -> bool:
    data = one.pop(b"data"), two.pop(b"data")
    return np.array_equal(*data) and one == two


def test_a_batch_of_python_2_is_read_as_pythons_own_reader_does(tmp_path: Path) -> None:
    batch = _read(tmp_path, BATCH)
    assert batch[b"labels"] == [4, 0, 9]
    assert batch[b"data"].dtype == np.uint8
    assert batch[b"data"][1, [0, 1024, 2048]].tolist() == [8, 9, 10]
    assert batch[b"filenames"] == [b"leptodactylus.png"] * 3
    assert _same(batch, pickle.loads(BATCH, encoding="bytes"))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_a_batch_that_python_3_wrote_anew_is_read_too(tmp_path: Path, protocol: int) -> None:
    held = {"labels": [300, -1, 70000], "data": PLANES, "batch_label": "one", "none": None}
    batch = _read(tmp_path, pickle.dumps(held, protocol))
    assert batch[b"labels"] == [300, -1, 70000]
    assert np.array_equal(batch[b"data"], PLANES)


class _Runs:
    """A pickle of it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_wants_to_run_code_is_refused_and_runs_nothing(
    tmp_path: Path, protocol: int
) -> None:
    content = pickle.dumps({b"labels": [1], b"data": _Runs(tmp_path / "made")}, protocol)
    with pytest.raises(DataError, match=r"wants to run '(posix|nt).mkdir'.*nothing .* was run"):
        _read(tmp_path, content)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"(S'touch made'\nios\nsystem\n.", r"wants to run 'os\.system'.*nothing of it was run"),
        (
            b"\x80\x02}(U\x04datacnumpy\nndarray\n)\x81u.",
            r"not a Python batch of CIFAR \(TypeError\)",
        ),
        (b"\x80\x02U\x011Q.", r"\(UnpicklingError\)"),
        (b"\x80\x02}(U\x04datacnumpy\ndtype\nU\x01O\x85Ru.", r"\(TypeError\)"),
        (BATCH.replace(b"U\x02u1", b"U\x02f8"), r"\(TypeError\)"),
        (BATCH.replace(b"\x89T", b"\x88T"), r"\(TypeError\)"),
        (BATCH.replace(b"J\x00\x0c\x00\x00", b"J\x01\x0c\x00\x00"), r"truncated .*\(ValueError\)"),
        (b"\x80\x02]q\x01.", r"truncated or not a Python batch of CIFAR \(TypeError\)"),
        (b"", "truncated"),
        (b"\x80\x02(((e.", "truncated"),
    ],
)
def test_what_no_batch_holds_is_refused_in_a_line(
    tmp_path: Path, content: bytes, says: str
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        _read(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert "download it again" in str(caught.value)


@given(keep=st.integers(0, len(BATCH) - 1))
def test_a_batch_cut_short_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, keep: int
) -> None:
    with pytest.raises(DataError, match=r"truncated|wants to run"):
        _read(tmp_path_factory.getbasetemp(), BATCH[:keep])


_HEADS = [i for i in range(len(BATCH)) if i < 400 or i > len(BATCH) - 120]


@given(
    changes=st.lists(st.tuples(st.sampled_from(_HEADS), st.integers(0, 255)), max_size=4),
    tail=st.binary(max_size=8),
)
def test_an_altered_batch_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], tail: bytes
) -> None:
    content = bytearray(BATCH)
    for place, value in changes:
        content[place] = value
    batch = read_or_refused(lambda: _read(tmp_path_factory.getbasetemp(), bytes(content) + tail))
    assert batch is None or all(isinstance(key, bytes) for key in batch)


@given(content=st.binary(max_size=60))
def test_bytes_that_are_no_pickle_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    batch = read_or_refused(lambda: _read(tmp_path_factory.getbasetemp(), b"\x80\x02" + content))
    assert batch is None or isinstance(batch, dict)


def test_lists_that_hold_one_another_many_times_over_are_not_written_out(tmp_path: Path) -> None:
    doubled = b"".join(
        b"(h" + bytes([i]) + b"h" + bytes([i]) + b"lq" + bytes([i + 1]) for i in range(60)
    )
    held = b"\x80\x02]q\x00" + doubled + b"U\x06latin1\x86."
    with pytest.raises(DataError, match="truncated or not a Python batch"):
        _read(tmp_path, held)


def test_a_file_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none cannot be read: No such file"):
        read_batch(tmp_path / "none")
