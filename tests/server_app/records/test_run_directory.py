"""The run directory: its files, and the names and places that are refused."""

import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from fedsilo.core.errors import RunDirectoryError
from fedsilo.server_app.config.settings import read_run_config, resolve
from fedsilo.server_app.records.recorder import GrowingCsv
from fedsilo.server_app.records.run_directory import (
    RunDirectory,
    config_document,
    free_name,
    only_writer,
    open_run_directory,
    runs_folder,
    with_run_name,
)
from tests.support.errors import refuses


def test_a_run_directory_that_exists_is_refused_unless_resumed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with refuses(RunDirectoryError, "run.name"):
        open_run_directory(str(tmp_path), "run", resume=False)
    assert open_run_directory(str(tmp_path), "run", resume=True).path == tmp_path / "run"


def test_a_name_that_exists_gets_the_next_free_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def name_of(**settings: str | bool) -> str:
        given = {"run.out": str(tmp_path), "run.name": "run", **settings}
        with free_name(resolve(given)) as named:
            return named.common.run_name

    assert name_of() == "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert capsys.readouterr().out == ""
    assert name_of() == "run-3"
    assert (
        capsys.readouterr().out == f"fedsilo: {tmp_path / 'run'} exists; this run is named run-3\n"
    )
    (tmp_path / "run" / "config.toml").touch()
    assert name_of() == "run-3"
    assert f"to continue: fedsilo resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert name_of(resume=True) == "run"
    assert name_of(**{"run.name": ".."}) == ".."  # refused when it is opened


def test_runs_of_one_name_that_begin_at_once_get_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = resolve({"run.out": str(tmp_path / "out"), "run.name": "run"})
    begun, names = Barrier(8), []

    def begin(_: int) -> None:
        begun.wait()
        with free_name(settings) as named:
            names.append(named.common.run_name)
            begun.wait()  # none has a directory yet, as while the sites are asked

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(begin, range(8)))
    assert sorted(names) == ["run", *(f"run-{number}" for number in range(2, 9))]
    assert "another process is starting a run" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.held"))


def test_a_name_is_free_again_after_its_process_was_killed(tmp_path: Path) -> None:
    settings = resolve({"run.out": str(tmp_path), "run.name": "run"})
    code = (
        "import os, sys; from pathlib import Path\n"
        "from fedsilo.core.files.atomic_files import hold_name\n"
        "with hold_name(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert [path.name for path in tmp_path.iterdir()] == [".run.held"]
    with free_name(settings) as named:
        assert named.common.run_name == "run"
    assert not list(tmp_path.iterdir())


def test_what_a_killed_start_left_is_no_run_yet_and_anything_else_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", "silos.json", ".config.toml.part"):
        (run / name).touch()
    assert open_run_directory(str(tmp_path), "run", resume=False).path == run
    (run / "notes.txt").touch()
    with refuses(RunDirectoryError, "run.name"):
        open_run_directory(str(tmp_path), "run", resume=False)


def test_opening_writes_nothing_and_resuming_needs_a_run(tmp_path: Path) -> None:
    open_run_directory(str(tmp_path), "new", resume=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunDirectoryError, match="no run directory"):
        open_run_directory(str(tmp_path), "new", resume=True)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", " ", "a b", 129 * "n"])
def test_a_run_name_must_be_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirectoryError, match="plain name"):
        open_run_directory(str(tmp_path), name, resume=False)


def test_a_relative_folder_means_nothing_inside_a_flower_app() -> None:
    with pytest.raises(RunDirectoryError, match="absolute path"):
        runs_folder("runs")


def test_the_folder_of_runs_comes_from_setting_then_environment_then_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDSILO_RUNS", str(tmp_path / "env"))
    assert runs_folder("/somewhere") == Path("/somewhere")
    assert runs_folder("") == tmp_path / "env"
    monkeypatch.delenv("FEDSILO_RUNS")
    assert runs_folder("") == Path.home() / ".fedsilo" / "runs"


def test_config_toml_gives_the_settings_back_and_names_the_environment(tmp_path: Path) -> None:
    settings = resolve({"method": "uefl", "uefl.gamma": 0.25, "seed": 5})
    path = tmp_path / "config.toml"
    launch = {"engine": "inline", "resources": {"num-supernodes": 9}}
    path.write_text(config_document(settings, launch))
    read = read_run_config(path)
    assert (resolve(read.settings), read.launch) == (settings, launch)
    environment = tomllib.loads(path.read_text())["environment"]
    assert environment["packages"]["flwr"].startswith("1.39")
    assert environment["fedsilo-revision"]
    assert environment["processor"].endswith(f"({torch.backends.cpu.get_cpu_capability()})")


def test_csv_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    GrowingCsv(tmp_path / "x.csv", ("a", "b")).write([(1, "one, two"), (2, "")])
    assert directory.read_csv("x.csv") == [{"a": "1", "b": "one, two"}, {"a": "2", "b": ""}]


def test_a_summary_that_is_not_there_says_that_the_run_has_not_ended(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="the run has not ended"):
        RunDirectory(tmp_path).read_json("summary.json")


def test_named_makes_a_name_of_method_data_and_seed_unless_one_is_given() -> None:
    settings = resolve({"method": "uefl", "dataset": "digits", "seed": 3})
    assert with_run_name(settings).common.run_name.startswith("uefl-digits-seed3-")
    assert with_run_name(resolve({"run.name": "mine"})).common.run_name == "mine"


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "silos.json").write_text("{")
    with refuses(RunDirectoryError, "silos.json"):
        RunDirectory(tmp_path).read_json("silos.json")
    with refuses(RunDirectoryError, "metrics.csv"):
        RunDirectory(tmp_path).read_csv("metrics.csv")


def test_only_one_process_writes_to_a_run_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with only_writer(directory, new=True):
        again = only_writer(directory, new=True)
        with pytest.raises(RunDirectoryError, match="another process is writing"):
            again.__enter__()
    with only_writer(directory, new=True):
        assert directory.path.is_dir()


def test_a_run_that_another_process_began_meanwhile_is_left_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / "config.toml").write_text("")
    rival = only_writer(directory, new=True)
    with pytest.raises(RunDirectoryError, match="has begun a run"):
        rival.__enter__()
    with only_writer(directory, new=False):
        assert (tmp_path / "config.toml").exists()
