"""Opening finished runs: which of several went wrong, and whose state is whose."""

import json
from pathlib import Path

import pytest

from fedsilo.models.contract.errors import DataError, RunDirectoryError, SettingError
from fedsilo.server_app.studies.finished_site import (
    finished_settings,
    naming,
    refuse_shared_state,
    sites_of,
)
from tests.support.run_files import SILO


def test_what_goes_wrong_with_a_run_names_it_once() -> None:
    run = Path("runs/first")
    with pytest.raises(DataError, match=r"^runs/first: too few$"), naming(run):
        raise DataError("too few")
    with pytest.raises(DataError, match=r"^runs/first has none$"), naming(run):
        raise DataError("runs/first has none")


@pytest.mark.parametrize(("runs", "sites"), [(2, 1), (1, 2)])
def test_one_folder_of_state_is_for_one_site_of_one_run(runs: int, sites: int) -> None:
    folders = [Path(str(number)) for number in range(runs)]
    with pytest.raises(SettingError, match="state holds the state of one site in one run"):
        refuse_shared_state(Path("state"), folders, sites)
    refuse_shared_state(Path("state"), folders[:1], 1)
    refuse_shared_state(None, folders, sites)


def test_sites_are_those_of_the_run_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "silos.json").write_text(json.dumps(dict.fromkeys("bac", SILO)))
    assert sites_of(tmp_path) == ["b", "a", "c"]
    assert sites_of(tmp_path, ["c", "b"]) == ["b", "c"]
    with pytest.raises(SettingError, match=r" has no site 'd': choose one of b, a, c"):
        sites_of(tmp_path, ["d"])


def test_a_run_that_has_not_ended_has_no_settings_to_open_it_with(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"summary.json is missing"):
        finished_settings(tmp_path, None)
