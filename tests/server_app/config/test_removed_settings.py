"""What a user of a removed setting gets: nothing at its former default, else one line."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedsilo.client_app.site.private_state import settings_digest_of
from fedsilo.core.errors import CheckpointError, SettingError
from fedsilo.core.files.state_files import load_state, save_state
from fedsilo.core.methods import known_defaults, settings_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import CHOICES, SETTINGS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import flat_values, read_run_config, resolve
from fedsilo.server_app.records.run_directory import RunDirectory

Tiny = Callable[..., dict[str, Value]]
OLD = {key: removed.default for key, removed in SETTINGS.items()}


def other_value(default: Value) -> Value:
    """Return another value of the same type."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return f"{default}x"
    return default + 1


def test_a_removed_setting_is_none_of_todays() -> None:
    known = known_defaults()
    assert not OLD.keys() & known.keys()
    for key, value in CHOICES:
        assert key in known
        assert known[key] != value


@pytest.mark.parametrize("key", SETTINGS)
def test_a_removed_setting_is_dropped_at_its_former_default_and_else_refused(key: str) -> None:
    assert resolve({"method": "fedavg", key: OLD[key]}) == resolve({"method": "fedavg"})
    with pytest.raises(SettingError) as raised:
        resolve({"method": "fedavg", key: other_value(OLD[key])})
    assert f"'{key}'" in str(raised.value)
    assert SETTINGS[key].instead in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("key", "value"), CHOICES)
def test_a_removed_choice_names_what_to_choose(key: str, value: Value) -> None:
    with pytest.raises(SettingError) as raised:
        resolve({key: value})
    assert CHOICES[key, value] in str(raised.value)


def test_a_removed_setting_may_be_a_mapping_or_list_of_yaml() -> None:
    for declared in ([1, 1, 0.1], {"va": 0.1}):
        with pytest.raises(SettingError, match=r"'run.min-sites'"):
            resolve(flat_values({"speeds": declared}))


def test_a_run_of_the_version_before_is_read_and_resumed(tiny: Tiny, tmp_path: Path) -> None:
    values = tiny("fedavg", out=str(tmp_path), rounds=2) | {"run-name": "run"}
    directory = run_inline(resolve(values), 3)
    model = (directory.path / "model.safetensors").read_bytes()
    as_before(directory, OLD)
    assert not OLD.keys() & read_run_config(directory.path / "config.toml").settings.keys()
    for name in ("summary.json", "model.safetensors", "checkpoints/round-000002.safetensors"):
        (directory.path / name).unlink()
    again = run_inline(resolve(values | {"resume": True}), 3)
    assert (again.path / "model.safetensors").read_bytes() == model

    as_before(directory, {"round-quorum": 0.6})
    with pytest.raises(SettingError) as raised:
        read_run_config(directory.path / "config.toml")
    assert SETTINGS["round-quorum"].instead in str(raised.value)


def test_a_run_that_remembers_what_rounding_left_out_is_not_continued(
    tiny: Tiny, tmp_path: Path
) -> None:
    values = tiny("fedavg", out=str(tmp_path), rounds=1, wire_precision="bf16")
    values |= {"run-name": "run"}
    directory = run_inline(resolve(values), 3)
    as_before(directory, OLD)
    (directory.path / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="'wire-feedback'"):
        run_inline(resolve(values | {"resume": True}), 3)


def as_before(directory: RunDirectory, old: dict[str, Any]) -> None:
    """Write settings of the version before into config.toml and the checkpoints."""
    config = directory.path / "config.toml"
    document = tomllib.loads(config.read_text())
    for key, value in old.items():
        group, dot, name = key.partition(".")
        if not dot:
            document[key] = value
        elif group in document:
            document[group][name] = value
    config.write_text(tomli_w.dumps(document))
    for path in directory.checkpoints.glob("*.safetensors"):
        arrays, facts = load_state(path)
        facts["settings"] |= old
        save_state(path, arrays, facts)


@pytest.mark.parametrize(
    ("method", "digest"),
    [
        ("uefl", "388b615fc827ada39451a2492b151e12653d4e4bb6ab044d550af3eded85cdb8"),
        ("picsr", "6ac0611b62e9fbde5c7b8ac3ff394e209cce70c85efb35a7cb658ed25e574098"),
        ("fedaligncl", "4788a05f8134ba15112767ee896a932ebd2fc980152d6aa7b039e2b754444386"),
        ("fedefm", "4b6ff3fa7559d2ef59dbac23f58c6ca06e7f0e7879cdf173421a00cc20e7b4ed"),
    ],
)
def test_a_sites_private_state_of_the_version_before_opens(method: str, digest: str) -> None:
    own = settings_class(method)()
    assert settings_digest_of(CommonSettings(method=method), own) == digest
