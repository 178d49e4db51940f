"""What is listed without importing what runs: settings, experiments and methods."""

import inspect
import itertools
import sys
from pathlib import Path

import pytest

from fedsilo import experiments, methods, settings
from fedsilo.core.errors import SettingError
from fedsilo.core.methods import METHODS, known_defaults
from fedsilo.engines.experiments import find_experiment
from fedsilo.server_app.config.settings import resolve

ROOT = Path(__file__).resolve().parents[3]


def test_settings_are_listed_from_pyproject_as_the_code_has_them() -> None:
    written = "\n".join(settings(pyproject=True)).partition("[tool.flwr.app.config]")[2]
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


def test_there_are_about_200_settings() -> None:
    """Tasks brought 'task' and 'train.dice-weight', several studies on a server 'server.sites'."""
    assert 180 <= len(known_defaults()) <= 200


def test_an_experiment_is_listed_with_the_numbers_that_it_runs_with() -> None:
    lines = dict(line.split(maxsplit=1) for line in experiments())
    assert lines["uefl-digits"].startswith("digits, 9 silos, 30 rounds; the default job")
    assert "4 silos" in lines["fedavg-heart"]
    assert resolve({"method": "uefl"}).common.rounds == 30


def test_experiments_are_listed_under_a_line_about_their_method(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n  a: {config: {method: star}}\n  bcd: {config: {method: ring}}\n"
        "  e: {config: {method: my_method, rounds: 7, dataset: table}}\n"
        "  f: {minutes: 3, about: hearts, config: {method: star, dataset: heart}}\n  g: {base: f}\n"
        "  h: {config: {method: star}, resources: {client-resources-num-gpus: 0.5}}\n"
    )
    assert [*experiments(file=file)] == [
        "my_method: a plugin",
        "  e  table, own silos, 7 rounds",
        "ring: Ring (Marfoq et al. 2020): each silo averages its model with its predecessor's.",
        "  bcd  digits, 9 silos, 30 rounds",
        "star: Star: after a round every silo has the plain mean of all models.",
        "  a  digits, 9 silos, 30 rounds",
        "  f  heart (39.6 kB), 4 silos, 30 rounds, about 3 min on two cores; hearts",
        "  g  heart (39.6 kB), 4 silos, 30 rounds",
        "  h  digits, 9 silos, 30 rounds, GPU",
    ]
    assert [*experiments(file=file, method="ring")][1:] == ["  bcd  digits, 9 silos, 30 rounds"]
    _, none = experiments(file=file, method="fedprox")
    assert "fedsilo simulate fedprox" in none
    with pytest.raises(SettingError, match="unknown method 'rign'; did you mean 'ring'"):
        list(experiments(file=file, method="rign"))


def test_only_experiments_whose_data_are_here_are_listed_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSILO_DATA", str(tmp_path))
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n  a: {config: {method: star}}\n"
        "  b: {config: {method: star, dataset: mnist}}\n"
        "  c: {config: {method: ring, dataset: mnist}}\n"
    )
    lines = experiments(file=file, here=True)
    assert [line.split()[0] for line in lines] == ["star:", "a"]
    with pytest.raises(SettingError, match="--here"):
        list(experiments("a", file=file, here=True))


def test_the_cells_of_a_matrix_share_a_line_for_each_method(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(
        "experiments:\n"
        "  '{method}-{n}{size}':\n"
        "    matrix:\n"
        "      method: [ring, star]\n"
        "      n: [2, 3, 4, 5]\n"
        "      size: {'': {config: {rounds: 60}}, -cpu: {about: short}}\n"
        "    about: sizes\n"
        "    config: {method: '{method}', silos: '{n}'}\n"
        "  one-{data}:\n"
        "    matrix: {data: [heart, digits]}\n"
        "    config: {method: star, dataset: '{data}'}\n"
    )
    assert [line for line in experiments(file=file) if line.startswith(" ")] == [
        "  ring-{2,3,4,5}{,-cpu}  digits, 2 to 5 silos, 30 or 60 rounds; sizes",
        "  star-{2,3,4,5}{,-cpu}  digits, 2 to 5 silos, 30 or 60 rounds; sizes",
        "  one-{heart,digits}     heart (39.6 kB), digits, 4 or 9 silos, 30 rounds",
    ]


def test_every_method_takes_about_a_screen() -> None:
    lines = list(experiments())
    starts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    longest = max(after - start for start, after in itertools.pairwise([*starts, len(lines)]))
    assert longest < 55
    assert max(map(len, lines)) < 170


def test_an_experiment_is_shown_in_full_as_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    name = "uefl-table7-gamma-0.2-cpu"
    file.write_text("\n".join(experiments(name)))
    own, ours = (find_experiment(path, name) for path in (file, ROOT / "simulation.yaml"))
    assert own.values == ours.values
    assert own.values["uefl.gamma"] == 0.2
    assert own.resources == ours.resources
    file.write_text("\n".join(experiments("picsr-heart-balanced")))
    tuned = find_experiment(file, "picsr-heart-balanced")
    assert (tuned.trials, tuned.grid["network.name"]) == (32, ["logistic", "mlp"])
    with pytest.raises(SettingError, match=r"did you mean 'uefl-table7-gamma-0\.\d"):
        list(experiments("uefl-table7-gamma-0.9"))


def test_the_check_lists_what_cannot_run(tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text("experiments: {a: {config: {rounds: 0}}, b: {config: {method: star}}}")
    # The command line shows each line as it comes; Python has them as notes of the error
    found = iter(inspect.unwrap(experiments)(file=file, check=True))
    assert next(found).startswith("a: 'rounds'")
    with pytest.raises(SettingError, match="1 of 2 experiments cannot run"):
        next(found)
    with pytest.raises(SettingError, match="1 of 2 experiments cannot run") as refused:
        experiments(file=file, check=True)
    assert [note.partition(" must")[0] for note in refused.value.__notes__] == ["a: 'rounds'"]
    file.write_text("experiments: {b: {config: {method: star}}}")
    assert list(experiments(file=file, check=True)) == [f"{file}: 1 experiment, no mistake found"]
    with pytest.raises(SettingError, match="--check"):
        experiments("b", file=file, check=True)


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
