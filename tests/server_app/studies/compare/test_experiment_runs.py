"""Finished runs by experiment: where they are looked for, what is refused."""

from pathlib import Path

import pytest

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.server_app.config.settings import RUN_FORMAT
from fedsilo.server_app.studies.compare.experiment_runs import finished_runs


def test_folders_of_runs_are_looked_into_and_unfinished_runs_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is no run directory and has none"):
        finished_runs([tmp_path])
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0" / "config.toml").write_text(f"format = {RUN_FORMAT}\n")
    with pytest.raises(RunDirectoryError, match="has not ended"):
        finished_runs([tmp_path])
    (tmp_path / "a-seed0" / "summary.json").write_text("{}")
    (run,) = finished_runs([tmp_path, tmp_path / "a-seed0"])
    assert run.path == tmp_path / "a-seed0"
