"""What is listed without importing what runs: settings, experiments and methods."""

import sys
from pathlib import Path

import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS
from fedsilo.server_app.api import experiments, methods, settings
from fedsilo.server_app.config.settings import known_defaults, resolve

ROOT = Path(__file__).resolve().parents[3]


def test_settings_are_listed_from_pyproject_as_the_code_has_them() -> None:
    written = "\n".join(settings(pyproject=True))
    assert written in (ROOT / "pyproject.toml").read_text(), "run: fedsilo settings --pyproject"


def test_the_list_of_settings_has_every_group_with_its_sentence_and_every_setting() -> None:
    lines = list(settings())
    keys = [line.split(" = ")[0].strip() for line in lines if " = " in line and line[2] != " "]
    assert set(keys) == known_defaults().keys() - {
        "plugin-digests",
        "plugin-settings",
        "run.purpose",
    }
    assert len(keys) == len(set(keys))
    headings = {line.partition(":")[0]: line for line in lines if line[:1] not in ("", " ")}
    groups = {key.partition(".")[0] for key in keys if "." in key}
    assert headings.keys() == {"experiment", *groups}
    assert all(len(heading.partition(": ")[2]) > 10 for heading in headings.values())


def test_help_is_wrapped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = list(settings())
    assert max(len(line) for line in lines if " = " not in line) <= 60
    monkeypatch.setenv("COLUMNS", "300")
    assert max(len(line) for line in settings()) <= 110


def test_a_group_lists_its_settings_only() -> None:
    first, *lines = settings("secure")
    assert first.startswith("secure: ")
    keys = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert keys == ["secure.aggregation", "secure.clip-norm", "secure.threshold"]


def test_a_word_finds_settings_by_name_and_by_help_in_all_groups() -> None:
    by_name = "\n".join(settings("server-learning-rate"))
    assert "fedadam.server-learning-rate = 0.01" in by_name
    assert "scaffold.server-learning-rate = 1.0" in by_name
    assert "train.learning-rate" not in by_name
    assert "train.mc-passes = 20" in "\n".join(settings("monte carlo"))
    assert "run.name = " in "\n".join(settings("run-name"))  # the name of 0.1


def test_a_word_that_no_setting_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"'train\.learing-rate'.*'train\.learning-rate'"):
        list(settings("train.learing-rate"))


def test_there_are_about_170_settings() -> None:
    assert 160 <= len(known_defaults()) <= 182


def test_an_experiment_is_listed_with_the_numbers_that_it_runs_with() -> None:
    lines = dict(line.split(maxsplit=1) for line in experiments())
    assert lines["uefl-digits"] == "digits, 9 silos, 30 rounds"
    assert "4 silos" in lines["fedavg-heart"]
    assert resolve({"method": "uefl"}).common.rounds == 30


def test_experiments_are_listed_under_a_line_about_their_method(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n  a: {config: {method: star}}\n  bcd: {config: {method: ring}}\n"
        "  e: {config: {method: my_method, rounds: 7, dataset: table}}\n"
        "  f: {minutes: 3, config: {method: star, dataset: heart}}\n  g: {base: f}\n"
    )
    assert [*experiments(file=file)] == [
        "my_method: a plugin",
        "  e    table, own silos, 7 rounds",
        "ring: Ring (Marfoq et al. 2020): each silo averages its model with its predecessor's.",
        "  bcd  digits, 9 silos, 30 rounds",
        "star: Star: after a round every silo has the plain mean of all models.",
        "  a    digits, 9 silos, 30 rounds",
        "  f    heart (39.6 kB), 4 silos, 30 rounds, about 3 min on two cores",
        "  g    heart (39.6 kB), 4 silos, 30 rounds",
    ]


def test_an_experiment_that_cannot_run_is_listed_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n  a: {config: {method: star, roundz: 3}}\n"
        "  b: {config: {method: star, rounds: -3}}\n"
        "  c: {config: {method: star, rounds: 1, silos: 1}}\n"
    )
    _, *lines = experiments(file=file)
    assert lines == [
        "  a  cannot run: unknown setting 'roundz'; did you mean 'rounds'?",
        "  b  cannot run: 'rounds' must be at least 1, but is -3",
        "  c  digits, 1 silo, 1 round",
    ]


def test_methods_are_listed_with_a_line_each_and_those_of_a_file_last() -> None:
    lines = dict(line.split(": ", 1) for line in methods())
    assert lines.keys() == METHODS.keys()
    assert lines["fedbn"].startswith("FedBN (Li et al. 2021)")
    *ours, own = methods(plugin=ROOT / "docs" / "examples" / "own_method.py")
    assert len(ours) == len(METHODS)
    assert own.startswith("own_method: FedBN (Li et al. 2021) as a method of your own")
    del sys.modules["own_method"]
