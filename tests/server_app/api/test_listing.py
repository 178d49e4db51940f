"""What is listed without importing what runs: settings, experiments and methods."""

import sys
import tomllib
from pathlib import Path

from fedsilo import experiments, methods, settings
from fedsilo.models.contract.methods import METHODS
from fedsilo.server_app.config.settings import flat_values, known_defaults, resolve

ROOT = Path(__file__).resolve().parents[3]


def test_settings_are_listed_from_pyproject_as_the_code_has_them() -> None:
    written = "\n".join(settings(pyproject=True)).partition("[tool.flwr.app.config]")[2]
    assert written in (ROOT / "pyproject.toml").read_text(), "run: fedsilo settings --pyproject"


def test_the_list_of_settings_is_a_file_for_config() -> None:
    listed = flat_values(tomllib.loads("\n".join(settings())), "")
    assert listed == known_defaults()


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
        "  b  cannot run: setting 'rounds' is -3; it must be a whole number, at least 1",
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
