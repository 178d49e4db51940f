"""``fedsilo new``: a folder whose README's commands run (tests/docs/test_commands.py)."""

from pathlib import Path

import pytest

from fedsilo import experiments, new
from fedsilo.core.errors import RunDirectoryError


def test_new_makes_files_and_refuses_a_folder_with_content(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    names = ["README.md", "network.py", "simulation.yaml"]
    said = list(new(folder))
    assert said[:-1] == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert len(list(experiments(file=folder / "simulation.yaml"))) == 3, "a method, two experiments"
    with pytest.raises(RunDirectoryError, match="already has files in it: choose another name"):
        list(new(folder))
    (tmp_path / "empty").mkdir()
    assert list(new(tmp_path / "empty"))
