"""A finished run read again: what is read, and what is said if it has not ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.errors import RunDirectoryError, SettingError
from fedsilo.reports.report import report
from fedsilo.reports.run_facts import reported_runs
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RUN_FORMAT, resolve
from fedsilo.server_app.records.run_directory import RunDirectory, config_document
from tests.support.run_files import SILO, SUMMARY


def test_a_run_has_ended_when_its_summary_is_there(tmp_path: Path) -> None:
    settings = resolve({"seed": 7})
    (tmp_path / "config.toml").write_text(config_document(settings, {}))
    with pytest.raises(RunDirectoryError) as caught:
        FinishedRun.open(tmp_path)
    assert (
        str(caught.value)
        == f"the run in {tmp_path} has not ended: continue it by 'fedsilo resume {tmp_path}'"
    )
    directory = RunDirectory(tmp_path)
    directory.write_json("summary.json", SUMMARY)
    (tmp_path / "metrics.csv").write_text("round,site,split,metric,value\n1,a,test,loss,0.5\n")
    run = FinishedRun.open(tmp_path)
    assert run.path == tmp_path
    assert run.summary == SUMMARY
    assert run.settings == settings
    assert [(row["round"], row["value"]) for row in run.metric_rows] == [("1", "0.5")]


def test_a_folder_that_is_missing_is_not_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        FinishedRun.open(tmp_path / "none")


def test_a_file_that_is_missing_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_json("summary.json", {})
    run = FinishedRun.open(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"silos.json is missing"):
        _ = run.silos


def test_settings_of_another_version_are_refused_by_their_file(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_json("summary.json", {})
    config = tmp_path / "config.toml"
    config.write_text("later-setting = 1\n" + config_document(resolve({}), {}))
    with pytest.raises(RunDirectoryError) as caught:
        _ = FinishedRun.open(tmp_path).settings
    assert str(caught.value).startswith(f"{config}: unknown setting 'later-setting'")


def test_each_file_is_read_once(hearts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    open_text = Path.read_text

    def noted(path: Path, *args: Any, **options: Any) -> str:
        read.append(path.name)
        return open_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    report([hearts / "fedavg-seed0"], "research")
    assert {name: read.count(name) for name in ("config.toml", "summary.json", "silos.json")} == {
        "config.toml": 1,
        "summary.json": 1,
        "silos.json": 1,
    }


def test_settings_are_read_by_key_and_by_group(hearts: Path) -> None:
    settings = FinishedRun.open(hearts / "fedavg-seed0").settings
    assert settings["rounds"] == settings.common.rounds
    assert dict(settings) == settings.as_mapping()


def test_sites_are_those_of_the_run_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "silos.json").write_text(json.dumps(dict.fromkeys("bac", SILO)))
    run = FinishedRun(tmp_path)
    assert run.chosen_sites() == ["b", "a", "c"]
    assert run.chosen_sites(["c", "b"]) == ["b", "c"]
    with pytest.raises(SettingError, match=r" has no site 'd': choose one of b, a, c"):
        run.chosen_sites(["d"])


def test_folders_of_runs_are_looked_into_and_unfinished_runs_refused(
    hearts: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory and does not contain one"):
        reported_runs([tmp_path])
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0" / "config.toml").write_text(f"format = {RUN_FORMAT}\n")
    with pytest.raises(RunDirectoryError, match="has not ended"):
        reported_runs([tmp_path])
    folder = hearts / "fedavg-seed0"
    (run,) = reported_runs([folder, folder / ".." / folder.name])
    assert run.path == folder
