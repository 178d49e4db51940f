"""YAML is read without ambiguity, or refused in one line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.yaml_text import YamlError, parse_yaml, read_own_yaml, read_yaml

BILLION = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [\nb: }", "f.yaml is not valid YAML (line 2)"),
        ("a: 1\nb: 2\na: 3", "f.yaml has the key 'a' twice (line 3)"),
        ("x:\n  - {a: 1, a: 2}", "f.yaml has the key 'a' twice (line 2)"),
        ("1: a\n1.0: b", "f.yaml has the key '1.0' twice"),
        ("yes: a\ntrue: b", "f.yaml has the key 'true' twice"),
        ("a: {<<: {x: 1}, <<: {y: 1}}", "f.yaml has the key '<<' twice"),
        ("&a [*a]", "f.yaml refers to itself (line 1)"),
        ("a: &a {<<: *a}", "f.yaml refers to itself (line 1)"),
        ("[" * 40 + "]" * 40, "f.yaml is nested deeper than 32 levels (line 1)"),
        ("[" * 500_000, "f.yaml is nested deeper than 32 levels (line 1)"),
        (BILLION, "f.yaml has more than 1000000 values"),
        ("\na: " + 301 * "x", "more than 300 characters (line 2): shorten it"),
        (301 * "x" + ": 1", "f.yaml contains a text of more than 300 characters (line 1)"),
        ("2001-13-45", "f.yaml is not valid YAML"),
        ("2001-01-01T25:00:00", "f.yaml is not valid YAML"),
        ("!!int ''", "f.yaml is not valid YAML"),
        ("!!bool maybe", "f.yaml is not valid YAML"),
        ("!!timestamp then", "f.yaml is not valid YAML"),
        ("!!python/object:os.system {}", "f.yaml is not valid YAML"),
        ("a: 1\n---\nb: 2", "f.yaml is not valid YAML (line 2)"),
        ("*nobody", "f.yaml is not valid YAML (line 1)"),
        ("? [a]\n: 1", "f.yaml is not valid YAML"),
        ("9" * 5000, "more than 300 characters (line 1)"),
        ("a\0b", "f.yaml is not valid YAML"),
    ],
    ids=lambda value: value[:30],
)
def test_a_text_that_leaves_a_doubt_is_refused(text: str, told: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text, "f.yaml")
    assert told in str(caught.value)


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
        parse_yaml(text, "f.yaml")
    except YamlError as error:
        lines = [str(error), error.detail]
    assert "f.yaml" in lines[0]
    assert not any("\n" in line for line in lines)


def test_files_of_our_own_are_without_a_doubt() -> None:
    root = Path(__file__).resolve().parents[4]
    own = [root / "datasets" / "public.yaml", *root.glob("fedsilo/runs/published/*.yaml")]
    assert len(own) > 1
    for path in own:
        assert read_own_yaml(path) == read_yaml(path, DataError)
