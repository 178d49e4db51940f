"""An answer to a survey: read back as written, and nothing else passes."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.survey import About, LeftOut, MeanAndDeviation, MeasuredFeature, Survey


def made() -> Survey:
    features = [
        MeasuredFeature(name="age", edges=[30.0, 50.0]),
        MeasuredFeature(name="ward", levels=["a", "b"], lacking=True),
    ]
    return Survey(
        about=About(
            site="north",
            simulated=False,
            dataset="table",
            on="2026-11-22",
            floor=10,
            classes=["well", "sick"],
            features=features,
            file_features=[MeasuredFeature(name="width", edges=[64.0])],
        ),
        samples={"train": 60, "test": None},
        labels={"train": [40, 20], "test": [None, None]},
        left_out=LeftOut(count=12, missing={"age": 12, "ward": None}),
        histograms={"train": {"age": [None, 30, None], "ward": [20, None, None]}},
        means={"train": {"age": MeanAndDeviation(mean=41.5, sd=8.0)}},
        percentiles={"train": {"age": (30.0, 55.5)}},
        files={"width": [None, None]},
        file_percentiles={"width": (600.0, 600.0)},
    )


def test_what_is_written_is_read_back() -> None:
    config = made().to_config()
    assert Survey.from_config(config) == made()
    assert set(config) == {
        *("about", "samples", "labels", "left-out", "histograms", "means", "percentiles", "files"),
        "file-percentiles",
    }
    assert all(type(text) is str for text in config.values())


def test_parts_that_the_hospital_keeps_are_none() -> None:
    config = made().to_config()
    answer = Survey.from_config({"about": config["about"], "labels": config["labels"]})
    assert answer.labels == made().labels
    assert (answer.samples, answer.files, answer.means) == (None, None, None)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("about", "site", "a\u202eb"),
        ("about", "site", "x" * 201),
        ("about", "classes", ["one"]),
        ("about", "on", "yesterday"),
        ("about", "on", "2026-11-22\n"),
        ("about", "floor", 0),
        ("about", "simulated", "no"),
        ("about", "colour", 1),
        ("about", "features", [{"name": "age", "edges": [1.0, 1.0], "levels": []}]),
        ("about", "features", [{"name": "age", "edges": [1.0], "levels": ["a"]}]),
        ("about", "features", [{"name": "age", "edges": list(range(201)), "levels": []}]),
        ("samples", "train", -1),
        ("samples", "train", 10**10),
        ("samples", "train", 1.5),
        ("samples", "train", True),
        ("samples", "everything", 1),
        ("labels", "train", [40]),
        ("labels", "train", 40),
        ("left-out", "count", "12"),
        ("left-out", "missing", {"age\n": 1}),
        ("histograms", "train", {"age": [1, 2]}),
        ("histograms", "train", {"height": [1, 2]}),
        ("means", "train", {"age": {"mean": 1.0}}),
        ("means", "train", {"age": {"mean": 1.0, "sd": -1.0}}),
        ("means", "train", {"height": {"mean": 1.0, "sd": 1.0}}),
        ("percentiles", "train", {"age": [1.0]}),
        ("files", "width", [1]),
        ("files", "depth", [1]),
        ("file-percentiles", "depth", [1.0, 2.0]),
    ],
)
def test_what_cannot_be_is_refused(part: str, key: str, value: Any) -> None:
    config = made().to_config()
    content = json.loads(config[part])
    config[part] = json.dumps(content | {key: value})
    with pytest.raises(ValueError, match=r"."):
        Survey.from_config(config)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "{", "", "[" * 100_000, '{"a": 1e999}'])
def test_what_is_no_json_of_ours_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        Survey.from_config(made().to_config() | {"samples": text})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(part=st.sampled_from(sorted(made().to_config())), value=_JSON)
def test_no_value_breaks_the_reader(part: str, value: Any) -> None:
    with suppress(ValueError):
        Survey.from_config(made().to_config() | {part: json.dumps(value)})
