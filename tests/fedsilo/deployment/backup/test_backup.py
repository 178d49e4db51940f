"""A backup holds a whole deployment, opens only with its passphrase, and is restored or refused."""

import getpass
import json
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo.cli.main import main
from fedsilo.core.errors import SettingError
from fedsilo.deployment.backup import backup, contents, sealed_archive
from fedsilo.deployment.backup.passphrase import read_passphrase
from fedsilo.deployment.backup.sealed_archive import BackupError, SealedWriter
from fedsilo.deployment.commands import make_secrets, prepare
from fedsilo.deployment.deployment import SERVER, Deployment, DeploymentError, locked, plan
from fedsilo.server_app.records.run_directory import RunDirectory

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def quick_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive keys in a millisecond."""
    monkeypatch.setattr(sealed_archive, "COST", 2**12)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Return a deployment with a site of its own, a hospital, a database and a run."""
    folder = tmp_path_factory.mktemp("deployments") / "old"
    made = plan(folder, ["a"], [8000, 9092, 9101], {"device": "cpu"}, "fl.example.org:9092")
    prepare(made)
    make_secrets(made)
    made = made.with_node("a", "7").with_node("north", "8")
    run = RunDirectory(made.runs / "hearts")
    run.checkpoints.mkdir(parents=True)
    for number in (3, 4):
        (run.checkpoints / f"round-{number:06d}.safetensors").write_bytes(bytes([number]) * 100)
    (run.path / "metrics.csv").write_text("round,site\n")
    (run.path / "empty").write_bytes(b"")
    # Two whole chunks and a part
    (run.path / "model.safetensors").write_bytes(b"model" * 500_000)
    # A run may have the name of a folder that is left out elsewhere
    for path in (
        made.home("a") / "state" / "cache" / "a" / "round-000004-00.safetensors",
        made.home("a") / "state" / ".own" / "a" / "seed",
        folder / "kits" / "north.zip",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("private")
    for path in (made.home("a") / "a.log", made.home("a") / "state" / ".own" / "cache" / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left out")
    return made


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _restore(source: Path, folder: Path, passphrase: str = PASSPHRASE) -> backup.Restored:
    return backup.restore(source, folder, lambda: passphrase)


@pytest.fixture(scope="module")
def made(planned: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a backup, made while the SuperLink's database is open and has unwritten pages."""
    target = tmp_path_factory.mktemp("backups") / "monday.backup"
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(sqlite3.connect(planned.home(SERVER) / "superlink.db")) as database,
    ):
        patch.setattr(sealed_archive, "COST", 2**12)
        database.execute("pragma journal_mode = wal")
        database.execute("create table node (id)")
        database.execute("insert into node values (7)")
        database.commit()
        database.execute("insert into node values (8)")  # not committed
        backup.back_up(planned.folder, target, PASSPHRASE, print)
    return target


def test_all_files_come_back_and_paths_lead_into_the_new_folder(
    made: Path, planned: Deployment, tmp_path: Path
) -> None:
    restored = _restore(made, tmp_path / "new").deployment
    before, now = _contents(planned.folder), _contents(restored.folder)
    left_out = {"deployment.lock", "sites/a/a.log", "sites/a/state/.own/cache/x"}
    database = {name for name in before if "superlink.db" in name}
    assert now.keys() == (before.keys() - left_out - database) | {"server/superlink.db"}
    for name in now.keys() - {"deployment.json", "server/superlink.db"}:
        assert now[name] == before[name], name
    assert restored.node_config["a"]["state-dir"] == str(restored.home("a") / "state")
    assert restored.nodes == planned.nodes
    assert restored.ports == planned.ports
    for path in restored.folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    with closing(sqlite3.connect(restored.home(SERVER) / "superlink.db")) as found:
        assert found.execute("select id from node").fetchall() == [(7,)]


def test_nothing_is_readable_without_the_passphrase(made: Path, planned: Deployment) -> None:
    content = made.read_bytes()
    for name, secret in _contents(planned.secrets).items():
        assert secret[-60:] not in content, name
    assert made.stat().st_mode & 0o777 == 0o600


def test_the_manifest_names_versions_deployment_and_files(made: Path, planned: Deployment) -> None:
    manifest = json.loads(zipfile.ZipFile(made).read("manifest.json"))
    assert {"fedsilo", "flower", "revision"} <= manifest["versions"].keys()
    assert manifest["deployment"]["sites"] == ["a"]
    assert manifest["deployment"]["hospitals"] == ["north"]
    assert manifest["files"]["server/runs/hearts/model.safetensors"]["size"] == 2_500_000


def test_a_wrong_passphrase_writes_nothing(made: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupError):
        _restore(made, tmp_path / "new", "another passphrase")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_a_truncated_backup_is_refused_before_anybody_types(
    share: float, made: Path, tmp_path: Path
) -> None:
    content = made.read_bytes()
    (tmp_path / "cut").write_bytes(content[: int(share * len(content))])
    with pytest.raises(BackupError):
        backup.restore(tmp_path / "cut", tmp_path / "new", lambda: pytest.fail("asked"))
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a backup of a deployment of few bytes."""
    folder = tmp_path_factory.mktemp("small")
    planned = plan(folder / "dep", ["a"], [8000, 9092, 9101], {})
    prepare(planned)
    make_secrets(planned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed_archive, "COST", 2**12)
        backup.back_up(planned.folder, folder / "b", PASSPHRASE, print)
    return folder / "b"


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_an_altered_byte_is_noticed_or_changes_nothing(
    data: st.DataObject, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(small.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("altered")
    (folder / "b").write_bytes(content)
    try:
        _restore(folder / "b", folder / "new")
    except BackupError:
        assert not (folder / "new").exists()
    else:  # a time in the zip's own headers, which nobody reads
        _restore(small, folder / "expected")
        now, expected = _contents(folder / "new"), _contents(folder / "expected")
        assert now.pop("deployment.json")
        assert expected.pop("deployment.json")
        assert now == expected


def test_who_replaces_a_file_and_its_digest_needs_the_passphrase(
    small: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(small) as before, zipfile.ZipFile(tmp_path / "b", "w") as after:
        manifest = json.loads(before.read("manifest.json"))
        # The two keys of the server and the site are exchanged, each with its true digest
        one, other = "secrets/server.key", "secrets/a.key"
        files = manifest["files"]
        files[one]["sha256"], files[other]["sha256"] = files[other]["sha256"], files[one]["sha256"]
        for entry in before.namelist():
            source = {f"files/{one}": f"files/{other}", f"files/{other}": f"files/{one}"}
            if entry != "manifest.json":
                after.writestr(entry, before.read(source.get(entry, entry)))
        after.writestr("manifest.json", json.dumps(manifest))
    with pytest.raises(BackupError):
        _restore(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("cost", [2**12 + 1, 2**30, -1, "x"])
def test_a_manifest_whose_cost_scrypt_cannot_use_is_refused(
    cost: object, small: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(small) as before, zipfile.ZipFile(tmp_path / "b", "w") as after:
        for entry in before.namelist():
            content = before.read(entry)
            if entry == "manifest.json":
                content = json.dumps(json.loads(content) | {"cost": cost}).encode()
            after.writestr(entry, content)
    with pytest.raises(BackupError):
        _restore(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_cannot_be_moved_even_under_a_valid_seal(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    with (tmp_path / "b").open("wb") as file, SealedWriter(file, PASSPHRASE) as writer:
        writer.add("one", tmp_path / "x")
        writer.add("two", tmp_path / "x")
        # Its digest is now that of the other file, as if somebody had the seal's key only
        writer.files["one"], writer.files["two"] = writer.files["two"], writer.files["one"]
        origin = sealed_archive.Origin(authority="", folder="", address="", sites=[], hospitals=[])
        writer.finish("now", {}, origin)
    with pytest.raises(BackupError), (tmp_path / "b").open("rb") as file:
        sealed_archive.SealedReader(tmp_path / "b", file)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_a_name_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    with (tmp_path / "b").open("wb") as file, SealedWriter(file, PASSPHRASE) as writer:
        writer.add(name, tmp_path / "x")
        origin = sealed_archive.Origin(authority="", folder="", address="", sites=[], hospitals=[])
        writer.finish("now", {}, origin)
    with pytest.raises(BackupError):
        _restore(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_folder_in_use_is_restored_into(
    made: Path, small: Path, planned: Deployment, tmp_path: Path
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter").write_text("mine")
    before = _contents(planned.folder)
    faults = []
    for source, folder in (
        (made, planned.folder),
        (small, planned.folder),
        (made, tmp_path / "used"),
    ):
        with pytest.raises(BackupError) as refused:
            backup.restore(source, folder, lambda: pytest.fail("asked"))
        faults.append(str(refused.value).replace(str(folder), ""))
    assert len(set(faults)) == 3, "the same deployment, another one, and no deployment differ"
    assert _contents(planned.folder) == before
    assert _contents(tmp_path / "used") == {"letter": b"mine"}


def test_a_backup_replaces_no_file_and_is_not_in_itself(
    planned: Deployment, tmp_path: Path
) -> None:
    (tmp_path / "letter").write_text("mine")
    for target in (tmp_path / "letter", tmp_path / "none" / "b", planned.home(SERVER) / "b"):
        with pytest.raises(BackupError):
            backup.back_up(planned.folder, target, PASSPHRASE, print)
    assert _contents(tmp_path) == {"letter": b"mine"}
    with locked(planned.folder), pytest.raises(DeploymentError):
        backup.back_up(planned.folder, tmp_path / "b", PASSPHRASE, print)


def test_checkpoints_are_copied_before_the_files_that_grow(made: Path) -> None:
    names = [name for name in zipfile.ZipFile(made).namelist() if "/hearts/" in name]
    places = {name.rpartition("/")[2]: at for at, name in enumerate(names)}
    assert places["round-000004.safetensors"] < places["round-000003.safetensors"]
    assert places["round-000003.safetensors"] < places["metrics.csv"]


@pytest.mark.parametrize("times", [1, 99])
def test_a_copy_during_which_a_run_goes_on_is_made_again(
    times: int, planned: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    copy_site = contents.BackupCopy._copy_site

    def slow(self: contents.BackupCopy, site: str) -> bool:
        state = planned.home("a") / "state" / "growing"
        attempts.append(site)
        if len(attempts) <= times:
            state.write_text("x" * len(attempts))
            copy_site(self, site)
            return False
        return copy_site(self, site)

    monkeypatch.setattr(contents.BackupCopy, "_copy_site", slow)
    if times == 1:
        backup.back_up(planned.folder, tmp_path / "b", PASSPHRASE, print)
        assert len(attempts) == 2
        assert _restore(tmp_path / "b", tmp_path / "new")
    else:
        with pytest.raises(BackupError):
            backup.back_up(planned.folder, tmp_path / "b", PASSPHRASE, print)
        assert _contents(tmp_path) == {}
        assert not list(planned.folder.glob(".backup*"))


def test_a_link_is_left_out_with_a_line(planned: Deployment, tmp_path: Path) -> None:
    link = planned.secrets / "elsewhere.key"
    link.symlink_to(tmp_path / "elsewhere")
    told: list[str] = []
    try:
        backup.back_up(planned.folder, tmp_path / "b", PASSPHRASE, told.append)
    finally:
        link.unlink()
    assert [line for line in told if str(link) in line]


def test_a_passphrase_comes_from_a_private_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "passphrase"
    for content, mode in (("long enough indeed\nsecond", 0o644), ("short", 0o600)):
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(SettingError):
            read_passphrase(file, is_new=True)
    with pytest.raises(SettingError):  # nobody can be asked in a test
        read_passphrase(None, is_new=True)
    file.write_text("long enough indeed\nsecond")
    assert read_passphrase(file, is_new=True) == "long enough indeed"


@pytest.mark.parametrize(
    ("answers", "is_new", "accepted"),
    [
        (["long enough indeed"] * 2, True, True),
        (["long enough indeed", "long enough inded"], True, False),
        (["long enough indeed"], False, True),
        (["short", "short"], True, False),
    ],
)
def test_a_passphrase_is_asked_for_twice_only_for_a_new_backup(
    answers: list[str], is_new: bool, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list(answers)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(getpass, "getpass", lambda prompt: given.pop(0))
    if accepted:
        assert read_passphrase(None, is_new=is_new) == answers[0]
    else:
        with pytest.raises(SettingError):
            read_passphrase(None, is_new=is_new)
    assert not given


def test_the_commands_say_what_is_next(
    planned: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PASSPHRASE)
    secret.chmod(0o600)
    target, new = tmp_path / "b", tmp_path / "new"
    words = ("--passphrase-file", str(secret), "--deployment")
    assert main(["deploy", "backup", str(target), *words, str(planned.folder)]) == 0
    assert main(["deploy", "restore", str(target), *words, str(new)]) == 0
    assert str(new) in capsys.readouterr().out
    assert main(["deploy", "restore", str(target), *words, str(new)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
