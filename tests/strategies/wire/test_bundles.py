"""Records that travel as one array come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models.contract.errors import SiteError
from strategies.wire.bundles import BUNDLE, Bundles, bundle, record_bytes, unbundle

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
    came = unbundle(sent)
    found = came.array_records["arrays"]
    assert sorted(found) == sorted(arrays)
    assert came.config_records["config"]["round"] == 1
    for name, array in arrays.items():
        got = found[name].numpy()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()


def test_a_message_that_was_not_bundled_stays_as_it_is() -> None:
    came = unbundle(content_of(arrays={"b": np.ones(2), "a": np.zeros(3)}))
    assert list(came.array_records["arrays"]) == ["b", "a"]


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
    with pytest.raises(SiteError, match="record 'arrays' cannot be opened"):
        unbundle(sent)


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
