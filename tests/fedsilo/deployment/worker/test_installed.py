"""Whether a run's app is the installed one: bundles as Flower makes them, altered in every way."""

import io
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.versions import FEDSILO
from fedsilo.deployment.worker.installed import ROOMS, InstalledApp, installed_app, local_changes
from tests.support.errors import refuses
from tests.support.releases import released_as

APP = Path(__file__).resolve().parents[4]
Change = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def files() -> Mapping[str, bytes]:
    """Return what Flower bundles of this checkout, by name."""
    with zipfile.ZipFile(io.BytesIO(_whole())) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@cache
def _whole() -> bytes:
    return build_fab_from_disk(APP)


@cache
def _installed() -> InstalledApp:
    return installed_app()


def _zip(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_the_bundle_that_flower_makes_of_this_checkout_is_the_installed_app(
    files: Mapping[str, bytes],
) -> None:
    installed = _installed()
    assert installed.folder == APP
    assert installed.package == APP / "fedsilo"
    assert {name.split("/")[0] for name in installed.digests} == set(ROOMS)
    installed.refuse_other(_whole())
    installed.refuse_other(_zip(files))
    # What an image does not have, and a checkout may, is no other app
    more = {"docs/page.md": b"", "tests/test_a.py": b""}
    installed.refuse_other(_zip({**files, **more}))


def test_a_bundle_of_an_installed_fedsilo_has_its_folders_side_by_side(
    files: Mapping[str, bytes],
) -> None:
    _installed().refuse_other(_zip({n.removeprefix("fedsilo/"): d for n, d in files.items()}))


def test_a_bundle_holds_what_computes_at_the_server_or_at_a_hospital(
    files: Mapping[str, bytes],
) -> None:
    # The pattern of 'core' also fits the fixtures of its tests, which are beside the rooms
    held = [name for name in files if "__init__" not in name and not name.startswith("tests/")]
    code = {name.removeprefix("fedsilo/").split("/")[0] for name in held}
    assert code - {".info", "_version.py", "pyproject.toml", "simulation.yaml"} == set(ROOMS)


@pytest.mark.parametrize("name", ["fedsilo/reports/clinic.py", "fedsilo/cli/main.py"])
def test_a_reworded_report_or_command_locks_no_hospital_out(
    name: str, files: Mapping[str, bytes]
) -> None:
    assert (APP / name).is_file()
    _installed().refuse_other(_zip({**files, name: b"# reworded\n"}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda f: f.update({"client_app/app.py": f["client_app/app.py"] + b"\n"}),
            "client_app/app.py",
        ),
        (lambda f: f.pop("fedsilo/core/errors.py"), "core/errors.py"),
        (lambda f: f.update({"client_app/methods/theft.py": b""}), "client_app/methods/theft.py"),
        (lambda f: f.update({"torch.py": b""}), "torch.py"),
        (lambda f: f.update({"other/__init__.py": b""}), "other/__init__.py"),
        (lambda f: f.update({"strategies/data.json": b"{}"}), "strategies/data.json"),
        (
            lambda f: f.update(
                {"pyproject.toml": f["pyproject.toml"].replace(b".client_app:app", b".theft:app")}
            ),
            "pyproject.toml",
        ),
        (lambda f: f.update({"pyproject.toml": b"= ="}), "pyproject.toml is not valid TOML"),
        (lambda f: f.pop("pyproject.toml"), "pyproject.toml"),
        (lambda f: f.update({"pyproject.toml": b"tool = 1"}), "pyproject.toml"),
        (lambda f: f.update({"pyproject.toml": b"[tool]\nflwr = 1"}), "pyproject.toml"),
        (lambda f: f.update({"client_app/\x1b[31m.py": b""}), r"'client_app/\x1b"),
    ],
)
def test_an_altered_app_is_refused_by_the_files_name(
    change: Change, named: str, files: Mapping[str, bytes]
) -> None:
    altered = dict(files)
    change(altered)
    with pytest.raises(RefusedError) as refused:
        _installed().refuse_other(_zip(altered))
    assert named in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_release_that_changes_no_compared_file_works_with_hospitals_of_the_one_before(
    files: Mapping[str, bytes],
) -> None:
    patch = released_as("9.8.7", files)
    changed = {name for name in files if files[name] != patch[name]}
    assert changed == {"fedsilo/_version.py", "pyproject.toml"}
    # A patch may also need another dependency, and have other rules for its own code
    project = patch["pyproject.toml"].replace(b'"numpy>=2.0"', b'"numpy>=2.1"')
    project = project.replace(b"line-length = 100", b"line-length = 99")
    assert project != patch["pyproject.toml"]
    patch |= {"pyproject.toml": project, "fedsilo/reports/clinic.py": b"# reworded"}
    _installed().refuse_other(_zip(patch))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("client_app/app.py", b"# a comment\n"),
        ("fedsilo/core/versions.py", b'FEDSILO = "9.8.7"\n'),
        ("pyproject.toml", b"\n[tool.flwr.app.config.more]\nkey = 1\n"),
    ],
)
def test_a_release_that_changes_a_line_of_a_compared_file_is_refused_with_both_versions(
    name: str, line: bytes, files: Mapping[str, bytes]
) -> None:
    minor = released_as("9.9.0", files)
    minor[name] += line
    with pytest.raises(RefusedError) as refused:
        _installed().refuse_other(_zip(minor))
    for named in (name.removeprefix("fedsilo/"), "fedsilo 9.9.0", f"fedsilo {FEDSILO}"):
        assert named in str(refused.value)


def test_many_files_are_counted() -> None:
    with pytest.raises(RefusedError, match=r"\.py and \d{3} more differ"):
        _installed().refuse_other(_zip({"pyproject.toml": b""}))


def test_a_bundle_that_names_a_file_twice_or_is_too_large_is_refused(
    files: Mapping[str, bytes],
) -> None:
    buffer = io.BytesIO(_zip(files))
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("client_app/app.py", files["client_app/app.py"])
    with pytest.raises(RefusedError, match="names a file twice"):
        _installed().refuse_other(buffer.getvalue())
    with refuses(RefusedError, 64):
        _installed().refuse_other(_zip({**files, "docs/a.md": bytes(65 << 20)}))


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("fedsilo/core/errors.py", "core/errors.py"),
        ("client_app/app.py", "fedsilo/client_app/app.py"),
    ],
)
def test_a_file_of_the_other_layout_cannot_hide_an_altered_one(
    name: str, hidden: str, files: Mapping[str, bytes]
) -> None:
    honest = {path: data for path, data in files.items() if path != name}
    for first, last in ((b"altered", files[name]), (files[name], b"altered")):
        with pytest.raises(RefusedError, match="names a file twice"):
            _installed().refuse_other(_zip({**honest, name: first, hidden: last}))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_a_bundle_is_it_is_refused_in_one_line_or_is_the_same(data: st.DataObject) -> None:
    whole = _whole()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(
        st.sampled_from([whole[:at], whole[:at] + b"\xff\x00" + whole[at + 2 :], whole[at:], b""])
    )
    told = ""
    with suppress(RefusedError):
        try:
            _installed().refuse_other(cut)
        except RefusedError as error:
            told = str(error)
            raise
    assert "\n" not in told


def test_of_local_changes_those_that_differ_are_named(tmp_path: Path) -> None:
    for room in ("client_app", "models"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("1\n")
    shutil.copy(APP / "pyproject.toml", tmp_path)
    assert local_changes(tmp_path) == []
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "a")):
        subprocess.run([*git, *command], check=True)
    bundle = _zip(
        {
            "pyproject.toml": (tmp_path / "pyproject.toml").read_bytes(),
            **{f"{room}/a.py": b"1\n" for room in ("client_app", "models")},
        }
    )
    installed_app(tmp_path).refuse_other(bundle)
    (tmp_path / "models" / "a.py").write_text("2\n")
    assert local_changes(tmp_path) == ["models/a.py"]
    with refuses(RefusedError, "models/a.py"):
        installed_app(tmp_path).refuse_other(bundle)


def test_without_an_installed_fedsilo_nothing_starts(tmp_path: Path) -> None:
    with refuses(SettingError, "pyproject.toml"):
        installed_app(tmp_path)
    shutil.copy(APP / "pyproject.toml", tmp_path)
    with pytest.raises(SettingError, match="has none of client_app, core"):
        installed_app(tmp_path)
