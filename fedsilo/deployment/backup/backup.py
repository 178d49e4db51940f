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
    """Back up a deployment, which may be running, into the new encrypted file ``target``.

    Meanwhile, other commands cannot change the deployment, but runs go on. If a run's writing makes
    the copy inconsistent, everything is copied again, at most five times in all. Only the owner can
    read the file.

    Args:
        folder: the deployment's folder.
        target: the backup's file, which must not exist. It appears only when it is complete.
        passphrase: encrypts the copy. Without it nobody can restore the backup.
        say: prints one line for a symbolic link that is left out.

    Returns:
        The backup's path, its size in bytes and its manifest.

    Raises:
        BackupError: the target exists, its folder is missing, or it is in a subfolder of the
            deployment. Also raised if the database or the authority's certificate cannot be read,
            or if all five copies are inconsistent.
        DeploymentError: the folder does not contain a deployment, or another command is changing
            it.
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
            # Until it has its own mode, the scratch folder, mode 0700, hides it from other users
            part.chmod(0o600)
            part.rename(target)
    return MadeBackup(target, target.stat().st_size, manifest)


def _refuse_target(target: Path, deployment: Deployment) -> None:
    """Check that a new backup can be written to ``target``.

    The target must not exist, not even as a broken link, and its folder must exist. A target in a
    subfolder of the deployment is refused, because backups copy the subfolders. A target directly
    in the deployment's folder is accepted.

    Raises:
        BackupError: one of these conditions is not met.
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
    """Write a backup of a deployment to the file ``part``, until a copy is consistent.

    ``BackupCopy.copy_all`` decides whether a copy is consistent. A restored deployment can resume
    its runs only from a consistent copy. At most five copies are made. Each copy begins with the
    database and ends with deployment.json.

    Args:
        deployment: the deployment, which may be running.
        part: the file to write. Each new copy replaces the last one.
        unsealed: a folder for files that are not encrypted yet.
        passphrase: the passphrase of the backup.
        say: prints one line for a symbolic link that is left out, during the first copy only.

    Returns:
        The manifest of the backup, which lists its files.

    Raises:
        BackupError: all five copies are inconsistent, or the database or the authority's
            certificate cannot be read.
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
            # Only a file that is on the disk gets its name: a power cut leaves no half of a backup
            file.flush()
            os.fsync(file.fileno())
        if manifest:
            return manifest
    raise BackupError(
        f"files of a run in {deployment.folder} (its checkpoints, or the sites' private state) "
        f"were replaced during each of {_ATTEMPTS} copies: repeat when no run trains, or after "
        "'fedsilo deploy down'"
    )


def _say_nothing(text: str) -> None:
    del text


def _copy_database(deployment: Deployment, writer: SealedWriter, scratch: Path) -> None:
    """Add a copy of the server's database to a backup.

    The database may be in use. Therefore SQLite's online backup first copies it into the folder
    ``scratch``, and ``writer`` then adds the copy. If the server has never run, there is no
    database, and nothing is added.

    Raises:
        BackupError: the database cannot be read.
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
    """Add a copy of deployment.json with an empty field ``started`` to a backup.

    That field has the ids of processes, which mean nothing on another machine. The copy is first
    written into the folder ``scratch``. The deployment's own file does not change.
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
    """Return the SHA-256 of the file of the authority's certificate, ``ca.crt``.

    The value is in hexadecimal digits. Each deployment has its own authority, so the value
    identifies a deployment.

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
    """Restore a deployment from a backup into a new or empty folder, without starting anything.

    The folder appears only after all files were checked and decrypted. Only its owner can read the
    files. Paths in deployment.json that lead into the old folder are changed to the new one.

    Args:
        source: the backup.
        folder: the folder of the restored deployment, which must be missing or empty.
        passphrase: returns the passphrase. It is called after the backup's files and the folder
            have been checked.

    Returns:
        The deployment, the backup's manifest, and notes for the operator, such as a different
        version of Flower.

    Raises:
        BackupError: the folder is in use, the backup is truncated, altered or of another format, or
            the passphrase is wrong.
        DeploymentError: the restored deployment.json cannot be used, and the new folder stays. Also
            raised if the folder already contains a damaged deployment.
        OSError: a file cannot be read or written.
    """
    source, folder = source.expanduser(), folder.expanduser().resolve()
    with os.fdopen(open_regular(source.resolve(), os.O_RDONLY), "rb") as file:
        reader = SealedReader(source, file)
        _refuse_used_folder(folder, reader.manifest)
        keys = reader.unlock(passphrase())

        def fill(scratch: Path) -> None:
            scratch.chmod(0o700)
            reader.extract(keys, scratch)
            # The folder does not have its final name yet, so only texts are changed
            _replace_old_paths(scratch, reader.manifest.deployment.folder, str(folder))

        build_folder(folder, fill)
    deployment = read_deployment(folder)
    return Restored(deployment, reader.manifest, _list_notes(deployment, reader.manifest))


def _refuse_used_folder(folder: Path, manifest: Manifest) -> None:
    """Check that the folder for a restored deployment does not exist or is empty.

    Raises:
        BackupError: the path is a file, or the folder is not empty. The message says whether the
            folder contains this backup's deployment, another deployment or other files. Deployments
            with equal certificates of the authority count as the same. Also raised if the
            certificate in the folder cannot be read.
        DeploymentError: the folder contains a damaged deployment.
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


def _replace_old_paths(folder: Path, before: str, now: str) -> None:
    """Change the paths in a restored deployment.json from the old folder to the new one.

    The field ``folder`` becomes ``now``. A path in a site's node config is changed only if it leads
    into the old folder. Other paths stay, such as a path to data elsewhere.

    Args:
        folder: the folder that contains deployment.json now. It may have a temporary name.
        before: the old folder of the deployment, as an absolute path.
        now: the final folder of the deployment, as an absolute path.
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
    """List notes for the operator of a restored deployment, one sentence each.

    There is a note for each of these cases that applies:

    - The version of fedsilo, its git revision or the version of Flower differs from the backup's.
    - The deployment has an address for hospitals, which must now lead to this machine.
    - There are sites on this machine. The backup lacks the epsilon that they spent after it was
      made.
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
