"""Plugs: networks, methods, data sets and partitions of other packages, or of a file.

A plug is named ``module:object``, or by an entry point of an installed package (groups
``fedsilo.networks``, ``fedsilo.methods``, ``fedsilo.datasets``, ``fedsilo.partitioners``). A file
that the setting 'plugin' names is a module, called as the file without ``.py``. Nothing is imported
until a run names it.
"""

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import quote_value, reason_of
from fedsilo.models.contract.settings_schema import Value, unknown_name

# By setting what it names, and the group of its entry points
_KINDS = {"network": "network", "method": "method", "dataset": "data set", "partition": "partition"}
_GROUPS = {key: f"fedsilo.{key}s" for key in _KINDS} | {"partition": "fedsilo.partitioners"}
# No path within an object: what a plug has imported itself is none that a server could name
_NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_TIMM = re.compile(r"timm:[\w.]+")
_DIGEST = "__fedsilo_digest__"  # of a module that a file of 'plugin' became
PINS, _CARRIER = "plugin-digests", "plugin-settings"
_COMPARED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}  # as of our own app


def plugin_entries(named: str) -> list[str]:
    """Return the entries of the setting 'plugin': files and modules, with commas between."""
    return [entry.strip() for entry in named.split(",") if entry.strip()]


def module_of(entry: str) -> str:
    """Return the module that an entry of 'plugin' is."""
    return Path(entry).stem if entry.endswith(".py") else entry


def load_plugins(named: str, taken: Collection[str], pins: Mapping[str, str] = {}) -> None:
    """Execute the files that the setting 'plugin' names, unless the same bytes have been already.

    Args:
        named: the setting's value.
        taken: names that no file may have.
        pins: module -> the only SHA-256 that its file may have. The bytes that are compared are
            the bytes that are executed.

    Raises:
        SettingError: a file cannot be read or executed, has another digest than its pin, or its
            name is one of ``taken`` or another module's.
    """
    for entry in plugin_entries(named):
        if entry.endswith(".py"):
            _load_file(Path(entry).expanduser().absolute(), taken, pins)


def read_plugin(path: Path) -> bytes:
    """Read a plugin's file, or raise a ``SettingError``: it is missing, or a pipe or device."""
    if path.exists() and not path.is_file():
        raise SettingError(f"plugin {path} is not a file: name a file FILE.py")
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"plugin {path} cannot be read: {error.strerror}") from None


def _load_file(path: Path, taken: Collection[str], pins: Mapping[str, str]) -> None:
    name = path.stem
    content = read_plugin(path)
    digest = hashlib.sha256(content).hexdigest()
    if pins.get(name, digest) != digest:
        raise other_version([name])
    loaded = sys.modules.get(name)
    if getattr(loaded, _DIGEST, "") == digest and getattr(loaded, "__file__", "") == str(path):
        return
    if not name.isidentifier():
        raise SettingError(f"plugin {path}: '{name}' is not a module name; rename the file")
    if name in taken or (not hasattr(loaded, _DIGEST) and _is_other_module(name, path)):
        raise SettingError(f"plugin {path}: the name '{name}' is taken; rename the file")
    module = ModuleType(name)
    module.__dict__.update({"__file__": str(path), _DIGEST: digest})
    sys.modules[name] = module  # before it is executed, as dataclasses look their module up
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)  # no cache: the bytes compared
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SettingError(f"plugin {path} does not import ({reason_of(error)})") from None


def _is_other_module(name: str, path: Path) -> bool:
    """Tell whether ``name`` is a module that is not the file ``path``."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # what is in sys.modules without a spec, such as __main__
        return True
    return spec is not None and spec.origin != str(path)


def find_plugins(key: str, ours: Collection[str] = ()) -> dict[str, str]:
    """Return the plugs of installed packages for the setting ``key``: ``module:object`` by name.

    Raises:
        SettingError: a package offers a name that is one of ``ours``, or another package's.
    """
    found: dict[str, str] = {}
    for entry in entry_points(group=_GROUPS[key]):
        if entry.name in ours or found.get(entry.name, entry.value) != entry.value:
            package = entry.dist.name if entry.dist else "unknown"
            raise SettingError(
                f"package '{package}' offers {_KINDS[key]} '{entry.name}', and that name is taken; "
                "uninstall it, or ask its author to rename it"
            )
        found[entry.name] = entry.value
    return found


def is_plug(key: str, name: str) -> bool:
    """Tell whether ``name`` has the form of a plug for the setting ``key``."""
    timm = key == "network" and _TIMM.fullmatch(name)
    return bool(timm or _NAME.fullmatch(name)) or name in find_plugins(key)


@dataclass(frozen=True)
class Plug:
    """Where a plug is: a module, and the name in it, which is empty for a method's module.

    ``invited`` says whether the package has made it a plug of fedsilo, by an entry point.
    """

    module: str
    name: str
    invited: bool


def plugs(key: str, *others: str) -> dict[str, Any]:
    """Return what lets a ``choice`` of the setting ``key`` take plugs too; ``others`` are forms."""
    return {"more": partial(is_plug, key), "wording": " or ".join([*others, "module:object"])}


def locate_plugin(key: str, name: str, ours: Collection[str]) -> Plug:
    """Return where the plug ``name`` is; nothing is imported.

    Raises:
        SettingError: nothing has that name; ``ours`` are those of fedsilo itself.
    """
    entries = {} if ":" in name else find_plugins(key, ours)
    value = entries.get(name, name)
    if match := _NAME.fullmatch(value):
        return Plug(match[1], match[2], name in entries)
    is_module = name in entries or "." in name or hasattr(sys.modules.get(name), _DIGEST)
    if key == "method" and is_module:
        return Plug(value, "", name in entries)
    raise unknown_name(_KINDS[key], name, [*ours, *entries])


def plug(key: str, name: str, ours: Collection[str]) -> Any:
    """Return what the setting ``key`` names: an object, or of a method without one its module.

    Raises:
        SettingError: nothing has that name, its module does not import, or lacks the object.
    """
    place = locate_plugin(key, name, ours)
    found = _import_module(place.module, f"{_KINDS[key]} '{name}'")
    if place.name and not hasattr(found, place.name):
        raise SettingError(
            f"{_KINDS[key]} '{name}': module '{place.module}' has no '{place.name}'; correct the "
            "name"
        )
    return getattr(found, place.name) if place.name else found


def _import_module(module: str, what: str) -> ModuleType:
    """Import ``module``, which the plug ``what`` is in, or raise a ``SettingError``."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # it is anybody's code
        raise SettingError(
            f"{what}: module '{module}' does not import ({reason_of(error)}); install its package, "
            "or name its file by --plugin"
        ) from None


def wrong(key: str, name: str, found: Any, wanted: str) -> SettingError:
    """Build the error for a plug that is something else."""
    is_ = getattr(found, "__name__", type(found).__name__)
    return SettingError(f"{_KINDS[key]} '{name}' is '{is_}', which is no {wanted}")


def with_plugin_settings(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return a run config with the settings that its 'plugin-settings' carries, in their places.

    Only a method's own settings, ``group.key``, are carried. Any other would replace what a site
    has checked where it compares settings: in the digests of private states and of secure sums.

    Raises:
        SettingError: that is no JSON of a method's settings.
    """
    rest = {key: value for key, value in values.items() if key != _CARRIER}
    try:
        carried = json.loads(str(values[_CARRIER]))
    except (ValueError, RecursionError):
        carried = None
    if not isinstance(carried, dict) or not all(
        isinstance(value, bool | int | float | str) for value in carried.values()
    ):
        raise SettingError(f"setting '{_CARRIER}' is no JSON object of single values")
    if common := [key for key in carried if "." not in key]:
        raise SettingError(
            f"setting '{_CARRIER}' may have a method's settings only, but has "
            f"{quote_value(common[0])}: set it by its name"
        )
    return rest | carried


def import_plugin(module: str) -> None:
    """Import a module that has no parent, or raise a ``SettingError``."""
    _import_module(module, f"plugin '{module}'")


def is_offered(module: str) -> bool:
    """Tell whether an installed package offers plugins of fedsilo from this module's package."""
    groups = (entry_points(group=group) for group in _GROUPS.values())
    values = (entry.value for entries in groups for entry in entries)
    return any(re.split("[.:]", value)[0] == module for value in values)


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Take the working folder off the import path while a block runs.

    Somebody may work inside a folder that was sent to him, and ``python -m`` puts it on the path.
    """
    before = list(sys.path)
    here = Path.cwd()
    sys.path[:] = [entry for entry in before if Path(entry).absolute() != here]
    kept = list(sys.path)
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in kept]
        sys.path[:] = [*before, *added]


def plug_digests(plugs: Iterable[Plug]) -> dict[str, str]:
    """Return a SHA-256 of each file or package that has one of ``plugs``, by name.

    Raises:
        SettingError: it does not import, or has no files.
    """
    tops = sorted({plug.module.partition(".")[0] for plug in plugs})
    return {top: _digest(top) for top in tops}


def file_digests(entries: Iterable[str]) -> dict[str, str]:
    """Return module -> SHA-256 of each file among the entries of 'plugin', which were executed."""
    modules = [module_of(entry) for entry in entries if entry.endswith(".py")]
    return {module: module_digest(module) for module in modules}


def digests_text(digests: Mapping[str, str]) -> str:
    """Return digests as the setting 'plugin-digests' has them."""
    return ", ".join(f"{module}={digest}" for module, digest in digests.items())


def stated_digests(text: str) -> dict[str, str]:
    """Return the digests of the setting 'plugin-digests' by module."""
    return {part.partition("=")[0]: part.partition("=")[2] for part in text.split(", ") if part}


def other_plugs(digests: Mapping[str, str], text: str) -> list[str]:
    """Return the plugs of which only one of ``digests`` and 'plugin-digests' has that digest."""
    return sorted({module for module, _ in digests.items() ^ stated_digests(text).items()})


def other_version(modules: Iterable[str]) -> SettingError:
    """Build the error for plugins whose bytes are not those that the run began with."""
    return SettingError(
        f"plugin {' and '.join(modules)} is not the one of 'plugin-digests', which the run began "
        "with: bring that version back, or start a new run"
    )


def _digest(module: str) -> str:
    """Import a module, and compute the SHA-256 of its file or of all text files of its package."""
    if not getattr(sys.modules.get(module), _DIGEST, ""):
        _import_module(module, f"plugin '{module}'")
    digest = module_digest(module)
    if not digest:
        raise SettingError(f"plugin '{module}' has no file that hospitals could compare")
    return digest


def module_digest(module: str) -> str:
    """Compute the SHA-256 of a module that has no parent, without importing the module.

    Returns:
        The digest of its file, of all text files of its package with their paths, or an empty
        text if there is no such module or it has no file.
    """
    if known := getattr(sys.modules.get(module), _DIGEST, ""):
        return str(known)
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # a module that is in sys.modules without a spec
        return ""
    if spec and spec.submodule_search_locations:
        total = hashlib.sha256()
        for folder in map(Path, spec.submodule_search_locations):
            for path in sorted(p for p in folder.rglob("*") if p.suffix in _COMPARED):
                total.update(f"{path.relative_to(folder).as_posix()}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()
    if spec and spec.origin and (path := Path(spec.origin)).is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
