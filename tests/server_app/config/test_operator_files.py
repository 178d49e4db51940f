import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.server_app.config.operator_files import (
    REGISTRY,
    operator_terms,
    read_registry,
    read_weights,
)
from fedsilo.strategies.meeting.terms import AgreedWeights, Registry, Terms


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "operator.json"


def entry(node: Any, key: Any = "SHA256:k") -> dict[str, Any]:
    return {"node-id": node, "key": key}


def test_a_registry_gives_the_node_of_each_site(path: Path) -> None:
    path.write_text(
        json.dumps({"north": entry("18446744073709551615", "a"), "west": entry(7, "b")})
    )
    assert read_registry(path) == Registry(str(path), {"north": 2**64 - 1, "west": 7})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": entry("1", "x"), "b": entry("2", "x")}, "the same key under two names, 'a' and 'b'"),
        (
            {"a": entry("1", "x"), "b": entry(1, "y")},
            "the same node-id under two names, 'a' and 'b'",
        ),
        ({"a": entry("01", "x"), "b": entry("1", "y")}, "the same node-id under two names"),
        ({"a/b": entry("1")}, "'a/b' cannot be a site's name"),
        ({"a": "1"}, "'a' must be a mapping with the keys node-id, key"),
        ({"a": {"node-id": "1"}}, "'a' lacks the key 'key'"),
        ({"a": entry("x")}, "'a', 'node-id' must be a node's number"),
        ({"a": entry(True)}, "'a', 'node-id' must be a node's number"),
        ({"a": entry("9" * 5000)}, "more than 300 characters"),
        ({"a": entry("1", 5)}, "'a', 'key' must be a key's fingerprint"),
        ([], "must be a mapping"),
        ("north", "must be a mapping"),
    ],
)
def test_a_registry_that_cannot_be_is_one_line(content: Any, said: str, path: Path) -> None:
    path.write_text(json.dumps(content))
    with pytest.raises(SettingError, match=said.replace("(", r"\(")) as refusal:
        read_registry(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_counts_are_read_of_json_and_of_yaml(path: Path) -> None:
    for text in ('{"north": 303, "west": 1}', "north: 303\nwest: 1\n"):
        path.write_text(text)
        assert read_weights(path).samples == {"north": 303, "west": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("north: -1", "'north' must be a whole number from 1 to"),
        ("north: 0", "must be a whole number"),
        ("north: 1.5", "must be a whole number"),
        ("north: true", "must be a whole number"),
        ("north: many", "must be a whole number"),
        ("1: 5", "'1' must be a text"),
        ("north: 1\nnorth: 2", "north"),
        ("{", "is not valid YAML"),
        ("", "must be a mapping"),
    ],
)
def test_counts_that_cannot_be_are_one_line(text: str, said: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(SettingError, match=said):
        read_weights(path)


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    for read in (read_registry, read_weights):
        with pytest.raises(SettingError, match=r"operator\.json cannot be read: No such file"):
            read(path)
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(SettingError, match="is not valid UTF-8"):
            read(path)
        path.unlink()


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_any_text_is_terms_or_one_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("files") / "any"
    path.write_text(text, encoding="utf-8")
    for read in (read_registry, read_weights):
        told = ""
        try:
            read(path)
        except SettingError as error:
            told = str(error)
        assert "\n" not in told


def test_the_registry_is_the_environments_and_the_counts_the_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REGISTRY, raising=False)
    assert operator_terms(CommonSettings()) == Terms()
    path.write_text("{}")
    assert operator_terms(CommonSettings(site_weights=str(path))).weights is not None
    monkeypatch.setenv(REGISTRY, str(path))
    assert operator_terms(CommonSettings()).registry == Registry(str(path), {})


FACTS = SiteFacts("north", "D", (1,), 2, {"train": [20, 16]}, {})


def test_a_node_says_its_own_name_and_no_other() -> None:
    registry = Registry("reg.json", {"north": 1, "south": 2})
    assert registry.fault(1, "north") is None
    other, unknown = registry.fault(1, "south"), registry.fault(3, "north")
    assert other is not None
    assert other.startswith("node 1 is registered as 'north', but says that it is 'south': ")
    assert unknown is not None
    assert unknown.startswith(
        "node 3 says that it is 'north': its key is registered at the SuperLink"
    )
    terms = Terms(registry)
    assert terms.fault(2, FACTS)
    assert terms.fault(2, FACTS, simulated=True) is None, "it has no key"


def test_a_site_counts_for_no_more_than_was_agreed() -> None:
    assert AgreedWeights("w.json", {"north": 36}).fault(FACTS) is None
    more = AgreedWeights("w.json", {"north": 35}).fault(FACTS)
    assert more is not None
    assert more.startswith(
        "site north says that it has 36 training samples, but w.json agrees on 35"
    )
    missing = AgreedWeights("w.json", {"south": 99}).fault(FACTS)
    assert missing is not None
    assert missing.startswith("site north has no entry in 'run.site-weights' w.json")
