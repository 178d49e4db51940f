import gzip
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsilo.core.errors import DataError
from fedsilo.datasets.shifted.idx import read_idx, read_labelled_images
from tests.support.errors import refuses

IdxWriter = Callable[[Path, npt.NDArray[np.uint8]], Path]
CONTENT = b"\0\0\x08\x02" + struct.pack(">2I", 2, 3) + bytes([1, 2, 3, 4, 5, 6])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx") / "some-idx2-ubyte.gz"


@budget(max_examples=25, deadline=None)
@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)))
def test_any_array_of_bytes_comes_back_as_it_was_written(
    path: Path, write_idx: IdxWriter, array: npt.NDArray[np.uint8]
) -> None:
    found = read_idx(write_idx(path, array))
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)


@budget(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_by_its_path(path: Path, data: st.DataObject) -> None:
    packed = gzip.compress(CONTENT)
    path.write_bytes(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(DataError, match=str(path)):
        read_idx(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (CONTENT + b"\0", r"has more than the 6 bytes that its header \(2, 3\)"),
        (CONTENT[:-1], r"has 5 bytes, but its header \(2, 3\) says 6 bytes"),
        (b"\0\0\x0d" + CONTENT[3:], "not an IDX file of 8-bit images or labels"),  # 0x0d: float32
        (b"PK\x08" + CONTENT[3:], "not an IDX file of 8-bit images or labels"),
        (b"\0\0\x08\0", "not an IDX file"),
    ],
)
def test_a_gzip_file_of_something_else_is_refused(path: Path, content: bytes, says: str) -> None:
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=says):
        read_idx(path)


@pytest.mark.parametrize(("shape", "body"), [((65536,) * 4, b""), ((1,) * 70, b"x")])
def test_a_header_of_an_impossible_shape_is_refused(
    path: Path, shape: tuple[int, ...], body: bytes
) -> None:
    header = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(gzip.compress(header + body))
    with pytest.raises(DataError, match=str(path)):
        read_idx(path)


def test_no_more_is_unpacked_than_the_header_says(path: Path) -> None:
    # A gigabyte of zeros in a megabyte of gzip, behind a header of six bytes
    zeros = gzip.compress(bytes(2**26))
    path.write_bytes(gzip.compress(CONTENT) + zeros * 16)
    tracemalloc.start()
    with refuses(DataError, 2, 3, 6):
        read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_no_memory_is_taken_for_bytes_that_are_only_declared(path: Path) -> None:
    header = b"\0\0\x08\x02" + struct.pack(">2I", 2**13, 2**13)
    path.write_bytes(gzip.compress(header + bytes(100)))
    tracemalloc.start()
    with refuses(DataError, 100):
        read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    path.write_bytes(gzip.compress(header[:4] + struct.pack(">2I", 2**16, 2**16) + bytes(100)))
    with pytest.raises(DataError, match=r"4,294,967,296 bytes"):
        read_idx(path)


def test_an_altered_image_byte_is_caught_by_the_checksum_of_the_file(path: Path) -> None:
    packed = bytearray(gzip.compress(CONTENT, compresslevel=0))
    packed[packed.index(bytes([1, 2, 3, 4, 5, 6])) + 2] ^= 1
    path.write_bytes(packed)
    with pytest.raises(DataError, match=str(path)):
        read_idx(path)


def test_a_missing_file_and_a_folder_in_its_place_are_refused(tmp_path: Path) -> None:
    with refuses(DataError, "nowhere.gz"):
        read_idx(tmp_path / "nowhere.gz")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        read_idx(tmp_path)


def _pair(
    folder: Path, write: IdxWriter, shape: tuple[int, ...], labels: list[int]
) -> tuple[Path, Path]:
    pixels = np.zeros(shape, np.uint8)
    targets = np.array(labels, np.uint8)
    return write(folder / "images.gz", pixels), write(folder / "labels.gz", targets)


def test_a_label_out_of_range_is_refused_with_its_position(
    tmp_path: Path, write_idx: IdxWriter
) -> None:
    files = _pair(tmp_path, write_idx, (3, 4, 5), [9, 10, 11])
    with refuses(DataError, "labels.gz", "10", "1"):
        read_labelled_images(*files, 10)


@pytest.mark.parametrize(("shape", "labels"), [((3, 4, 5), [1, 2]), ((2, 20), [1, 2])])
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, write_idx: IdxWriter, shape: tuple[int, ...], labels: list[int]
) -> None:
    with refuses(DataError, "images.gz", "labels.gz"):
        read_labelled_images(*_pair(tmp_path, write_idx, shape, labels), 10)
