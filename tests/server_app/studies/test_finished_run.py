"""A run directory read again: when it has begun, when it has ended, what is told if it has not."""

from pathlib import Path

import pytest

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory, config_document
from fedsilo.server_app.studies.finished_run import finished_run, has_begun, has_ended
from tests.support.run_files import SUMMARY


def test_a_run_has_ended_when_its_summary_is_there(tmp_path: Path) -> None:
    assert not has_begun(tmp_path)
    settings = resolve({"seed": 7})
    (tmp_path / "config.toml").write_text(config_document(settings, {}))
    assert has_begun(tmp_path)
    assert not has_ended(tmp_path)
    with pytest.raises(RunDirectoryError) as caught:
        finished_run(tmp_path)
    assert (
        str(caught.value)
        == f"the run in {tmp_path} has not ended: continue it by 'fedsilo resume {tmp_path}'"
    )
    directory = RunDirectory(tmp_path)
    directory.write_json("summary.json", SUMMARY)
    (tmp_path / "metrics.csv").write_text("round,site,split,metric,value\n1,a,test,loss,0.5\n")
    run = finished_run(tmp_path)
    assert has_ended(tmp_path)
    assert run.path == tmp_path
    assert run.summary == SUMMARY
    assert run.settings == settings
    assert [(row["round"], row["value"]) for row in run.metrics] == [("1", "0.5")]


def test_a_folder_that_is_missing_is_not_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        finished_run(tmp_path / "none")


def test_a_file_that_is_missing_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_json("summary.json", {})
    run = finished_run(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"silos.json is missing"):
        _ = run.silos


def test_settings_of_another_version_are_refused_by_their_file(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_json("summary.json", {})
    config = tmp_path / "config.toml"
    config.write_text("later-setting = 1\n" + config_document(resolve({}), {}))
    with pytest.raises(RunDirectoryError) as caught:
        _ = finished_run(tmp_path).settings
    assert str(caught.value).startswith(f"{config}: unknown setting 'later-setting'")
