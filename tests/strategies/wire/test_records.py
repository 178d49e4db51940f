"""An array that came is opened by its header: nothing larger than its bytes is ever made of it."""

import io
import json
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsilo.core.errors import SiteError
from fedsilo.strategies.wire.records import (
    BUNDLE,
    ArrayError,
    Bundles,
    bundle,
    open_bundle,
    packed_bytes,
    read_header,
    record_bytes,
    to_record,
    unbundle,
    unpack,
)
from tests.fuzz.reply_mutations import npy
from tests.support.errors import refuses

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


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(k) for k in ("bool", "u1", "<i8", "<f2", "<f4", ">f4", "<f8")]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_an_array_is_packed_to_the_bytes_that_flower_gives_it(array: np.ndarray[Any, Any]) -> None:
    for made in (array, np.asfortranarray(array), array[..., ::-1] if array.ndim else array):
        ours, flowers = to_record({"a": made})["a"], Array(np.asarray(made, order="C"))
        assert (ours.dtype, ours.shape, ours.stype) == (
            flowers.dtype,
            flowers.shape,
            flowers.stype,
        )
        assert ours.data == flowers.data
        assert packed_bytes(np.asarray(made, order="C")) == len(flowers.data)


def test_the_same_arrays_are_packed_once_and_under_other_names_in_another_record() -> None:
    packed: dict[Any, Any] = {}
    arrays = {"b": NUMBERS, "a": NUMBERS + 1}
    first = to_record(arrays, packed)
    assert list(first) == ["a", "b"]
    assert to_record(dict(arrays), packed) is first
    other = to_record({"c": NUMBERS}, packed)
    assert list(other) == ["c"]
    assert other["c"].data is first["b"].data


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
        (npy("<f4", "(1,) * 40", b"abcd"), "not the header of an array"),
        (npy("<f4", f"({'1, ' * 40})", b"abcd"), "no array is"),
        (npy("<f4", "(0, 4611686018427387903)", b""), ""),
        (npy("|O", "(1,)", pickle.dumps(None)), "it holds object, not numbers"),
        (npy("<U4", "(1,)", bytes(16)), "not numbers"),
        (npy("<c8", "(1,)", bytes(8)), "not numbers"),
        (npy("<f4", "(" * 3000, b""), "not the header of an array"),
        (npy("<f4", "__import__('os').getpid()", b""), "not the header of an array"),
        (npy("<f4", "(2, 3)", NUMBERS.tobytes(), version=3), "not the header of an array"),
        (archive(), "not the header of an array"),
        (pickle.dumps(NUMBERS), "not the header of an array"),
        (b"", "not the header of an array"),
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


KINDS = ["bool", "uint8", "int64", "float16", "float32", "float64"]
ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(kind) for kind in KINDS]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


def content_of(**records: dict[str, np.ndarray]) -> RecordDict:
    content = RecordDict({"config": ConfigRecord({"round": 1})})
    for name, arrays in records.items():
        content[name] = ArrayRecord({key: Array(array) for key, array in arrays.items()})
    return content


@given(st.dictionaries(st.text("abc./", min_size=1), ARRAYS, max_size=5))
def test_what_is_bundled_opens_to_the_same_bytes(arrays: dict[str, np.ndarray]) -> None:
    sent = bundle(content_of(arrays=arrays, figures={"only": np.ones(2)}))
    if len(arrays) > 1:
        assert list(sent.array_records["arrays"]) == [BUNDLE]
    assert list(sent.array_records["figures"]) == ["only"]
    received = unbundle(sent)
    found = received.array_records["arrays"]
    assert sorted(found) == sorted(arrays)
    assert received.config_records["config"]["round"] == 1
    for name, array in arrays.items():
        got = found[name].numpy()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()


def test_a_message_that_was_not_bundled_stays_as_it_is() -> None:
    received = unbundle(content_of(arrays={"b": np.ones(2), "a": np.zeros(3)}))
    assert list(received.array_records["arrays"]) == ["b", "a"]


def test_the_same_arrays_are_put_together_once_and_under_other_names_again() -> None:
    one, two = Array(np.ones(2)), Array(np.zeros(3))
    made: Bundles = {}
    bundles = []
    for names in ("ab", "ab", "cd"):
        record = ArrayRecord(dict(zip(names, (one, two), strict=True)))
        sent = bundle(RecordDict({"arrays": record}), made)
        bundles.append(sent.array_records["arrays"][BUNDLE])
    assert bundles[0].data is bundles[1].data
    assert bundles[2].data != bundles[0].data


@pytest.mark.parametrize("kept", [0, 7, 60])
def test_a_bundle_that_was_cut_short_is_refused(kept: int) -> None:
    sent = bundle(content_of(arrays={"a": np.ones(20), "b": np.ones(3)}))
    whole = sent.array_records["arrays"][BUNDLE].numpy()
    sent["arrays"] = ArrayRecord({BUNDLE: Array(whole[:kept])})
    with refuses(SiteError, "arrays"):
        unbundle(sent)


def packed_bundle(header: object, data: bytes = b"") -> RecordDict:
    """Return a bundle whose header says whatever it is told to."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + data
    return RecordDict({"arrays": ArrayRecord({BUNDLE: Array(np.frombuffer(content, np.uint8))})})


WHOLE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"w": WHOLE | {"dtype": "F99"}}, "is not a safetensors file"),
        ({"w": WHOLE | {"dtype": {"F32": 1}}}, "is not a safetensors file"),
        ({"w": WHOLE | {"shape": [2**40]}}, "is not a safetensors file"),
        ({"w": WHOLE | {"shape": [-1]}}, "is not a safetensors file"),
        ({"w": WHOLE | {"shape": [True]}}, "is not a safetensors file"),
        ({"w": WHOLE | {"shape": [1] * 40}}, "an unusable name, shape or type"),
        ({"w": WHOLE | {"data_offsets": [4, 8]}}, "is not a safetensors file"),
        ({"w": WHOLE | {"data_offsets": [0]}}, "is not a safetensors file"),
        ({"w": WHOLE, "v": WHOLE}, "is not a safetensors file"),
        ({"w": WHOLE | {"shape": [2], "dtype": "BF16"}}, "no"),
        ({"w" * 600: WHOLE}, "an unusable name, shape or type"),
        ([1], "is not a safetensors file"),
        ({"w": 1}, "is not a safetensors file"),
        (b"[" * 50_000, "is not a safetensors file"),
        (b"{", "is not a safetensors file"),
    ],
)
def test_a_bundle_of_another_form_is_refused_in_one_line(header: object, told: str) -> None:
    with refuses(SiteError, "arrays") as caught:
        unbundle(packed_bundle(header, bytes(4)))
    assert told in str(caught.value)


def test_opened_refuses_a_bundle_larger_than_what_may_be_in_it() -> None:
    sent = bundle(content_of(arrays={"a": np.zeros(3 * 2**20, np.uint8), "b": np.zeros(2**21)}))
    array = sent.array_records["arrays"][BUNDLE]
    assert len(open_bundle("arrays", array, 20 * 2**20)) == 2
    with refuses(SiteError, 1000):
        open_bundle("arrays", array, 1000)


def test_a_message_of_many_records_is_not_opened() -> None:
    """Each may be as large as the model: a thousand would take a thousand times its memory."""
    one = bundle(content_of(arrays={"a": np.zeros(3), "b": np.ones(3)}))["arrays"]
    few, many = (RecordDict({f"r{n}": one for n in range(count)}) for count in (16, 17))
    assert all(list(record) == ["a", "b"] for record in unbundle(few).array_records.values())
    with refuses(SiteError, 17, 16):
        unbundle(many)


def test_what_is_no_array_of_bytes_is_refused() -> None:
    with pytest.raises(SiteError, match="was it altered"):
        unbundle(content_of(arrays={BUNDLE: np.ones(3)}))


def test_arrays_of_objects_are_left_alone() -> None:
    sent = bundle(content_of(arrays={"a": np.array(["x"]), "b": np.ones(3)}))
    assert list(sent.array_records["arrays"]) == ["a", "b"]


def test_words_weigh_their_letters_and_arrays_their_bytes() -> None:
    words = RecordDict({"config": ConfigRecord({"site": "", "n": 12})})
    assert record_bytes(words) == 4 + 1 + 2
    heavier = record_bytes(content_of(arrays={"w": np.zeros(1010, np.float32)}))
    assert heavier - record_bytes(content_of(arrays={"w": np.zeros(10, np.float32)})) == 4000
