"""Which plugins of a run directory are executed: the reader's own, none that only it names."""

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.server_app.config import trusted_plugins
from fedsilo.server_app.config.trusted_plugins import (
    approve_plugins,
    name_plugins,
    remember_plugins,
)
from tests.support.errors import refuses

TEXT = "executed = True\n"
DIGEST = hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test a user who has run nothing, and return the file of his digests."""
    path = tmp_path / "home" / "trusted"
    monkeypatch.setenv("FEDSILO_TRUSTED_PLUGINS", str(path))
    monkeypatch.setattr(trusted_plugins, "_run_here", set())
    monkeypatch.setattr(trusted_plugins, "_named", {})
    yield path
    sys.modules.pop("ward_plugin", None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ward_plugin.py"
    path.write_text(TEXT)
    return path


def recorded(file: Path | str, digest: str = DIGEST) -> dict[str, str]:
    return {"plugin": str(file), "plugin-digests": f"ward_plugin={digest}"}


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin another process, which has only what the file says."""
    monkeypatch.setattr(trusted_plugins, "_run_here", set())


def test_a_plugin_that_nobody_named_is_not_executed(file: Path) -> None:
    with refuses(SettingError, "ward_plugin.py"):
        approve_plugins(recorded(file), ["ward_plugin"])
    assert "ward_plugin" not in sys.modules


def test_what_this_user_has_run_is_read_again_in_any_later_process(
    file: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_plugins({"ward_plugin": DIGEST})
    forget(monkeypatch)
    assert approve_plugins(recorded(file), ["ward_plugin"])["plugin"] == str(file)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700


def test_what_was_run_under_another_name_is_not_this_plugin(file: Path) -> None:
    remember_plugins({"another": DIGEST})
    with pytest.raises(SettingError, match="named by a file and not by you"):
        approve_plugins(recorded(file), ["ward_plugin"])


def test_a_digest_that_is_known_does_not_let_other_bytes_through(file: Path) -> None:
    remember_plugins({"ward_plugin": DIGEST})
    file.write_text(TEXT + "evil = True\n")
    with refuses(SettingError, "ward_plugin"):
        approve_plugins(recorded(file), ["ward_plugin"])


def test_the_readers_copy_takes_the_place_of_the_runs_path(file: Path) -> None:
    name_plugins([file])
    values = recorded("/gone/ward_plugin.py")
    assert approve_plugins(values, ["ward_plugin"])["plugin"] == str(file)


def test_a_copy_of_another_version_is_refused(file: Path) -> None:
    name_plugins([file])
    with refuses(SettingError, "ward_plugin"):
        approve_plugins(recorded(file, "0" * 64), ["ward_plugin"])


def test_a_plugin_without_a_digest_is_not_the_runs(file: Path) -> None:
    name_plugins([file])
    with pytest.raises(SettingError, match="SHA-256 not recorded"):
        approve_plugins({"plugin": str(file)}, ["ward_plugin"])


def test_a_file_of_settings_needs_no_digest_of_what_its_reader_names(file: Path) -> None:
    with pytest.raises(SettingError, match="--plugin"):
        approve_plugins({"plugin": str(file)}, ["ward_plugin"], needs_pins=False)
    name_plugins([file])
    approved = approve_plugins({"plugin": str(file)}, ["ward_plugin"], needs_pins=False)
    assert approved["plugin"] == str(file)


def test_a_file_that_no_setting_uses_is_left_out_unless_it_was_run(file: Path) -> None:
    assert approve_plugins({"plugin": str(file)}, [])["plugin"] == ""
    remember_plugins({"ward_plugin": DIGEST})
    assert approve_plugins({"plugin": str(file)}, [])["plugin"] == str(file)


def test_a_module_of_the_standard_library_is_no_plugin() -> None:
    with pytest.raises(SettingError, match="--plugin code"):
        approve_plugins({"plugin-digests": "code=0"}, ["code"])


def test_a_copy_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not a file: name your copy"):
        name_plugins([tmp_path / "none.py"])


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_of_digests_that_others_may_write_trusts_nobody(
    mode: int, file: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_plugins({"ward_plugin": DIGEST})
    forget(monkeypatch)
    place.chmod(mode)
    with pytest.raises(SettingError, match="can be written by others"):
        approve_plugins(recorded(file), ["ward_plugin"])


def test_a_file_of_digests_that_is_a_link_or_a_pipe_is_refused(
    file: Path, place: Path, tmp_path: Path
) -> None:
    place.parent.mkdir()
    place.symlink_to(tmp_path / "of-others")
    with pytest.raises(SettingError):
        approve_plugins(recorded(file), ["ward_plugin"])
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(SettingError):
        approve_plugins(recorded(file), ["ward_plugin"])


def test_a_run_begins_though_nothing_can_be_remembered(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.mkdir(parents=True)
    remember_plugins({"ward_plugin": DIGEST})
    assert "not remembered" in capsys.readouterr().err
    approved = {"plugin": "", "plugin-digests": f"ward_plugin={DIGEST}"}
    with pytest.raises(SettingError):  # trusted in this process, but there is no such file
        approve_plugins(approved, ["ward_plugin"])


def test_digests_of_two_processes_are_both_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_plugins({"one": DIGEST})
    forget(monkeypatch)
    remember_plugins({"two": DIGEST, "one": DIGEST})
    assert place.read_text() == f"{DIGEST}  one\n{DIGEST}  two\n"
