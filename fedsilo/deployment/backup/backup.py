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

    Runs go on meanwhile, but other commands cannot change the deployment. ``say`` reports each
    symbolic link that is left out.

    Raises:
        BackupError: the target cannot be used, or runs changed files during five copies.
        DeploymentError: there is no deployment, or another command is changing it.
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
    """Raise a ``BackupError`` unless a new backup can be written to ``target``.

    The target must not exist, not even as a broken link, and its folder must exist. It may be
    directly in the deployment's folder, but not in a subfolder.
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
    """Write a backup of a deployment to the file ``part``, and return its manifest.

    If a run replaced files meanwhile, everything is copied again. After five copies, a
    ``BackupError`` is raised. The folder ``unsealed`` is for files that are not encrypted yet.
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
    """Add a copy of the server's database, which may be in use, to a backup.

    The folder ``scratch`` holds the copy until it is encrypted. If the server has never run,
    nothing is added. A database that cannot be read raises a ``BackupError``.
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
    """Restore a deployment from a backup into a missing or empty folder, without starting it.

    The folder appears after all files were checked and decrypted. The result has notes for the
    operator, for example about another version of Flower.

    Raises:
        BackupError: the folder is in use, the backup is damaged, or the passphrase is wrong.
        DeploymentError: a deployment.json is damaged.
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
    """Raise a ``BackupError`` unless the folder for a restored deployment is missing or empty.

    The message says whether the folder contains the deployment of this backup, another deployment
    or other files. Equal certificates of the authority mean the same deployment.
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

    A path in a site's settings is changed only if it leads into ``before``. ``folder`` contains
    deployment.json now. ``before`` and ``now`` are absolute paths.
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

    They name software with another version than in the backup. They remind of the address that
    hospitals use. They warn that epsilon spent by local sites after the backup is missing.
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
