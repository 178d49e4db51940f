"""The types of the API's arguments: paths, runs and settings in every form that the API accepts.

``Option`` is the help that the command line shows for an argument.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import one_line
from fedsilo.core.settings_schema import Value


class HasPath(Protocol):
    """A run, such as the ``Run`` of the API."""

    @property
    def path(self) -> Path:
        """The run directory."""


AnyPath = Path | str
MaybePath = AnyPath | None
AnyRun = HasPath | Path | str  # a run, or its directory
Plugins = Sequence[AnyPath] | AnyPath | None  # files FILE.py, or modules of installed packages
# Settings by key, {"uefl.gamma": 0.2}, or as a sequence of key=value
Settings = Mapping[str, Value] | Sequence[str]
Tell = Callable[[str], None]  # takes a line about the progress
Watch = Callable[[int, int], None]  # takes the amount done and the total amount


@dataclass(frozen=True)
class Option:
    """The help of a command-line option, and its differences from its Python parameter.

    Attributes:
        help: what the option does.
        name: the option's name, such as ``--set``; empty for the parameter's own name.
        value: the placeholder in the usage line; None for the name of the parameter's type.
        required: whether the command line requires the option although Python has a default.
        default: the command line's default, or None for Python's default.
    """

    help: str
    name: str = ""
    value: str | None = None
    required: bool = False
    default: object = None


SimulationFile = Annotated[MaybePath, "the simulation.yaml to read"]


@dataclass(frozen=True, kw_only=True)
class RunSources:
    """The places that a run's settings come from, as paths and strings.

    Attributes:
        file: the simulation file, or None for the usual one.
        config: a TOML file of settings that override the experiment's.
        changes: settings that override both, each ``key=value``.
        out: folder of run directories, or None for the settings' own or ``runs``.
    """

    file: Path | None = None
    config: Path | None = None
    changes: tuple[str, ...] = ()
    out: Path | None = None


def path_of(path: AnyPath | None) -> Path | None:
    """Convert a path or a string to a ``Path``; None gives None. The path need not exist.

    Raises:
        SettingError: the value is of a type that cannot be a path, such as a number.
    """
    if path is None:
        return None
    try:
        return Path(path)
    except TypeError:
        kind = type(path).__name__
        raise SettingError(
            f"expected a path, but got a {kind}: write it to a file, and give the file's path"
        ) from None


def several(argument: Any) -> list[Any]:
    """Convert an argument that may be one item, several items or None to a list of its items.

    A string or a path is one item, and so is an object that is not iterable. None gives an empty
    list, and a mapping gives its keys. Any other iterable gives its elements.
    """
    if argument is None:
        return []
    if isinstance(argument, Path | str) or not isinstance(argument, Iterable):
        return [argument]
    return list(argument)


def folder_of(run: AnyRun) -> Path:
    """Return the directory of a run, which may be given as a run object or as a path.

    Whether the directory exists is not checked.

    Raises:
        SettingError: ``run`` is not a string, a path or an object with the attribute ``path``.
    """
    if isinstance(run, Path | str):
        return Path(run)
    folder = getattr(run, "path", None)
    if folder is None:
        kind = type(run).__name__
        raise SettingError(f"expected a run or its directory, but got a {kind}: name one")
    return Path(folder)


def folders_of(runs: Sequence[AnyRun]) -> list[Path]:
    """Return the directories of several runs, see ``folder_of``."""
    return [folder_of(run) for run in several(runs)]


def texts_of(settings: Settings | None) -> tuple[str, ...]:
    """Convert settings to a tuple of strings ``key=value``, in the order of the settings.

    Args:
        settings: a mapping, a sequence of strings, or a single string. None gives an empty tuple.
            The values of a mapping are written as JSON, so the string 'a' becomes ``key="a"``.
            Strings enter the tuple unchanged, even without a '='.

    Raises:
        SettingError: an item of a sequence is not a string, or JSON cannot represent a value of a
            mapping.
    """
    texts: list[str] = []
    fault = ""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            try:
                texts.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
            # A value inside a list may be at fault, so Python's error says of what type it is
            except (TypeError, ValueError, RecursionError) as error:
                fault = f"the value of '{key}' cannot be a setting ({one_line(error)})"
    else:
        for entry in several(settings):
            if not isinstance(entry, str):
                fault = f"a setting must be a text 'key=value', but is {one_line(repr(entry))}"
            texts.append(entry)
    if fault:
        raise SettingError(f"{fault}: give settings as {{'rounds': 5}} or ['rounds=5']")
    return tuple(texts)


def plugin_texts(plugin: Plugins) -> list[str]:
    """Convert one or several plugins (files or modules) to strings. None gives an empty list."""
    return [str(entry) for entry in several(plugin)]


def silent(line: str) -> None:
    """Discard a line of progress. Callers that want no output pass this as ``Tell``."""


def refuse_below(minimum: int, option: str, value: int | None) -> None:
    """Check that the value of the command-line option ``--option`` is at least ``minimum``.

    Args:
        minimum: the smallest allowed value.
        option: the option's name without the dashes, for the error.
        value: the value to check. None, for an option that is not given, is accepted.

    Raises:
        SettingError: the value is below ``minimum``.
    """
    if value is not None and value < minimum:
        raise SettingError(f"--{option} must be at least {minimum}, but is {value}")


def refuse_target(target: Path, instead: str) -> None:
    """Make the parent folders of a new file or folder, and check that it can be written there.

    Nothing is written at ``target``.

    Args:
        target: the path of the new file or folder.
        instead: the alternative that the error suggests, such as "another --out". The error ends
            with "give" and these words.

    Raises:
        SettingError: a file or folder exists at the target, or the parent folder cannot be made or
            is not writable.
    """
    if target.exists():
        raise SettingError(f"{target} already exists: remove it, or give {instead}")
    reason = "this user may not write there"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(target.parent, os.W_OK)
    except OSError as error:
        # A file may stand where a folder is needed, or a parent may be read-only
        reason = str(error.strerror)
        is_writable = False
    if not is_writable:
        raise SettingError(f"{target} cannot be written ({reason}): give {instead}")
