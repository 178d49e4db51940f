"""The files of a deployment that a backup has, and the order in which they are copied.

A run that goes on writes while its files are copied. Its checkpoints are copied first: a resumed
run cuts the growing CSV files back to the checkpoint, so these may be longer, but never shorter.
The private state of a site on this machine is copied last, and must not change meanwhile.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsilo.deployment.backup.sealed_archive import SealedWriter
from fedsilo.deployment.deployment import SERVER, Deployment
from fedsilo.server_app.records.run_directory import LOCK, RunDirectory

DATABASE = "superlink.db"
_FLOWER = "flwr"
_LEFT_OUT = (LOCK, DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")

_Snapshot = dict[str, tuple[int, int]]  # path -> size in bytes and time of the last write


@dataclass(frozen=True)
class BackupCopy:
    """Copies one deployment into one backup."""

    deployment: Deployment
    writer: SealedWriter
    say: Callable[[str], None]

    def copy_all(self) -> bool:
        """Copy the deployment's files into the backup, and return whether the copy is consistent.

        The order is: secrets and the hospitals' kits, run directories, other files of the server,
        sites on this machine. The caller copies the database and deployment.json. Logs, locks,
        temporary files, caches, Flower's folders and symbolic links are not copied. ``say`` reports
        links, except those directly in the folder of runs.

        Returns:
            False in each of these cases, otherwise True:

            - A site's file changed while the site was copied.
            - A run deleted all its checkpoints before they could be copied.
            - There are sites on this machine, and a run has written a newer checkpoint since it
              was copied. The sites' files may then be too new for the copied checkpoint.
        """
        folder = self.deployment.folder
        for part in (self.deployment.secrets, folder / "kits"):
            self._copy_folder(part)
        newest = {}
        for run in self._runs():
            newest[run] = self._copy_run(run)
        server = self.deployment.home(SERVER)
        # Flower makes its own folder anew at each start
        self._copy_folder(server, (self.deployment.runs, server / _FLOWER))
        unchanged = [self._copy_site(site) for site in self.deployment.sites]
        if not all(unchanged) or None in newest.values():
            return False
        # Sites keep the states of two rounds, so the server's copy must not fall behind theirs
        if self.deployment.sites:
            return all(_newest_checkpoint(run) == name for run, name in newest.items())
        return True

    def _runs(self) -> list[RunDirectory]:
        """List the run directories at the server, sorted by path.

        Symbolic links and files directly in the folder of runs are left out. If that folder does
        not exist, the list is empty.
        """
        if not self.deployment.runs.is_dir():
            return []
        folders = [path for path in self.deployment.runs.iterdir() if _is_own_folder(path)]
        return [RunDirectory(path) for path in sorted(folders)]

    def _copy_run(self, run: RunDirectory) -> str | None:
        """Copy a run directory, its checkpoints before its other files, because the run may go on.

        Returns:
            The file name of the newest checkpoint that was copied, or an empty string if the run
            had no checkpoints. The result is None if the run deleted all checkpoints before they
            were copied.
        """
        # The newest first, because a run that goes on deletes its oldest
        present = sorted(run.checkpoints.glob("round-*.safetensors"), reverse=True)
        copied = [path.name for path in present if self._copy_file(path)]
        self._copy_folder(run.path, (run.checkpoints,))
        if present and not copied:
            return None
        return max(copied, default="")

    def _copy_site(self, site: str) -> bool:
        """Copy the files of a site on this machine, and return whether they all stayed the same.

        The files are listed before and after the copy. A file has changed if its size or the
        time of its last write differs, or if it is new or gone. Flower's folder and the cache of
        decoded data are left out.
        """
        # Flower comes with it, which a restoration does not need
        from fedsilo.client_app.site.node import OWN

        home = self.deployment.home(site)
        # The cache is decoded again from the data
        left_out = (home / _FLOWER, home / "state" / OWN / "cache")
        before = _take_snapshot(home, left_out)
        self._copy_folder(home, left_out)
        return before == _take_snapshot(home, left_out)

    def _copy_folder(self, folder: Path, left_out: Collection[Path] = ()) -> None:
        for path in _files_in(folder, left_out):
            if path.is_symlink():
                self.say(f"not in the backup, because it is a symbolic link: {path}")
            else:
                self._copy_file(path)

    def _copy_file(self, path: Path) -> bool:
        """Copy a file into the backup, and return whether it still existed.

        A run or a site deletes files while it works, so a missing file is not an error.
        """
        name = path.relative_to(self.deployment.folder).as_posix()
        # A run and a site delete their older states while they work
        with suppress(FileNotFoundError):
            self.writer.add(name, path)
            return True
        return False


def _newest_checkpoint(run: RunDirectory) -> str:
    names = [path.name for path in run.checkpoints.glob("round-*.safetensors")]
    return max(names, default="")


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _files_in(folder: Path, left_out: Collection[Path]) -> Iterator[Path]:
    """Yield the files below a folder that a backup copies, and all symbolic links to folders.

    Links are yielded so that the caller can report them, and are never followed. Logs (.log), locks
    (.lock), temporary files (such as ``.NAME.part-1``), the database and the folders ``left_out``
    are skipped.

    In each folder, links to folders come first, then files and links to files, then subfolders.
    Each group is sorted by name.
    """
    for parent, folders, names in os.walk(folder):
        kept = []
        for name in sorted(folders):
            path = Path(parent, name)
            if path.is_symlink():
                yield path
            elif path not in left_out:
                kept.append(name)
        folders[:] = kept  # os.walk goes into these
        for name in sorted(names):
            is_part = name.startswith(".") and ".part" in name
            if name not in _LEFT_OUT and not is_part and not name.endswith((".log", ".lock")):
                yield Path(parent, name)


def _take_snapshot(folder: Path, left_out: Collection[Path]) -> _Snapshot:
    """Record the size and the time of the last write of each file that a backup would copy.

    Files that vanish meanwhile are left out. Two equal snapshots show that no file has changed.

    Args:
        folder: the folder whose files are recorded.
        left_out: folders below it that are skipped.

    Returns:
        path -> (size in bytes, time in nanoseconds).
    """
    found = {}
    for path in _files_in(folder, left_out):
        with suppress(FileNotFoundError):
            facts = path.lstat()
            found[str(path)] = (facts.st_size, facts.st_mtime_ns)
    return found
