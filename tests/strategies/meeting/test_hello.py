import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import CONFIG
from fedsilo.core.site_facts import SiteFacts, Sums
from fedsilo.strategies.meeting.checks import check_sums
from fedsilo.strategies.meeting.hello import read_hello

FACTS = SiteFacts(
    site="north",
    distribution="D1",
    input_shape=(2,),
    classes=2,
    label_counts={"train": [20, 16], "val": [2, 2], "test": [3, 2]},
    fingerprints={
        split: letter * 64 for split, letter in zip(("train", "test"), "ab", strict=True)
    },
    features=("age", "chol"),
    sums=Sums(np.array([36, 30]), np.array([72.0, -30.0]), np.array([200.0, 31.0])),
    schema="c" * 64,
    class_names=("healthy", "ill"),
    floor=10,
    measured=("train", "test"),
    software={"fedsilo": "0.1.0", "device": "cuda:0"},
)
KEYS = sorted(FACTS.to_config())
JSON_KEYS = ("label-counts", "fingerprints", "features", "class-names", "measured", "software")

texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "a/b", "[/red]", "\x1b[2J", "\u202e", "$\\frac$", "x" * 5000, "[" * 9999]),
    st.sampled_from(["9" * 5000, "NaN", "1e999", '{"train": {}}', "[[[[1]]]]", "null", "true"]),
)
numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -0.0]),
)
lists = st.one_of(
    st.lists(st.integers(-(2**40), 2**40), max_size=6),
    st.lists(st.floats(), max_size=6),
    st.lists(st.text(max_size=5), max_size=6),
    st.just([1] * 20_000),
)
values = st.one_of(texts, numbers, lists, st.booleans(), st.binary(max_size=20))
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda some: (
        st.lists(some, max_size=4)
        | st.dictionaries(st.sampled_from(["train", "val", "test", "x", "\n"]), some, max_size=3)
    ),
    max_leaves=8,
)
mutations = st.one_of(
    st.tuples(st.sampled_from(KEYS), values),
    st.tuples(st.sampled_from(KEYS), st.none()),
    st.tuples(st.sampled_from(JSON_KEYS), trees.map(json.dumps)),
)


def content_of(said: Mapping[str, Any]) -> RecordDict:
    return RecordDict({CONFIG: ConfigRecord(dict(said))})


def test_a_valid_hello_is_taken_as_it_was_said() -> None:
    facts = read_hello(content_of(FACTS.to_config()))
    assert facts.sums is not None
    assert FACTS.sums is not None
    assert facts.sums.squares.tolist() == FACTS.sums.squares.tolist()
    assert facts.measured == ("train", "test")
    assert facts.measured_splits == ["train", "test"]
    assert replace(facts, sums=None) == replace(FACTS, sums=None)


@pytest.mark.parametrize("shape", [[], [2, 2], [1, 2, 2, 2], [0], [-3], [2**21], [2**10] * 3])
def test_an_input_is_a_row_or_an_image(shape: list[int]) -> None:
    said = FACTS.to_config() | {"input-shape": shape}
    with pytest.raises(SiteError, match=r"shape is .*, which is impossible"):
        read_hello(content_of(said))


@settings(max_examples=200)
@given(changes=st.lists(mutations, min_size=1, max_size=3))
@example(changes=[("label-counts", "[" * 100_000)])
@example(changes=[("classes", 2**62)])
def test_whatever_a_hello_says_it_is_facts_or_one_line(changes: list[tuple[str, Any]]) -> None:
    said = FACTS.to_config()
    for key, value in changes:
        said.pop(key, None)
        if value is not None:
            said[key] = value
    try:
        facts = read_hello(content_of(said))
    except SiteError as error:
        told = str(error)
        assert told.isprintable()
        assert len(told) <= 380, "with the node's number before it a line stays below 400"
    else:
        assert 2 <= facts.classes <= 10_000
        assert len(facts.site) <= 64
        assert all(length > 0 for length in facts.input_shape)
        assert facts.distribution.isprintable()
        assert len(facts.software) <= 10
        assert all(map(str.isprintable, [*facts.software, *facts.software.values()]))
        assert sum(facts.sizes.values()) >= 0


@pytest.mark.parametrize(
    ("count", "total", "squares", "said"),
    [
        ([36, 36], [0.0, 0.0], [0.0, 0.0], ""),
        ([36, 1], [72.0, 3.0], [144.0, 9.0], ""),  # 36 twos, and a single three
        ([36, 1], [72.0, 3.0], [143.0, 9.0], "'sums-squares' are too small"),
        ([37, 1], [0.0, 0.0], [0.0, 0.0], "not whole numbers of at most its 36"),
        ([1.5, 1], [0.0, 0.0], [0.0, 0.0], "not whole numbers"),
        ([0, 1], [1.0, 0.0], [0.0, 0.0], "too small"),
        ([0, 1], [0.0, 0.0], [1e30, 0.0], "'sums-squares' are not 0"),
        ([1, 1], [1e19, 0.0], [1e38, 0.0], "beyond 1e+18"),
    ],
)
def test_sums_are_those_that_rows_can_have(
    count: list[float], total: list[float], squares: list[float], said: str
) -> None:
    sums = Sums(np.array(count), np.array(total), np.array(squares))
    fault = check_sums(replace(FACTS, sums=sums))
    assert said in str(fault or "")
    assert bool(fault) == bool(said)


def test_sums_of_no_feature_are_refused() -> None:
    nothing = Sums(np.zeros(0), np.zeros(0), np.zeros(0))
    images = replace(FACTS, input_shape=(3, 32, 32), features=(), sums=nothing)
    fault = check_sums(images)
    assert fault is not None
    assert "'features'" in fault


@settings(max_examples=100)
@given(
    rows=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=36),
    scale=st.sampled_from([1e-9, 1.0, 1e9]),
)
def test_sums_of_real_rows_are_never_refused(rows: list[float], scale: float) -> None:
    column = np.array(rows) * scale
    sums = Sums(*(np.array([x, x]) for x in (len(rows), column.sum(), (column**2).sum())))
    assert check_sums(replace(FACTS, sums=sums)) is None
