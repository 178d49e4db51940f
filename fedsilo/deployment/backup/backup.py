"""``fedsilo deploy backup`` and ``fedsilo deploy restore``."""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from fedsilo.core.files.atomic_files import build_folder, naming, open_regular, scratch_folder
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import join_names
from fedsilo.core.versions import FEDSILO, git_revision, installed_version
from fedsilo.deployment.backup.contents import DATABASE, BackupCopy
from fedsilo.deployment.backup.sealed_archive import (
    BackupError,
    Manifest,
    Origin,
    SealedReader,
    SealedWriter,
)
from fedsilo.deployment.deployment import (
    FILE,
    SERVER,
    Deployment,
    is_deployment,
    open_locked,
    read_deployment,
)

Say = Callable[[str], None]
_ATTEMPTS = 5  # copies until one is consistent


@dataclass(frozen=True)
class MadeBackup:
    """A backup that was made."""

    path: Path
    size: int  # bytes
    manifest: Manifest


def back_up(folder: Path, target: Path, passphrase: str, say: Say) -> MadeBackup:
    """Write a sealed copy of a deployment to the new file ``target`` while the deployment runs.

    The deployment's folder is locked meanwhile, so that no hospital is added or revoked, but runs
    go on. If a site writes while its files are copied, the whole copy is made again, up to five
    times in all.

    Args:
        folder: the deployment's folder.
        target: the backup's file, which must not exist. It appears only when it is complete.
        passphrase: encrypts the copy. Without it nobody can restore the backup.
        say: prints one line for each part that was left out, such as a symbolic link.

    Raises:
        BackupError: the target exists, the database or the authority's certificate cannot be read,
            or the sites of this machine write too fast.
        DeploymentError: the folder does not contain a deployment, or another command changes it.
        OSError: a file cannot be read or written.
    """
    target = target.expanduser().resolve()
    with open_locked(folder) as deployment, naming(target):
        _refuse_target(target, deployment)
        # A scratch folder beside the target is on the same disk, so the last step is a renaming.
        # Unsealed copies stay in the deployment's folder, as the target may be elsewhere
        with (
            scratch_folder(target.parent, target.name) as sealed,
            scratch_folder(deployment.folder, "backup") as unsealed,
        ):
            part = sealed / "backup"
            manifest = _write_consistent(deployment, part, unsealed, passphrase, say)
            part.chmod(0o600)
            part.rename(target)
    return MadeBackup(target, target.stat().st_size, manifest)


def _refuse_target(target: Path, deployment: Deployment) -> None:
    """Check that a backup does not replace a file, and would not be part of the next backup.

    Raises:
        BackupError: the target exists, its folder does not exist, or the target is in a subfolder
            of the deployment's folder.
    """
    fault = ""
    if os.path.lexists(target):
        fault = "exists: choose another name for the backup"
    elif not target.parent.is_dir():
        fault = "cannot be written, because its folder does not exist: make the folder first"
    elif target.is_relative_to(deployment.folder) and target.parent != deployment.folder:
        fault = "is among the deployment's own files: choose a place outside"
    if fault:
        raise BackupError(f"{target} {fault}")


def _write_consistent(
    deployment: Deployment, part: Path, unsealed: Path, passphrase: str, say: Say
) -> Manifest:
    """Write copies of a deployment to the file ``part`` until one is consistent.

    A copy is consistent if a restored deployment could resume its runs from it.

    Args:
        deployment: the deployment, which may run.
        part: the file to write; each attempt replaces it.
        unsealed: a folder for copies that are not encrypted yet.
        passphrase: the passphrase of the backup.
        say: prints what is left out, in the first attempt only.

    Raises:
        BackupError: no copy is consistent, or a file cannot be used.
    """
    for attempt in range(_ATTEMPTS):
        # Later attempts leave out the same links, so only the first one names them
        tell = say
        if attempt:
            tell = _say_nothing
        manifest = None
        with part.open("wb") as file:
            with SealedWriter(file, passphrase) as writer:
                _copy_database(deployment, writer, unsealed)
                if BackupCopy(deployment, writer, tell).copy_all():
                    _copy_plan(deployment, writer, unsealed)
                    made = datetime.now(UTC).isoformat(timespec="seconds")
                    manifest = writer.finish(made, _versions(), _describe(deployment))
            file.flush()
            os.fsync(file.fileno())
        if manifest:
            return manifest
    raise BackupError(
        f"the sites in {deployment.folder} wrote their private state during each of {_ATTEMPTS} "
        "copies: repeat when no run trains, or after 'fedsilo deploy down'"
    )


def _say_nothing(text: str) -> None:
    del text


def _copy_database(deployment: Deployment, writer: SealedWriter, scratch: Path) -> None:
    """Add a copy of the SuperLink's database, which may be in use, by SQLite's online backup.

    If the server has never run, there is no database, and nothing is added.

    Raises:
        BackupError: the file cannot be read as a database.
    """
    source = deployment.home(SERVER) / DATABASE
    if not source.is_file():
        return
    copy = scratch / DATABASE
    copy.unlink(missing_ok=True)
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as opened,
            closing(sqlite3.connect(copy)) as made,
        ):
            opened.backup(made)
    except sqlite3.Error as error:
        raise BackupError(
            f"{source} cannot be copied ({error}): run 'fedsilo doctor server'"
        ) from None
    writer.add(source.relative_to(deployment.folder).as_posix(), copy)


def _copy_plan(deployment: Deployment, writer: SealedWriter, scratch: Path) -> None:
    """Add a copy of deployment.json to the backup, without the ids of processes.

    The ids mean nothing on another machine. The copy is first written to ``scratch``. The
    deployment's own file is not changed.
    """
    plan = json.loads((deployment.folder / FILE).read_text(encoding="utf-8"))
    plan["started"] = {}
    copy = scratch / FILE
    copy.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    writer.add(FILE, copy)


def _versions() -> dict[str, str]:
    return {
        "fedsilo": FEDSILO,
        "revision": git_revision(),
        "flower": installed_version("flwr"),
        "sqlite": sqlite3.sqlite_version,
    }


def _describe(deployment: Deployment) -> Origin:
    return Origin(
        authority=_authority_of(deployment),
        folder=str(deployment.folder),
        address=deployment.address,
        sites=deployment.sites,
        hospitals=deployment.hospitals,
    )


def _authority_of(deployment: Deployment) -> str:
    """Return the SHA-256 of the authority's certificate, by which a deployment is identified.

    Raises:
        BackupError: the certificate's file is missing, not a regular file, or larger than 1 GiB.
    """
    path = deployment.secrets / "ca.crt"
    fault = file_fault(path)
    if not path.is_file():
        fault = "does not exist"
    if fault:
        raise BackupError(f"{path} {fault}: restore the server's own file")
    return sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Restored:
    """A deployment that was restored, and sentences for its operator."""

    deployment: Deployment
    manifest: Manifest
    notes: list[str]


def restore(source: Path, folder: Path, passphrase: Callable[[], str]) -> Restored:
    """Restore a deployment from a backup into a new or empty folder.

    All files are checked and decrypted before the folder appears, so an error leaves nothing.
    Nothing is started.

    Args:
        source: the backup.
        folder: the folder of the restored deployment, which is new or empty. Paths in
            deployment.json are changed to it.
        passphrase: returns the passphrase; called once the backup is known to be whole.

    Returns:
        The deployment, the backup's manifest, and sentences for the operator, such as that versions
        differ.

    Raises:
        BackupError: the folder is in use, the backup is truncated, altered or of another format, or
            the passphrase is wrong.
        OSError: a file cannot be read or written.
    """
    source, folder = source.expanduser(), folder.expanduser().resolve()
    with os.fdopen(open_regular(source.resolve(), os.O_RDONLY), "rb") as file:
        reader = SealedReader(source, file)
        _refuse_used(folder, reader.manifest)
        keys = reader.unlock(passphrase())

        def fill(scratch: Path) -> None:
            scratch.chmod(0o700)
            reader.extract(keys, scratch)
            # The folder does not have its final name yet, so only texts are changed
            _move(scratch, reader.manifest.deployment.folder, str(folder))

        build_folder(folder, fill)
    deployment = read_deployment(folder)
    return Restored(deployment, reader.manifest, _list_notes(deployment, reader.manifest))


def _refuse_used(folder: Path, manifest: Manifest) -> None:
    """Check that the folder of a restored deployment is new or empty.

    Raises:
        BackupError: it has files. The message says whether they are a deployment, and which one.
    """
    fault = ""
    if is_deployment(folder):
        present = read_deployment(folder)
        fault = "holds another deployment than the backup"
        if _authority_of(present) == manifest.deployment.authority:
            fault = "already holds the deployment of this backup"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fault = "is not an empty folder"
    if fault:
        raise BackupError(
            f"{folder} {fault}: name a new folder by --deployment; nothing was written"
        )


def _move(folder: Path, before: str, now: str) -> None:
    """Change the paths in a restored deployment.json that lead into the deployment's old folder.

    The path of the deployment itself is changed too. Paths elsewhere, such as that of the data,
    stay.

    Args:
        folder: the folder with deployment.json, which may still have a temporary name.
        before: the old folder of the deployment.
        now: its new folder.
    """
    path = folder / FILE
    plan = json.loads(path.read_text(encoding="utf-8"))
    for config in plan["node_config"].values():
        for key, value in config.items():
            if isinstance(value, str) and Path(value).is_relative_to(before):
                config[key] = str(Path(now) / Path(value).relative_to(before))
    plan["folder"] = now
    path.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")


def _list_notes(deployment: Deployment, manifest: Manifest) -> list[str]:
    """List sentences that the operator of a restored deployment must know.

    The sentences are about other versions of fedsilo and Flower, the address that hospitals use,
    and the epsilon that local sites spent after the backup. The list may be empty.
    """
    # Other versions may refuse the hospitals' messages, or number them differently
    notes = []
    own = _versions()
    for software in ("fedsilo", "revision", "flower"):
        before = manifest.versions.get(software, "unknown")
        if before != own[software]:
            notes.append(
                f"the backup was made with {software} {before}, but this is {own[software]}"
            )
    if deployment.address:
        notes.append(
            f"hospitals connect to {deployment.address}: let that name lead to this machine, and "
            "make sure that the old server does not run"
        )
    if deployment.sites:
        notes.append(
            f"the private state of {join_names(deployment.sites)} is that of {manifest.made}: what "
            "these sites spent of their epsilon afterwards is not in it"
        )
    return notes
