"""The fedsilo that a hospital has installed, and the check that a run's app is the same.

A run brings its app as a zip (Flower's FAB). The worker never executes it. It executes the
installed app, and answers only a run whose app is the same, file by file, in all that computes at
the server or at a hospital. So a site file, an audit log and every limit hold, whatever the server
sends; and a reworded report locks no hospital out.
"""

import hashlib
import io
import subprocess
import tomllib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.files.locations import installed_folder
from fedsilo.core.versions import TRIED_FLOWER, WORKER_FLOWER

# What a run and a hospital have in common: all that computes at the server or at a hospital.
# The commands, reports and pages of fedsilo/ may differ: they run only where somebody calls them
ROOMS = ("client_app", "core", "datasets", "models", "server_app", "strategies")
PYPROJECT = "pyproject.toml"
_PACKAGE = "fedsilo/"  # in a checkout it holds 'core'; in an installed fedsilo all are side by side
_IN_PACKAGE = ("core",)
# A checkout has these beside the rooms: Flower bundles them, but a hospital's image may lack them
_BESIDE = (*(f"{name}/" for name in ("benchmarks", "docker", "docs", "release", "tests")), ".")
# File types that Flower bundles
_BUNDLED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
_LARGEST = 64 * 2**20  # the most bytes of an app's unpacked files; fedsilo has 3 MiB
_NAMED = 3  # the most files named in a refusal


@dataclass(frozen=True)
class InstalledApp:
    """The installed app: the files that Flower would bundle."""

    folder: Path  # the folder of pyproject.toml
    package: Path  # the folder of fedsilo's own rooms: in a checkout 'fedsilo', else ``folder``
    digests: Mapping[str, str]  # the SHA-256 of each compared file, by path without 'fedsilo/'
    project: Mapping[str, Any]  # the content of pyproject.toml, as a bundle has it

    def refuse_other(self, bundle: bytes) -> None:
        """Refuse a run whose app, a zip, differs from this one.

        Raises:
            RefusedError: names files that differ.
        """
        files = {name.removeprefix(_PACKAGE): data for name, data in _unpack(bundle).items()}
        theirs = {name: _digest(data) for name, data in files.items() if _of_rooms(name)}
        other = sorted(
            name
            for name in self.digests.keys() | theirs.keys()
            if self.digests.get(name) != theirs.get(name)
        )
        other += sorted(name for name in files if self._is_strange(name))
        if _project(files.get(PYPROJECT, b""), "the run's") != self.project:
            other.append(PYPROJECT)
        if other:
            raise RefusedError(self._refusal(other))

    def _is_strange(self, name: str) -> bool:
        """Tell whether a Python file is in no room of fedsilo, compared or not."""
        if not name.endswith(".py") or name.startswith(_BESIDE):
            return False
        top = name.split("/")[0]
        return top not in ROOMS and not (self.package / top).exists()

    def _refusal(self, other: Sequence[str]) -> str:
        shown = ", ".join(name if name.isprintable() else ascii(name) for name in other[:_NAMED])
        more = f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
        changed = [name for name in local_changes(self.folder) if name in other]
        own = f"; of these {', '.join(changed[:_NAMED])} was changed here" if changed else ""
        return (
            f"the run's app is not this hospital's version: {shown}{more} differ{own}; start the "
            "run from the fedsilo that is installed here, or have the hospital install the run's"
        )


def installed_app(folder: Path | None = None) -> InstalledApp:
    """Read the installed fedsilo.

    Args:
        folder: the folder of pyproject.toml; None for this module's.

    Raises:
        SettingError: fedsilo is not installed with its pyproject.toml, or it cannot be read.
    """
    folder = folder or installed_folder()
    try:
        project = _project((folder / PYPROJECT).read_bytes(), "the installed")
    except OSError as error:
        raise SettingError(
            f"no installed fedsilo: {folder / PYPROJECT} cannot be read ({error.strerror}); a "
            "hospital's worker needs fedsilo's checkout or the hospital's image"
        ) from None
    package = folder / _PACKAGE
    if not package.is_dir():
        package = folder
    digests: dict[str, str] = {}
    for room in ROOMS:
        place = package / room if room in _IN_PACKAGE else folder / room
        digests |= _digests_of(place, place.parent)
    if not digests:
        raise SettingError(f"no installed fedsilo: {folder} has none of {', '.join(ROOMS)}")
    return InstalledApp(folder, package, digests, project)


def _digests_of(room: Path, above: Path) -> dict[str, str]:
    """Compute the SHA-256 of each file of a room that Flower bundles, by path from ``above``."""
    digests = {}
    for path in sorted(room.rglob("*")):
        name = path.relative_to(above).as_posix()
        if path.suffix in _BUNDLED and _of_rooms(name):
            digests[name] = _digest(path.read_bytes())
    return digests


def refuse_other_flower() -> None:
    """Raise a SettingError for a Flower version whose protocol the worker does not know."""
    from flwr.supercore.version import package_version

    if not package_version.startswith(f"{WORKER_FLOWER}."):
        raise SettingError(
            f"Flower {package_version} is installed, but a hospital's worker knows {WORKER_FLOWER} "
            f"(simulations run up to {TRIED_FLOWER}): "
            f"pip install 'flwr[simulation]~={WORKER_FLOWER}.0'"
        )


def local_changes(folder: Path) -> list[str]:
    """Return the files of a checkout that git reports as changed; empty without git."""
    command = ("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=all")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line[3:] for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _of_rooms(name: str) -> bool:
    """Tell whether a file belongs to the rooms."""
    return name.split("/")[0] in ROOMS and "__pycache__" not in name.split("/")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unpack(bundle: bytes) -> dict[str, bytes]:
    """Unpack the files of a bundle in memory, by name."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            # Of two files with one name the check could read one and an import the other
            if len(set(names)) < len(names):
                raise RefusedError("the run's app names a file twice: none of it is executed")
            if sum(entry.file_size for entry in entries) > _LARGEST:
                raise RefusedError(
                    f"the run's app is larger than {_LARGEST >> 20} MiB: none of it is executed"
                )
            return {name: archive.read(name) for name in names if not name.endswith("/")}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError):
        raise RefusedError("the run's app is no Flower bundle: none of it is executed") from None


def _project(text: bytes, whose: str) -> Mapping[str, Any]:
    """Parse pyproject.toml without 'federations', which Flower removes from a bundle."""
    try:
        content = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        raise RefusedError(f"{whose} {PYPROJECT} is no TOML") from None
    flower = content.get("tool", {}).get("flwr", {})
    if isinstance(flower, dict):
        flower.pop("federations", None)
    return content
