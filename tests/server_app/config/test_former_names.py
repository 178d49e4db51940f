"""The names that settings had in 0.1, before they had groups: read everywhere, with one note."""

import logging
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from flwr.app import Context, RecordDict

from fedsilo.client_app.app import app
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.core.settings import removed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import RENAMED, current_settings, with_former_keys
from fedsilo.core.settings_schema import Value, defaults
from fedsilo.datasets.weights.provenance import run_beside
from fedsilo.engines.experiments import find_experiment
from fedsilo.engines.inline_engine import run_inline
from fedsilo.engines.planning import planned_settings
from fedsilo.server_app.config.settings import (
    parse_assignment,
    read_run_config,
    read_toml,
    resolve,
    resolve_recorded,
)

Tiny = Callable[..., dict[str, Value]]


@pytest.fixture(autouse=True)
def _no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "_notes", removed._Notes())


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of notes, which grows."""
    said: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("flwr"), "warning", lambda text, *parts: said.append(text % parts)
    )
    return said


def test_each_common_setting_but_the_bare_ones_has_a_former_name() -> None:
    bare = {key for key in defaults(CommonSettings) if "." not in key}
    assert set(RENAMED.values()) == defaults(CommonSettings).keys() - bare
    assert not RENAMED.keys() & defaults(CommonSettings).keys()
    assert RENAMED["learning-rate"] == "train.learning-rate"
    assert RENAMED["network"] == "network.name"


@pytest.mark.parametrize("former", sorted(RENAMED))
def test_a_former_name_stands_for_todays_key_at_set_and_in_python(former: str) -> None:
    key = RENAMED[former]
    usual = defaults(CommonSettings)[key]
    assert current_settings({former: usual}) == {key: usual}
    if isinstance(usual, str):
        assert parse_assignment(f"{former}=x") == (key, "x")


def test_a_command_notes_once_which_names_are_new(notes: list[str]) -> None:
    for _ in range(2):
        resolve(dict(map(parse_assignment, ["method=fedavg", "learning-rate=0.5", "width=4"])))
    (note,) = notes
    assert "'learning-rate' is now 'train.learning-rate'" in note
    assert "'width' is now 'network.width'" in note
    assert "0.3" in note
    resolve({"method": "fedavg", "batch-size": 4})
    assert len(notes) == 2
    assert "'train.batch-size'" in notes[1]


def test_todays_keys_need_no_note(notes: list[str]) -> None:
    resolve({"method": "fedavg", "train.learning-rate": 0.5})
    assert not notes


@pytest.mark.parametrize("value", [0.001, 0.5])
def test_both_names_at_once_are_an_error(value: float) -> None:
    both = {"learning-rate": value, "train.learning-rate": 0.001}
    with pytest.raises(SettingError, match=r"'learning-rate'.*'train.learning-rate'.*both"):
        resolve({"method": "fedavg", **both})


def test_a_later_source_replaces_an_earlier_one_under_either_name(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n"
        "  old: {config: {method: fedavg, learning-rate: 0.1, network: mlp, class-weights: [1, "
        "2]}}\n  new: {base: old, config: {train.learning-rate: 0.2}}\n"
    )
    config = tmp_path / "run.toml"
    config.write_text("batch-size = 4\n[train]\nweight-decay = 0.5\n")
    values = find_experiment(file, "new").values
    assert values["train.learning-rate"] == 0.2
    assert values["network.name"] == "mlp"
    sources = RunSources(
        file=file,
        config=config,
        changes=("dataset=heart-synthetic", "batch-size=8", "weight-decay=0.25"),
    )
    common = planned_settings("new", sources).common
    assert (common.learning_rate, common.network) == (0.2, "mlp")
    assert (common.batch_size, common.weight_decay) == (8, 0.25)
    assert common.class_weights == "[1, 2]"


def test_a_group_may_be_a_table_and_hold_lists_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[network]\nname = 'mlp'\n[train]\noptimiser = 'sgd'\n"
        "optimiser-arguments = {momentum = 0.9}\n"
    )
    assert read_toml(path) == {
        "network.name": "mlp",
        "train.optimiser": "sgd",
        "train.optimiser-arguments": '{"momentum": 0.9}',
    }


def test_a_run_of_before_is_read_and_resumed_without_a_note(
    tiny: Tiny, tmp_path: Path, notes: list[str]
) -> None:
    values = tiny("fedavg", out=str(tmp_path), rounds=2) | {"run.name": "run"}
    directory = run_inline(resolve(values), 3)
    model = (directory.path / "model.safetensors").read_bytes()
    _as_before(directory.path / "config.toml")
    recorded = read_run_config(directory.path / "config.toml").settings
    assert resolve_recorded(recorded).decisive() == resolve(values).decisive()
    beside = run_beside(directory.path / "model.safetensors")
    assert beside is not None
    assert (beside.silos, beside.width) == (3, 4)
    for name in ("summary.json", "model.safetensors", "checkpoints/round-000002.safetensors"):
        (directory.path / name).unlink()
    again = run_inline(resolve(values | {"run.resume": True}), 3)
    assert (again.path / "model.safetensors").read_bytes() == model
    assert not notes


def test_a_plugin_under_a_former_name_is_not_executed_unasked() -> None:
    recorded: dict[str, Value] = {"method": "fedavg", "network": "evil:build"}
    with pytest.raises(SettingError, match="plugin 'evil'"):
        resolve_recorded(recorded)


def test_a_site_reads_former_names_of_another_apps_server(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Context] = []
    monkeypatch.setattr(
        "flwr.clientapp.ClientApp.__call__", lambda _, message, context: seen.append(context)
    )
    values = with_former_keys(tiny("fedavg"))
    assert "batch-size" in values
    node = Context(0, 0, {"partition-id": 0}, RecordDict(), values)
    message = type("Asked", (), {"metadata": type("M", (), {"message_type": "train"})})
    app(message, node)  # type: ignore[arg-type]
    assert seen[0].run_config == tiny("fedavg")


def _as_before(config: Path) -> None:
    """Write a run's config.toml with the names of 0.1."""
    document = tomllib.loads(config.read_text())
    for group in {key.partition(".")[0] for key in RENAMED.values()}:
        for name, value in document.pop(group, {}).items():
            (former,) = with_former_keys({f"{group}.{name}": value})
            document[former] = value
    config.write_text(tomli_w.dumps(document))
