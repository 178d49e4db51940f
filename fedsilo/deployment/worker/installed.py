"""The fedsilo that a hospital has installed, and the check that a run's app is the same.

A run brings its app as a zip (Flower's FAB). The worker never executes it. It executes the
installed app, and answers only a run whose app is the same, file by file, in every folder that
computes at the server or at a hospital. So a site file, an audit log and every limit apply,
whatever the server sends. A changed wording in a report does not lock a hospital out, nor does a
new version of fedsilo that changes none of these files.
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

# The folders that a run and a hospital must have in common: all that computes at either.
# The commands, reports and pages of fedsilo/ may differ: they run only where somebody calls them
ROOMS = ("client_app", "core", "datasets", "models", "server_app", "strategies")
PYPROJECT = "pyproject.toml"
_PACKAGE = "fedsilo/"  # holds 'core' in a checkout; an installed fedsilo has all side by side
_IN_PACKAGE = ("core",)
# A checkout has these beside the rooms: Flower bundles them, but a hospital's image may lack them
_BESIDE = (*(f"{name}/" for name in ("benchmarks", "docker", "docs", "release", "tests")), ".")
# File types that Flower bundles
_BUNDLED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
_LARGEST = 64 * 2**20  # the most bytes of an app's unpacked files; fedsilo has 3 MiB
_LONGEST_VERSION = 20  # characters
_NAMED = 3  # the most files named in a refusal


@dataclass(frozen=True)
class InstalledApp:
    """The installed app: the files that Flower would bundle."""

    folder: Path  # the folder of pyproject.toml
    package: Path  # the folder of fedsilo's own rooms: in a checkout 'fedsilo', else ``folder``
    digests: Mapping[str, str]  # the SHA-256 of each compared file, by path without 'fedsilo/'
    project: Mapping[str, Any]  # the content of pyproject.toml, as a bundle has it

    def refuse_other(self, bundle: bytes) -> None:
        """Check that the app that came with a run equals the installed one.

        The worker calls this before it answers a run. ``bundle`` is Flower's zip of the app's
        files. These differences are refused:

        - A file in one of the folders in ``ROOMS`` differs, or only one side has the file. These
          folders contain all code that runs at the server or at a hospital.
        - The table ``tool.flwr`` of pyproject.toml differs, which has the app's settings.
        - A Python file elsewhere could replace an installed package, as ``torch.py`` could.

        Other files and the version of fedsilo may differ.

        Raises:
            RefusedError: there is such a difference, or the bundle cannot be read. The message
                names up to three files.
        """
        files = _unpack(bundle)
        theirs: dict[str, str] = {}
        strange: list[str] = []
        for name, data in files.items():
            if _is_in_rooms(name):
                theirs[name] = _digest(data)
            elif self._is_strange(name):
                strange.append(name)
        other = []
        # A file that only one side has differs too, because the other side's digest is None
        for name in sorted(self.digests.keys() | theirs.keys()):
            if self.digests.get(name) != theirs.get(name):
                other.append(name)
        other += sorted(strange)
        project = _project(files.get(PYPROJECT, b""), "the run's")
        if _flower_table(project) != _flower_table(self.project):
            other.append(PYPROJECT)
        if other:
            raise RefusedError(self._refusal(other, _version_of(project)))

    def _is_strange(self, name: str) -> bool:
        """Return whether a file of a run's app could replace an installed package.

        An example is ``torch.py``. Only Python files count. ``name`` is the path relative to the
        bundle, after the prefix "fedsilo/" was removed. A file is not strange in these cases:

        - The first part of its path is in ``ROOMS``, or exists in the installed fedsilo.
        - The path begins with a dot, or is in a folder of a checkout: benchmarks, docker, docs,
          release or tests.
        """
        if not name.endswith(".py") or name.startswith(_BESIDE):
            return False
        top = name.split("/")[0]
        return top not in ROOMS and not (self.package / top).exists()

    def _refusal(self, other: Sequence[str], version: str) -> str:
        """Write the message for a run whose app differs from the fedsilo that is installed here.

        The message states both versions of fedsilo, and at most three of the files that differ. It
        advises starting the run from the installed fedsilo, or installing the run's fedsilo here.
        If git reports that some of the differing files were changed on this machine, the message
        says so. Names that cannot be printed are escaped, because they come from the server.

        Args:
            other: the paths of the differing files, without the prefix "fedsilo/".
            version: the version of the run's app.
        """
        # The names come from the server, so control characters must not reach a terminal
        names = ", ".join(_printable(name) for name in other[:_NAMED])
        if len(other) > _NAMED:
            names += f" and {len(other) - _NAMED} more"
        local = [name for name in local_changes(self.folder) if _common_name(name) in other]
        own = ""
        if local:
            own = f"; of these {', '.join(local[:_NAMED])} was changed here"
        return (
            f"the run's app (fedsilo {version}) is not this hospital's (fedsilo "
            f"{_version_of(self.project)}): {names} differ{own}; start the "
            "run from the fedsilo that is installed here, or have the hospital install the run's"
        )


def installed_app(folder: Path | None = None) -> InstalledApp:
    """Read the files of the installed fedsilo, so that the app of a run can be compared with them.

    The result has the content of pyproject.toml and the SHA-256 of each file that Flower would send
    with a run. Only files in the folders that ``ROOMS`` lists, such as ``core`` and ``models``, are
    included. These folders contain all code that runs at the server or at a hospital.

    Args:
        folder: the folder of pyproject.toml. None means the folder of the fedsilo that is running.

    Raises:
        SettingError: pyproject.toml cannot be read, or the folders of ``ROOMS`` are missing or have
            no such file.
        RefusedError: pyproject.toml is not valid TOML.
    """
    folder = folder or installed_folder()
    try:
        project = _project((folder / PYPROJECT).read_bytes(), "the installed")
    except OSError as error:
        raise SettingError(
            f"no installed fedsilo: {folder / PYPROJECT} cannot be read ({error.strerror}); a "
            "hospital's worker needs fedsilo's checkout or the hospital's image"
        ) from None
    # A checkout has the package below pyproject.toml; an installed fedsilo is the package itself
    package = folder / _PACKAGE
    if not package.is_dir():
        package = folder
    digests: dict[str, str] = {}
    for room in ROOMS:
        above = folder
        if room in _IN_PACKAGE:
            above = package
        digests |= _digest_files(above / room, above)
    if not digests:
        raise SettingError(f"no installed fedsilo: {folder} has none of {', '.join(ROOMS)}")
    return InstalledApp(folder, package, digests, project)


def _digest_files(room: Path, above: Path) -> dict[str, str]:
    """Compute the SHA-256 of each file below the folder ``room`` that Flower would put in a bundle.

    These are the files whose type Flower bundles (.py, .toml, .md, .yaml, .yml, .json and .jsonl),
    except files in ``__pycache__``. The result maps the path of a file, relative to ``above`` and
    with slashes, to its SHA-256 in hexadecimal digits. If the folder does not exist, the result is
    empty.
    """
    digests = {}
    for path in sorted(room.rglob("*")):
        name = path.relative_to(above).as_posix()
        if path.suffix in _BUNDLED and _is_in_rooms(name):
            digests[name] = _digest(path.read_bytes())
    return digests


def refuse_other_flower() -> None:
    """Check that the installed version of Flower is one that fedsilo's worker supports.

    The worker uses internal parts of Flower. Therefore the first two numbers of the version must be
    those of ``WORKER_FLOWER``. The third number is free.

    Raises:
        SettingError: another version is installed.
    """
    from flwr.supercore.version import package_version

    if not package_version.startswith(f"{WORKER_FLOWER}."):
        raise SettingError(
            f"Flower {package_version} is installed, but a hospital's worker knows {WORKER_FLOWER} "
            f"(simulations run up to {TRIED_FLOWER}): "
            f"pip install 'flwr[simulation]~={WORKER_FLOWER}.0'"
        )


def local_changes(folder: Path) -> list[str]:
    """List the files in a git checkout that are changed or untracked.

    Returns:
        Paths relative to the repository's root, as ``git status --porcelain`` prints them. The list
        is empty if there are none, or if git fails, is missing, or takes more than 20 seconds.
    """
    command = ("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=all")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode != 0:
        return []
    # Each line has two letters for the kind of change and a space before the name
    return [line[3:] for line in done.stdout.splitlines()]


def _flower_table(project: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table ``tool.flwr`` of ``project``, the parsed content of a pyproject.toml.

    The entry "federations" is left out, because Flower removes it from a bundle. The content may
    come from a server, so a wrong form is not an error. If ``tool`` or ``tool.flwr`` is missing
    or is not a table, the result is an empty mapping.
    """
    tools = project.get("tool")
    table = None
    if isinstance(tools, dict):
        table = tools.get("flwr")
    if not isinstance(table, dict):
        return {}
    return {key: value for key, value in table.items() if key != "federations"}


def _version_of(project: Mapping[str, Any]) -> str:
    """Return fedsilo's version from the content of a pyproject.toml, or "unknown" if it has none.

    The content may come from a server. Therefore the version is cut to 20 characters, and
    characters that cannot be printed are escaped.
    """
    try:
        return _printable(str(project["project"]["version"])[:_LONGEST_VERSION])
    except (KeyError, TypeError):
        return "unknown"


def _common_name(name: str) -> str:
    """Return a file's path without the prefix "fedsilo/", if it has the prefix.

    In a checkout, some folders are below "fedsilo/". In an installed package they are not. The
    returned path is the same for both.
    """
    return name.removeprefix(_PACKAGE)


def _printable(name: str) -> str:
    if name.isprintable():
        return name
    return ascii(name)


def _is_in_rooms(name: str) -> bool:
    """Return whether a path is in one of the folders ``ROOMS``, but not in ``__pycache__``."""
    parts = name.split("/")
    return parts[0] in ROOMS and "__pycache__" not in parts


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unpack(bundle: bytes) -> dict[str, bytes]:
    """Unpack a run's app in memory, and return its files by path, without the prefix "fedsilo/".

    ``bundle`` is Flower's zip of the app. Folders are left out.

    Raises:
        RefusedError: the bundle is not a zip, states more than 64 MiB of unpacked files, or has two
            files that get the same path.
    """
    fault = ""
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            entries = archive.infolist()
            names = {_common_name(entry.filename) for entry in entries}
            # If two files had one path, the check could read one and an import the other. The paths
            # are those without 'fedsilo/', because core/a.py and fedsilo/core/a.py are the same
            if len(names) < len(entries):
                fault = "names a file twice"
            # The stated sizes are added up before anything is unpacked into memory
            elif sum(entry.file_size for entry in entries) > _LARGEST:
                fault = f"is larger than {_LARGEST >> 20} MiB"
            else:
                for entry in entries:
                    if not entry.is_dir():
                        files[_common_name(entry.filename)] = archive.read(entry)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError):
        fault = "is not a Flower bundle"
    if fault:
        raise RefusedError(f"the run's app {fault}: none of it is executed")
    return files


def _project(text: bytes, whose: str) -> Mapping[str, Any]:
    """Parse the bytes of a pyproject.toml into a mapping.

    Args:
        text: the content of the file, in UTF-8. An empty content gives an empty mapping.
        whose: words for the error that say where the file comes from, such as "the run's".

    Raises:
        RefusedError: the text is not valid TOML in UTF-8.
    """
    try:
        content = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        raise RefusedError(f"{whose} {PYPROJECT} is not valid TOML") from None
    return content
