"""An array that came is opened by its header: nothing larger than its bytes is ever made of it."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.wire.records import ArrayError, read_header, unpack
from tests.fuzz.reply_mutations import npy

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)


def packed(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array("float32", (2, 3), stype, data)


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, NUMBERS)
    return file.getvalue()


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(k) for k in ("bool", "u1", "<i8", "<f2", "<f4", ">f4", "<f8")]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_what_numpy_wrote_is_read_as_numpy_reads_it(array: np.ndarray[Any, Any]) -> None:
    for made in (array, np.asfortranarray(array)):
        found = unpack(Array(made))
        assert (found.dtype, found.shape) == (made.dtype, made.shape)
        assert np.array_equal(found, made, equal_nan=array.dtype.kind == "f")
        assert found.flags.writeable


def test_a_header_says_type_and_shape_and_no_more_is_read() -> None:
    header = read_header(Array(NUMBERS))
    assert (header.dtype, header.shape, header.fortran) == (np.dtype("<f4"), (2, 3), False)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (npy("<f4", "(2000000000000,)", b"abcd"), "needs 8000000000"),
        (npy("<f4", "(2, 3)", NUMBERS.tobytes()[:-1]), "bytes, and float32"),
        (npy("<f4", "(2, 3)", NUMBERS.tobytes() + b"x"), "bytes, and float32"),
        (npy("<f4", "(-1,)", b""), "no array is"),
        (npy("<f4", "(True,)", b"abcd"), "no array is"),
        (npy("<f4", "(1,) * 40", b"abcd"), "no array's header"),
        (npy("<f4", f"({'1, ' * 40})", b"abcd"), "no array is"),
        (npy("<f4", "(0, 4611686018427387903)", b""), ""),
        (npy("|O", "(1,)", pickle.dumps(None)), "it holds object, no numbers"),
        (npy("<U4", "(1,)", bytes(16)), "no numbers"),
        (npy("<c8", "(1,)", bytes(8)), "no numbers"),
        (npy("<f4", "(" * 3000, b""), "no array's header"),
        (npy("<f4", "__import__('os').getpid()", b""), "no array's header"),
        (npy("<f4", "(2, 3)", NUMBERS.tobytes(), version=3), "no array's header"),
        (archive(), "no array's header"),
        (pickle.dumps(NUMBERS), "no array's header"),
        (b"", "no array's header"),
    ],
)
def test_bytes_that_are_no_array_are_refused_in_one_line(data: bytes, told: str) -> None:
    with pytest.raises(ArrayError) as caught:
        unpack(packed(data))
    assert told in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_record_of_another_kind_is_refused_and_its_word_is_cut() -> None:
    with pytest.raises(SiteError, match="it is of kind 'pickle") as caught:
        unpack(packed(Array(NUMBERS).data, "pickle" * 1000))
    assert len(str(caught.value)) < 100


def test_a_header_that_claims_terabytes_costs_no_memory() -> None:
    tracemalloc.start()
    with pytest.raises(ArrayError):
        unpack(packed(npy("<f8", "(1099511627776, 2)", bytes(100))))
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
