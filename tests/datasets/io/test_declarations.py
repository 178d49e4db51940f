"""YAML is read without a doubt, and what a model refuses is one line without a value."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict

from fedsilo.datasets.io.declarations import (
    Declared,
    Text,
    YamlError,
    checked,
    number,
    parse_yaml,
    settings_model,
    whole,
)
from fedsilo.models.contract.errors import DataError
from fedsilo.server_app.config.experiments import Tuning


class Ward(Declared):
    model_config = ConfigDict(title="a ward")

    name: Text
    beds: Annotated[int, whole(1, 99)] = 1


class Hospital(Declared):
    model_config = ConfigDict(title="the hospital")

    wards: list[Ward]
    by_name: dict[str, list[Ward]] = {}  # noqa: RUF012  # pydantic copies it
    share: Annotated[float, number(0.0, 0.5)] = 0.1


def refusal(content: Any) -> str:
    with pytest.raises(DataError) as caught:
        checked(Hospital, content, lambda fault: DataError(f"h.yaml: {fault.sentence}"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "the hospital must be a mapping with the keys wards, by-name, share"),
        ({"ward": []}, "the hospital has the unknown key 'ward'; did you mean 'wards'?"),
        ({"wards": [], "x" * 99: 1}, "the unknown key '" + "x" * 59 + "…'; allowed: wards"),
        ({"wards": [], "a\nb": 1}, "the unknown key 'a b'; allowed"),
        ({}, "the hospital lacks the key 'wards'"),
        ({"wards": {}}, "'wards' must be a list"),
        ({"wards": ["Smith"]}, "a ward must be a mapping with the keys name, beds"),
        ({"wards": [{"beds": 1}]}, "a ward lacks the key 'name'"),
        ({"wards": [{"name": 1, "bed": 1}]}, "a ward has the unknown key 'bed'; did you mean"),
        ({"wards": [{"name": None}]}, "'wards', item 1, 'name' must be a text or a number; of"),
        ({"wards": [{"name": "a", "beds": "9"}]}, "item 1, 'beds' must be a whole number from 1"),
        ({"wards": [{"name": "a", "beds": True}]}, "'beds' must be a whole number from 1 to 99"),
        ({"wards": [{"name": "a", "beds": 1.0}]}, "'beds' must be a whole number from 1 to 99"),
        ({"wards": [], "share": float("nan")}, "'share' must be a number from 0.0 to 0.5"),
        ({"wards": [], "share": 10**400}, "'share' must be a number from 0.0 to 0.5"),
        ({"wards": [], "by-name": {"x": [{}]}}, "a ward lacks the key 'name'"),
        ({"wards": [], "by-name": {"x": 1}}, "'by-name', 'x' must be a list"),
        ({"wards": [], "by_name": {}}, "unknown key 'by_name'; did you mean 'by-name'?"),
    ],
)
def test_a_fault_is_one_line_with_place_and_what_must_stand_there(content: Any, told: str) -> None:
    assert told in refusal(content)
    assert refusal(content).startswith("h.yaml: ")
    assert "\n" not in refusal(content)
    assert "Smith" not in refusal(content)


def test_what_the_file_names_is_told_from_defaults() -> None:
    model = checked(Hospital, {"wards": [], "share": 0}, lambda fault: DataError(fault.sentence))
    assert model.given() == {"wards": [], "share": 0.0}
    assert model.by_name == {}


def test_a_settings_dataclass_keeps_its_rules_as_a_model() -> None:
    budget = checked(settings_model(Tuning), {"trials": 3}, lambda fault: DataError(fault.sentence))
    assert budget.given() == {"trials": 3}
    for content, told in (
        ({"trials": 0}, "setting 'trials' is 0; it must be a whole number, at least 1"),
        ({"trials": [1]}, "setting 'trials' must be one value, no list and no mapping"),
    ):
        with pytest.raises(DataError, match=told):
            checked(settings_model(Tuning), content, lambda fault: DataError(fault.sentence))


BILLION = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [\nb: }", "f.yaml is no valid YAML (line 2)"),
        ("a: 1\nb: 2\na: 3", "'a' stands in f.yaml twice (line 3)"),
        ("x:\n  - {a: 1, a: 2}", "'a' stands in f.yaml twice (line 2)"),
        ("1: a\n1.0: b", "'1.0' stands in f.yaml twice"),
        ("yes: a\ntrue: b", "'true' stands in f.yaml twice"),
        ("a: {<<: {x: 1}, <<: {y: 1}}", "'<<' stands in f.yaml twice"),
        ("&a [*a]", "f.yaml refers to itself (line 1)"),
        ("a: &a {<<: *a}", "f.yaml refers to itself (line 1)"),
        ("[" * 40 + "]" * 40, "f.yaml is nested deeper than 32 levels (line 1)"),
        ("[" * 500_000, "f.yaml is nested deeper than 32 levels (line 1)"),
        (BILLION, "f.yaml holds more than 1000000 values"),
        ("\na: " + 301 * "x", "more than 300 characters (line 2): shorten it"),
        (301 * "x" + ": 1", "f.yaml holds a text of more than 300 characters (line 1)"),
        ("2001-13-45", "f.yaml is no valid YAML"),
        ("2001-01-01T25:00:00", "f.yaml is no valid YAML"),
        ("!!int ''", "f.yaml is no valid YAML"),
        ("!!bool maybe", "f.yaml is no valid YAML"),
        ("!!timestamp then", "f.yaml is no valid YAML"),
        ("!!python/object:os.system {}", "f.yaml is no valid YAML"),
        ("a: 1\n---\nb: 2", "f.yaml is no valid YAML (line 2)"),
        ("*nobody", "f.yaml is no valid YAML (line 1)"),
        ("? [a]\n: 1", "f.yaml is no valid YAML"),
        ("9" * 5000, "more than 300 characters (line 1)"),
        ("a\0b", "f.yaml is no valid YAML"),
    ],
    ids=lambda value: value[:30],
)
def test_a_text_that_leaves_a_doubt_is_refused(text: str, told: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert told in caught.value.of("f.yaml")


def test_aliases_and_merges_are_read() -> None:
    text = "base: &base {x: 1, y: 2}\nown: {<<: *base, y: 3}\nmore: {<<: *base}\nsame: *base"
    content = parse_yaml(text)
    assert content["own"] == {"x": 1, "y": 3}
    assert content["more"] == content["same"] == content["base"] == {"x": 1, "y": 2}
    nested = parse_yaml("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}")
    assert nested["b"] == {"x": 2}
    assert nested["c"] == {"x": 3}


@given(st.text(alphabet="ab: -[]{}&*!<>|#'\"\n\t?,%@1.", max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    lines = ["f.yaml"]
    try:
        parse_yaml(text)
    except YamlError as error:
        lines = [error.of("f.yaml"), error.detail]
    assert "f.yaml" in lines[0]
    assert not any("\n" in line for line in lines)
