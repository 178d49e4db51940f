"""Plugs by name, from files, modules and entry points of installed packages."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.core.plugins import (
    changed_plugins,
    digest_plugins,
    digests_text,
    find_plugins,
    load_plugins,
    locate_plugin,
    module_digest,
    plugin_entries,
    resolve_plugin,
    stated_digests,
    with_plugin_settings,
    without_working_folder,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import defaults

COMMON = defaults(CommonSettings)


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    """Forget the modules that a test imports."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package ``lab_nets`` that offers the network ``tiny``; return its folder."""
    (tmp_path / "lab_nets").mkdir()
    (tmp_path / "lab_nets" / "__init__.py").write_text("")
    (tmp_path / "lab_nets" / "nets.py").write_text("def build(input_shape, classes): ...\n")
    _offer(tmp_path, "[fedsilo.networks]\ntiny = lab_nets.nets:build\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _offer(folder: Path, entries: str) -> None:
    info = folder / "lab_nets-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-nets\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entries)


def _file(folder: Path, text: str, name: str = "own_plug.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_of_plugin_is_a_module_of_its_name(tmp_path: Path) -> None:
    load_plugins(_file(tmp_path, "answer = 42\n"), ())
    assert resolve_plugin("network", "own_plug:answer", ()) == 42
    assert locate_plugin("method", "own_plug", ()).module == "own_plug"


def test_a_file_is_executed_once_and_again_when_its_bytes_are_others(tmp_path: Path) -> None:
    named = _file(tmp_path, "calls = []\n")
    load_plugins(named, ())
    resolve_plugin("network", "own_plug:calls", ()).append(1)
    load_plugins(named, ())
    assert resolve_plugin("network", "own_plug:calls", ()) == [1]
    _file(tmp_path, "calls = ()\n")
    load_plugins(named, ())
    assert resolve_plugin("network", "own_plug:calls", ()) == ()


def test_several_entries_have_commas_between() -> None:
    assert plugin_entries("a.py, my_package.nets,b.py") == ["a.py", "my_package.nets", "b.py"]
    assert plugin_entries("") == []


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("own_plug.py", "import nothing_there\n", "does not import .ModuleNotFoundError"),
        ("own_plug.py", "def x(:\n", "does not import .SyntaxError"),
        ("own_plug.py", "raise SystemExit(1)\n", "does not import .SystemExit"),
        ("json.py", "", "the name 'json' is taken"),
        ("fedbn.py", "", "the name 'fedbn' is taken"),
        ("own-plug.py", "", "'own-plug' is not a module name"),
    ],
)
def test_a_file_that_cannot_be_a_plug_is_refused_in_a_line(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    with pytest.raises(SettingError, match=told) as error:
        load_plugins(_file(tmp_path, text, name), {"fedbn"})
    assert "\n" not in str(error.value)
    assert "own_plug" not in sys.modules, "nothing is left of it"


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"own\.py cannot be read: No such file"):
        load_plugins(str(tmp_path / "own.py"), ())


def test_an_entry_point_names_a_plug(package: Path) -> None:
    assert find_plugins("network") == {"tiny": "lab_nets.nets:build"}
    assert resolve_plugin("network", "tiny", ()).__module__ == "lab_nets.nets"
    assert locate_plugin("network", "tiny", ()).invited
    assert not locate_plugin("network", "lab_nets.nets:build", ()).invited


def test_an_entry_point_with_a_name_of_ours_is_refused_by_its_package(package: Path) -> None:
    _offer(package, "[fedsilo.networks]\nconv = lab_nets.nets:build\n")
    with pytest.raises(SettingError, match="'lab-nets' offers network 'conv', but that name is"):
        locate_plugin("network", "other", {"conv"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lab_nets.nets:nothing", "module 'lab_nets.nets' has no 'nothing'"),
        ("lab_nets.none:build", "module 'lab_nets.none' does not import"),
        ("tini", "unknown network 'tini'; did you mean 'tiny'"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(package: Path, name: str, told: str) -> None:
    with pytest.raises(SettingError, match=told) as error:
        resolve_plugin("network", name, ["conv"])
    assert "\n" not in str(error.value)


def test_a_digest_is_of_a_files_bytes_or_of_all_text_files_of_a_package(package: Path) -> None:
    named = _file(package, "answer = 42\n")
    load_plugins(named, ())
    plugs = [locate_plugin("network", name, ()) for name in ("tiny", "own_plug:answer")]
    before = digest_plugins(plugs)
    assert before["own_plug"] == hashlib.sha256(b"answer = 42\n").hexdigest()
    (package / "lab_nets" / "sizes.json").write_text("{}")
    after = digest_plugins(plugs)
    assert after["own_plug"] == before["own_plug"]
    assert after["lab_nets"] != before["lab_nets"]
    assert changed_plugins(after, digests_text(before)) == ["lab_nets"]
    assert changed_plugins(after, digests_text(after)) == []
    assert changed_plugins(after, "") == ["lab_nets", "own_plug"]
    assert stated_digests(digests_text(after)) == after


def test_a_plug_without_a_file_cannot_be_compared() -> None:
    with pytest.raises(SettingError, match="plugin 'sys' has no file that hospitals could compare"):
        digest_plugins([locate_plugin("network", "sys:exit", ())])


def test_settings_of_a_plugged_method_travel_as_one_text() -> None:
    sent = {"rounds": 3, "plugin-settings": '{"own.mu": 0.5, "own.on": true}'}
    assert with_plugin_settings(sent, COMMON) == {"rounds": 3, "own.mu": 0.5, "own.on": True}
    for text in ("{", "[1]", '{"own.mu": [1]}'):
        with pytest.raises(SettingError, match="'plugin-settings' is not a JSON object"):
            with_plugin_settings({"plugin-settings": text}, COMMON)
    # A common setting, a group's or by its former name, would pass by the checks of the sites
    for key in ("seed", "privacy.trust", "trust", "train.learning-rate"):
        carried = json.dumps({"own.mu": 0.5, key: 1})
        with pytest.raises(SettingError, match=rf"'plugin-settings' .*'{key}'"):
            with_plugin_settings({"plugin-settings": carried}, COMMON)


def test_a_digest_needs_no_import(package: Path) -> None:
    (package / "lab_nets" / "__init__.py").write_text("raise SystemExit\n")
    assert len(module_digest("lab_nets")) == 64
    assert "lab_nets" not in sys.modules
    assert module_digest("no_such_module") == ""


def test_only_the_bytes_of_a_pin_are_executed(tmp_path: Path) -> None:
    named = _file(tmp_path, "raise SystemExit\n")
    with pytest.raises(
        SettingError, match="plugin own_plug differs from the version in 'plugin-digests'"
    ):
        load_plugins(named, (), {"own_plug": "0" * 64})


def test_the_working_folder_is_off_the_path_and_back_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), ".", "/elsewhere"])
    with without_working_folder():
        assert sys.path == ["/elsewhere"]
        sys.path.append("/added")
    assert sys.path == ["", str(tmp_path), ".", "/elsewhere", "/added"]
