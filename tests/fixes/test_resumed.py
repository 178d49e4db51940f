"""Runs that cannot be gone on with as they are, and their fixes."""

import importlib
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.data_folders import write_tables
from tests.support.fixes import HEART, Values, refused
from tests.support.setting_keys import as_keys

# Parts of the errors that the functions below try
TRIED = (
    "belongs to a run with other settings:",
    "if the site's ledger is of an earlier run of this name",
    "resume with the same file, or choose another 'run.name'",
    "the sites or their data differ from those in",
)
SMALL: Values = {
    **HEART,
    "method": "fedavg",
    "rounds": 1,
    "machine.device": "cpu",
    "run.name": "run",
}
APP = importlib.import_module(
    "fedsilo.client_app.app"
)  # the package has its app by the module's name


def _attempt(folder: Path, nodes: int = 4, /, **more: Value) -> str:
    """Return why a run fails, empty where it has ended."""
    named = as_keys(more)
    settings = resolve(as_keys({**SMALL, "run.out": str(folder), **named}))
    return refused(lambda: run_inline(settings, nodes))


def _cut_short(folder: Path) -> None:
    """Leave of a finished run what one has that was ended before its summary."""
    (folder / "run" / "summary.json").unlink()


def test_checkpoint_with_its_own_config_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not _attempt(tmp_path)
    _cut_short(tmp_path)
    config = tmp_path / "run" / "config.toml"
    written = config.read_text()
    config.write_text(written.replace("\nseed = 42", "\nseed = 5"))
    resume = ["resume", str(tmp_path / "run"), "--engine", "inline"]
    assert main(resume) == 1
    told = capsys.readouterr().err
    assert "belongs to a run with other settings: seed is 42 there and 5 here" in told
    assert "resume with the same settings, or choose another 'run.name'" in told
    assert not _attempt(tmp_path, run_name="other", seed=5)
    config.write_text(written)
    assert not _attempt(tmp_path, resume=True)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_changed_site_weights_restored_or_in_new_run_are_accepted(tmp_path: Path) -> None:
    agreed = tmp_path / "agreed.yaml"

    def attempt(cleveland: int, **more: Value) -> str:
        agreed.write_text(f"{{cleveland: {cleveland}, hungary: 300, switzerland: 300, va: 300}}")
        return _attempt(tmp_path, site_weights=str(agreed), **more)

    assert not attempt(1000)
    _cut_short(tmp_path)
    told = attempt(999, resume=True)
    assert "'run.site-weights' agrees on 999 for site cleveland, but" in told
    assert "resume with the same file, or choose another 'run.name'" in told
    assert not attempt(999, run_name="other")
    assert not attempt(1000, resume=True)


@pytest.mark.parametrize("other", ["sites", "data"])
def test_changed_sites_or_data_restored_or_in_new_run_are_accepted(
    other: str, tmp_path: Path
) -> None:
    write_tables(tmp_path)

    def attempt(nodes: int, **more: Value) -> str:
        return _attempt(tmp_path, nodes, dataset="table", data_dir=str(tmp_path), **more)

    assert not attempt(2)
    _cut_short(tmp_path)
    table = tmp_path / "south.csv"
    whole, nodes = table.read_text(), 1 if other == "sites" else 2
    if other == "data":
        table.write_text(whole.replace(",a,", ",b,", 1))
    told = attempt(nodes, resume=True)
    assert "the sites or their data differ from those in" in told
    assert "resume with the same sites and data, or choose another 'run.name'" in told
    assert not attempt(nodes, run_name="other")
    table.write_text(whole)
    assert not attempt(2, resume=True)
