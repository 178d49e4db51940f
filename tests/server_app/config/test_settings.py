"""Settings from every source go through one path and are refused before anything runs."""

import tomllib
from pathlib import Path

import pytest

from fedsilo.core.errors import RunDirectoryError, SettingError
from fedsilo.core.methods import METHODS, known_defaults
from fedsilo.engines.experiments import read_experiments
from fedsilo.server_app.config.settings import (
    RUN_FORMAT,
    RunConfig,
    differences,
    flat_values,
    group_settings,
    parse_assignment,
    read_run_config,
    read_toml,
    resolve,
)

ROOT = Path(__file__).resolve().parents[3]


def test_missing_keys_take_their_defaults_and_methods_get_their_own() -> None:
    settings = resolve({"method": "uefl", "uefl.gamma": 0.5})
    assert settings.common.rounds == 30
    assert settings.own.gamma == 0.5


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rouns": 3}, "unknown setting 'rouns'; did you mean 'rounds'"),
        ({"rounds": "3"}, "'rounds' must be a whole number, at least 1, but is '3' (str)"),
        ({"rounds": True}, "'rounds' must be a whole number, at least 1, but is True (bool)"),
        ({"rounds": 0}, "'rounds' must be at least 1, but is 0"),
        ({"uefl.gamma": -0.1}, "'uefl.gamma' must be at least 0, but is -0.1"),
        (
            {"uefl.gamma": float("nan")},
            "'uefl.gamma' must be a finite number, at least 0, but is nan",
        ),
        ({"dropout": 1.0}, "at least 0 and below 1"),
        (
            {"silos": 2**32},
            "'split.silos' must be at least 1 and at most 100000, but is 4294967296",
        ),
        ({"train.epoch-steps": 2**31}, "at least 0 and at most 100000"),
        ({"method": "uefll"}, "unknown method 'uefll'; did you mean 'uefl'?"),
        ({"method": "zz"}, f"unknown method 'zz': 'fedsilo methods' lists all {len(METHODS)}"),
        ({"dataset": "minst"}, "did you mean 'mnist'"),
        ({"network": "resnet"}, "one of auto, conv, vgg16-bn, resnet22, vit, logistic, mlp"),
        ({"method": "fedavg", "uefl.gamma": 0.9}, "method 'fedavg' has no setting 'uefl.gamma'"),
        (
            {"split.silos": 3, "run.min-sites": 4},
            "'run.min-sites' must be at most the number of silos, 3",
        ),
        ({"device": "cuda:x"}, "'machine.device' must be auto, cpu, cuda or cuda:N"),
        (
            {"dropout": 0},
            "settings 'network.dropout' (0) and 'train.mc-passes' (20) must be above 0",
        ),
        (
            {"train.mc-passes": 0},
            "settings 'network.dropout' (0.1) and 'train.mc-passes' (0) must be above 0",
        ),
        (
            {"standardise": "site"},
            "'data.standardise' has no effect with data set 'digits': remove it",
        ),
        ({"dataset": "heart", "silos": 4}, "'split.silos' has no effect with data set 'heart'"),
        (
            {"dataset": "heart", "split.test-folds": 1},
            "'split.test-folds' must be 0 or at least 2, but is 1",
        ),
        ({"dataset": "heart", "run.min-sites": 5}, "at most the number of silos, 4, but is 5"),
        ({"rounds": 5, "uefl.iteration-rounds": 6}, "no codebook would ever be extended"),
    ],
)
def test_a_wrong_setting_is_told_with_key_value_and_what_is_allowed(
    values: dict[str, object], told: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve(values)  # type: ignore[arg-type]  # wrong on purpose
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_methods_key_at_its_default_passes_as_flower_fills_it_in() -> None:
    assert resolve(known_defaults() | {"method": "fedavg"}).common.method == "fedavg"


def test_pyprojects_run_config_lists_every_key_with_its_default() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = pyproject["tool"]["flwr"]["app"]["config"]
    assert flat_values(declared, "pyproject.toml") == known_defaults(), (
        "run: fedsilo settings --pyproject"
    )


def test_assignments_are_toml_values_and_bare_words_are_texts() -> None:
    assert parse_assignment("rounds=5") == ("rounds", 5)
    assert parse_assignment("uefl.gamma=0.5") == ("uefl.gamma", 0.5)
    assert parse_assignment("run.resume=true") == ("run.resume", True)
    assert parse_assignment("data.dir=/data/x") == ("data.dir", "/data/x")
    assert parse_assignment('method="uefl"') == ("method", "uefl")


@pytest.mark.parametrize("text", ["rounds", "=5", "rounds=[1, 2]"])
def test_a_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(SettingError):
        parse_assignment(text)


def test_a_toml_file_is_read_and_its_faults_named(tmp_path: Path) -> None:
    good, nested, broken = (tmp_path / f"{name}.toml" for name in ("good", "nested", "broken"))
    good.write_text('method = "fedavg"\nrounds = 3\n')
    nested.write_text("[uefl]\n[uefl.gamma]\nx = 1\n")
    broken.write_text("rounds = \n")
    assert read_toml(good) == {"method": "fedavg", "rounds": 3}
    for path in (nested, broken, tmp_path / "absent.toml"):
        with pytest.raises(SettingError, match=path.name):
            read_toml(path)


def test_circumstances_do_not_decide_a_result_and_everything_else_does() -> None:
    plain = resolve({}).decisive()
    moved = resolve({"run.out": "/x", "run.resume": True, "run.min-sites": 1}).decisive()
    assert differences(plain, moved) == ""
    assert differences(plain, resolve({"seed": 1}).decisive()) == "seed is 42 there and 1 here"
    other = differences(plain, resolve({"method": "fedavg"}).decisive())
    assert "uefl.gamma is 0.3 there and 'unset' here" in other


def test_an_assignment_is_one_setting_and_dates_are_texts() -> None:
    assert parse_assignment("run.name=2024-01-01") == ("run.name", "2024-01-01")
    with pytest.raises(SettingError, match="more than one setting"):
        parse_assignment("rounds=2\ncodes=4")


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00rounds")
    for read in (read_toml, read_experiments):
        with pytest.raises(SettingError, match=r"x\.toml is not valid"):
            read(path)


def test_a_group_that_no_method_has_is_refused_with_the_groups_that_there_are() -> None:
    with pytest.raises(SettingError, match=r"no group 'uelf' exists .*'uefl.gamma'") as error:
        resolve({"uelf.gamma": 0.2})
    assert "\n" not in str(error.value)
    with pytest.raises(SettingError, match=r"unknown setting 'uefl.gama'; did you mean 'uefl.gamm"):
        resolve({"uefl.gama": 0.2})


def test_another_methods_group_is_refused() -> None:
    with pytest.raises(SettingError, match=r"method 'fedavg' has no setting 'uefl\.gamma'"):
        resolve({"method": "fedavg", "uefl.gamma": 0.7})


def test_groups_are_tables_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "uefl"\n[uefl]\ngamma = 0.5\n')
    assert read_toml(file) == {"method": "uefl", "uefl.gamma": 0.5}
    assert group_settings({"rounds": 3, "uefl.gamma": 0.5}) == {"rounds": 3, "uefl": {"gamma": 0.5}}
    assert flat_values(group_settings(known_defaults()), "") == known_defaults()


def test_a_key_without_its_group_is_refused_with_the_whole_key() -> None:
    with pytest.raises(SettingError, match=r"unknown setting 'gamma'; did you mean 'uefl\.gamma'"):
        resolve({"gamma": 0.5})


@pytest.mark.parametrize("text", ["rounds = 3\n", "format = 1\nrounds = 3\n"])
def test_a_run_directory_of_an_earlier_version_is_refused_in_one_line(
    text: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(text)
    with pytest.raises(RunDirectoryError) as caught:
        read_run_config(config)
    assert str(caught.value) == (
        f"{tmp_path} was written by another version of fedsilo: start a new run"
    )
    config.write_text(f"format = {RUN_FORMAT}\nrounds = 3\n[launch]\nengine = 'ray'\n")
    assert read_run_config(config) == RunConfig({"rounds": 3}, {"engine": "ray"}, {})
