"""Plugins: networks, methods, data sets and partitions from other packages or from a file.

A plugin is named ``module:object``, or by an entry point of an installed package (groups
``fedsilo.networks``, ``fedsilo.methods``, ``fedsilo.datasets``, ``fedsilo.partitioners``). A file
that the setting 'plugin' names becomes a module with the file's name without ``.py``. A plugin is
imported only if a run names it.
"""

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.one_line import quote_value, reason_of
from fedsilo.core.settings_schema import Value

# Setting -> the noun for its plugins in errors, and the group of their entry points
_KINDS = {"network": "network", "method": "method", "dataset": "data set", "partition": "partition"}
_GROUPS = {key: f"fedsilo.{key}s" for key in _KINDS} | {"partition": "fedsilo.partitioners"}
# The object's name may not contain dots: a server could otherwise reach a package that the plugin
# imports
_NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_TIMM = re.compile(r"timm:[\w.]+")
_DIGEST = "__fedsilo_digest__"  # attribute of a module that was made from a file of 'plugin'
PINS, _CARRIER = "plugin-digests", "plugin-settings"
PLUGIN = "module:object"  # the form of a plugin's name, in words
# Text files that decide a package's digest, the same endings as in a Flower bundle
_COMPARED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}


def plugin_entries(named: str) -> list[str]:
    """Split the setting 'plugin' at its commas into entries, which are files and modules.

    White space around an entry is removed, and empty entries are left out.
    """
    return [entry.strip() for entry in named.split(",") if entry.strip()]


def module_of(entry: str) -> str:
    """Return the name of the module that an entry of the setting 'plugin' stands for.

    An entry that ends with '.py' is the path of a file. The file's name without '.py' is the
    module's name. Any other entry is the name of a module, and is returned unchanged.
    """
    return Path(entry).stem if entry.endswith(".py") else entry


def load_plugins(named: str, taken: Collection[str], pins: Mapping[str, str] = {}) -> None:
    """Execute the files in the setting 'plugin' as modules.

    A file that was executed before and has not changed is not executed again. A module gets its
    file's name without '.py'. That name must be a Python identifier. It must not be in ``taken``,
    or belong to a module that is not a plugin file.

    Args:
        named: the value of the setting: files FILE.py and names of modules, separated by commas.
            The names of modules are ignored.
        taken: module names that no file may have.
        pins: module -> the SHA-256 that its file must have. A file without a pin may have any
            content. The bytes that are executed are those that were compared.

    Raises:
        SettingError: a file cannot be read or executed, its digest differs from its pin, or its
            name is not allowed.
    """
    for entry in plugin_entries(named):
        if entry.endswith(".py"):
            _load_file(Path(entry).expanduser().absolute(), taken, pins)


def read_plugin(path: Path) -> bytes:
    """Return the bytes of a plugin's file.

    Raises:
        SettingError: the file is missing or cannot be read, or is a pipe, device or folder.
    """
    fault = "is not a file: name a file FILE.py"
    # Opening a pipe would wait for its writer
    if path.is_file() or not path.exists():
        try:
            return path.read_bytes()
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
    raise SettingError(f"plugin {path} {fault}")


def _load_file(path: Path, taken: Collection[str], pins: Mapping[str, str]) -> None:
    """Execute a plugin file as a module, which gets the file's name without '.py'.

    If the file is already loaded and its bytes have not changed, nothing is executed. A changed
    file is executed again, and its module is replaced in ``sys.modules``. So is the module of
    another plugin file with the same name. The executed bytes are always those whose digest was
    computed, never a cached .pyc file. If the execution fails, the module is removed.

    Args:
        path: the file FILE.py, as an absolute path.
        taken: module names that the file may not have.
        pins: module -> the SHA-256 that its file must have, in hexadecimal digits. A file without a
            pin may have any content.

    Raises:
        SettingError: the file cannot be read, or its digest differs from its pin. The error is also
            raised if its name is not a Python identifier, is in ``taken`` or belongs to a module
            that is not a plugin file, and if its execution raises any exception, including
            SystemExit.
    """
    name = path.stem
    content = read_plugin(path)
    digest = hashlib.sha256(content).hexdigest()
    if pins.get(name, digest) != digest:
        raise other_version([name])
    loaded = sys.modules.get(name)
    if getattr(loaded, _DIGEST, "") == digest and getattr(loaded, "__file__", "") == str(path):
        return
    fault = ""
    if not name.isidentifier():
        fault = f"'{name}' is not a module name"
    elif name in taken or (not hasattr(loaded, _DIGEST) and _is_other_module(name, path)):
        fault = f"the name '{name}' is taken"
    if fault:
        raise SettingError(f"plugin {path}: {fault}; rename the file")
    module = ModuleType(name)
    module.__dict__.update({"__file__": str(path), _DIGEST: digest})
    # Dataclasses look up their module while it is being executed, so it is registered before
    sys.modules[name] = module
    try:
        # importlib could run a cached .pyc instead of the bytes whose digest was compared
        exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SettingError(f"plugin {path} does not import ({reason_of(error)})") from None


def _is_other_module(name: str, path: Path) -> bool:
    """Return whether a module name is taken by a module that is not the file ``path``.

    A name is taken if it belongs to a loaded module, or to one that could be imported. A loaded
    module without an import specification counts even if ``path`` is its file. The modules of
    plugin files have none, so callers must not ask about those.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        # Modules without a spec, such as __main__, are in sys.modules all the same
        return True
    return spec is not None and spec.origin != str(path)


def find_plugins(key: str, ours: Collection[str] = ()) -> dict[str, str]:
    """Find the plugins for a setting in the entry points of the installed packages.

    No plugin is imported.

    Args:
        key: the setting, such as 'method'.
        ours: fedsilo's built-in choices for this setting, whose names no plugin may have.

    Returns:
        Name of the plugin -> ``module:object``. A plugin for 'method' may have only ``module``. The
        mapping is empty if no package offers a plugin.

    Raises:
        SettingError: a package offers a name in ``ours``, or two packages offer different plugins
            under one name.
    """
    found: dict[str, str] = {}
    for entry in entry_points(group=_GROUPS[key]):
        if entry.name in ours or found.get(entry.name, entry.value) != entry.value:
            package = "unknown"
            if entry.dist:
                package = entry.dist.name
            raise SettingError(
                f"package '{package}' offers {_KINDS[key]} '{entry.name}', but that name is taken: "
                "uninstall it, or ask its author to rename it"
            )
        found[entry.name] = entry.value
    return found


def is_plugin_name(key: str, name: str) -> bool:
    """Return whether ``name`` can be the name of a plugin for the setting ``key``.

    Nothing is imported, and whether the plugin exists is not checked. Three forms are accepted:

    - ``module:object``;
    - ``timm:name`` for the setting 'network', which is a network of the package timm;
    - any name that an installed package offers for ``key`` by an entry point.

    Raises:
        SettingError: ``name`` has neither of the first two forms, and two installed packages offer
            different plugins for ``key`` under the same name. That name may be any.
    """
    if key == "network" and _TIMM.fullmatch(name):
        return True
    return _NAME.fullmatch(name) is not None or name in find_plugins(key)


@dataclass(frozen=True)
class PluginPlace:
    """The module and the object that a plugin's name stands for.

    Attributes:
        module: the module that holds the plugin.
        name: the object in that module; empty if the plugin is a method's whole module.
        invited: whether its package offers it to fedsilo by an entry point of that name.
    """

    module: str
    name: str
    invited: bool


def plugin_name(key: str, name: str) -> str:
    """Return a plugin's name unchanged if it is allowed, as a validator for pydantic.

    The name may be ``module:object``, or any name that an installed package offers for the setting.
    For 'network', it may also be ``timm:name``.

    Raises:
        ValueError: the name is not allowed. pydantic reports this error.
    """
    if not is_plugin_name(key, name):
        raise ValueError(f"not the name of a plugin for '{key}'")
    return name


def locate_plugin(key: str, name: str, ours: Collection[str]) -> PluginPlace:
    """Find a plugin's module and object from its name, without importing them.

    Three forms are allowed:

    - ``module:object``;
    - a name that an installed package offers by an entry point;
    - for a method, the name of a module. It has a dot, or the module is a loaded plugin file.

    If the name stands for a whole module, the result's object is empty. Whether the module and
    object exist is not checked.

    Args:
        key: the setting, such as 'method'.
        name: the plugin, as the setting names it.
        ours: fedsilo's own names, which no package may offer, and which the error lists.

    Raises:
        SettingError: the name has none of these forms. For a name without ':', the error is also
            raised if a package offers a name in ``ours``, or two packages offer different plugins
            under one name.
    """
    entries: dict[str, str] = {}
    if ":" not in name:
        entries = find_plugins(key, ours)
    is_offered_name = name in entries
    value = entries.get(name, name)
    match = _NAME.fullmatch(value)
    if match:
        return PluginPlace(match[1], match[2], is_offered_name)
    # Only a method may be a whole module: it has parts in several classes
    is_module = is_offered_name or "." in name or hasattr(sys.modules.get(name), _DIGEST)
    if key == "method" and is_module:
        return PluginPlace(value, "", is_offered_name)
    raise unknown_name(_KINDS[key], name, [*ours, *entries])


def resolve_plugin(key: str, name: str, ours: Collection[str]) -> Any:
    """Import and return the plugin that a setting names. A method may be a whole module.

    Whether the object is of the right kind is not checked.

    Args:
        key: the setting, such as 'method'.
        name: the plugin: ``module:object``, a name that an installed package offers, or the name of
            a method's module.
        ours: fedsilo's own names, which no package may offer, and which the error lists.

    Raises:
        SettingError: no plugin has that name, its module cannot be imported, or the module lacks
            the object.
    """
    place = locate_plugin(key, name, ours)
    module = _import_module(place.module, f"{_KINDS[key]} '{name}'")
    if not place.name:
        return module
    if not hasattr(module, place.name):
        raise SettingError(
            f"{_KINDS[key]} '{name}': module '{place.module}' has no '{place.name}'; correct the "
            "name"
        )
    return getattr(module, place.name)


def _import_module(module: str, plugin: str) -> ModuleType:
    """Import a module of foreign code, which executes it unless it is imported already.

    Args:
        module: the module's full name.
        plugin: the plugin's kind and name, as the first words of the error.

    Raises:
        SettingError: importing the module raises any exception, including SystemExit.
    """
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # Foreign code may raise anything, and a plugin may even call sys.exit()
        raise SettingError(
            f"{plugin}: module '{module}' does not import ({reason_of(error)}); install its "
            "package, or name its file by --plugin"
        ) from None


def wrong_plugin(key: str, name: str, found: Any, wanted: str) -> SettingError:
    """Build the error for a plugin that is not the right kind of object. The caller raises it.

    Args:
        key: the setting that names the plugin, such as 'method'.
        name: the plugin, as the setting names it.
        found: the object that the name stands for.
        wanted: the kind of object that is needed, as the words after "must be a".
    """
    given = getattr(found, "__name__", type(found).__name__)
    return SettingError(f"{_KINDS[key]} '{name}' must be a {wanted}, but is '{given}'")


def with_plugin_settings(values: Mapping[str, Value], common: Collection[str]) -> dict[str, Value]:
    """Copy a run config, and replace 'plugin-settings' in the copy by the settings inside it.

    Flower accepts only keys that pyproject.toml lists. Therefore a plugin method's settings travel
    as one JSON object, ``{"group.key": value}``, in 'plugin-settings'. The copy has each of them
    under its key, even if ``values`` has another value for that key. Common settings inside
    'plugin-settings' are refused, because a site has already checked the values of common settings.

    Args:
        values: the run config, which must have 'plugin-settings'.
        common: the keys of the common settings.

    Raises:
        SettingError: 'plugin-settings' is not a JSON object of single values, or has a key that is
            in ``common`` or has no group.
    """
    carried = _parse_carried(str(values[_CARRIER]))
    for key in carried:
        # Every key without a group is a common setting, also the names that common ones once had
        if key in common or "." not in key:
            raise SettingError(
                f"setting '{_CARRIER}' may have a method's settings only, but has "
                f"{quote_value(key)}: set it by its name"
            )
    merged = {**values, **carried}
    del merged[_CARRIER]
    return merged


def _parse_carried(text: str) -> dict[str, Value]:
    """Parse the JSON in 'plugin-settings' into key -> value. Keys are not checked.

    Raises:
        SettingError: the text is not a JSON object, or a value is null, a list or an object.
    """
    try:
        carried = json.loads(text)
    except (ValueError, RecursionError):
        carried = None
    is_single = False
    if isinstance(carried, dict):
        is_single = all(isinstance(value, bool | int | float | str) for value in carried.values())
    if not is_single:
        raise SettingError(f"setting '{_CARRIER}' is not a JSON object of single values")
    settings: dict[str, Value] = carried
    return settings


def import_plugin(module: str) -> None:
    """Import a plugin's top-level module. Its code runs unless the module is imported already.

    Raises:
        SettingError: the import fails with any exception, including SystemExit.
    """
    _import_module(module, f"plugin '{module}'")


def is_offered(module: str) -> bool:
    """Return whether an installed package offers a plugin from the top-level module ``module``.

    A package offers a plugin by an entry point in one of fedsilo's groups. The part of the entry
    point before the first '.' or ':' must equal ``module``. Nothing is imported.
    """
    for group in _GROUPS.values():
        for entry in entry_points(group=group):
            if re.split("[.:]", entry.value)[0] == module:
                return True
    return False


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Remove the working folder from Python's import path inside the ``with`` block.

    ``python -m`` puts this folder on the path. Its files may come from somebody else, and must not
    be imported. After the block, the folder is on the path again. Entries that the block added stay
    at the end of the path.
    """
    before = list(sys.path)
    here = Path.cwd()
    sys.path[:] = [entry for entry in before if Path(entry).absolute() != here]
    kept = list(sys.path)
    try:
        yield
    finally:
        # Paths that the block added must survive, or its modules could not import any more
        added = [entry for entry in sys.path if entry not in kept]
        sys.path[:] = [*before, *added]


def digest_plugins(plugs: Iterable[PluginPlace]) -> dict[str, str]:
    """Compute a digest of the code of plugins, by which a run notices that a plugin has changed.

    Each plugin's top-level module is imported first, which runs its code. A module's digest covers
    its file, and a package's digest its Python, TOML, Markdown, YAML, JSON and JSON Lines files. A
    file that ``load_plugins`` has executed is not imported again. Its digest covers the executed
    bytes.

    Returns:
        Top-level module -> SHA-256, sorted by module.

    Raises:
        SettingError: a module cannot be imported, or has no file.
    """
    tops = sorted({plug.module.partition(".")[0] for plug in plugs})
    return {top: _import_and_digest(top) for top in tops}


def file_digests(entries: Iterable[str]) -> dict[str, str]:
    """Map the module of each plugin file in the setting 'plugin' to the SHA-256 of the file.

    Callers execute the files by ``load_plugins`` first, so that the digest is that of the executed
    bytes. Entries that are not files FILE.py are ignored.

    Args:
        entries: the entries of 'plugin', which are files and names of modules.
    """
    modules = [module_of(entry) for entry in entries if entry.endswith(".py")]
    return {module: module_digest(module) for module in modules}


def digests_text(digests: Mapping[str, str]) -> str:
    """Format digests as in the setting 'plugin-digests': "module=digest, module=digest"."""
    return ", ".join(f"{module}={digest}" for module, digest in digests.items())


def stated_digests(text: str) -> dict[str, str]:
    """Parse the value of the setting 'plugin-digests' into a mapping: module -> SHA-256.

    The value has entries ``module=digest``, separated by a comma and a space. An empty value gives
    an empty mapping. The format is not checked, so an entry without '=' gets an empty digest.
    """
    digests = {}
    for part in text.split(", "):
        if part:
            module, _, digest = part.partition("=")
            digests[module] = digest
    return digests


def changed_plugins(digests: Mapping[str, str], text: str) -> list[str]:
    """List the plugin modules that have changed since a run began, sorted.

    A module has changed if ``digests`` and ``text`` have different digests for it, or if only one
    of them has the module. The format of ``text`` is not checked, so an entry without '=' is a
    module with an empty digest.

    Args:
        digests: module -> SHA-256 of the plugin now.
        text: the digests at the beginning, from the setting 'plugin-digests': "module=digest,
            module=digest".
    """
    differing = digests.items() ^ stated_digests(text).items()
    return sorted({module for module, _ in differing})


def other_version(modules: Iterable[str]) -> SettingError:
    """Build the error for plugins that have changed since the run began. The caller raises it."""
    return SettingError(
        f"plugin {' and '.join(modules)} differs from the version in 'plugin-digests', which the "
        "run began with: restore that version, or start a new run"
    )


def _import_and_digest(module: str) -> str:
    """Import a module, and return the SHA-256 of its code.

    A plugin file that was executed as a module is not imported again.

    Raises:
        SettingError: the module cannot be imported, or has no file.
    """
    if not getattr(sys.modules.get(module), _DIGEST, ""):
        _import_module(module, f"plugin '{module}'")
    digest = module_digest(module)
    if not digest:
        raise SettingError(f"plugin '{module}' has no file that hospitals could compare")
    return digest


def module_digest(module: str) -> str:
    """Compute the SHA-256 of a top-level module's code without importing the module.

    If the module is a plugin file that was executed, the digest is that of the executed bytes.

    Returns:
        The digest of the module's file or, for a package, of its Python, TOML, Markdown, YAML, JSON
        and JSON Lines files. An empty string stands for a module that does not exist or has no
        file.
    """
    known = getattr(sys.modules.get(module), _DIGEST, "")
    if known:
        return str(known)
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        # The module is in sys.modules without a spec
        return ""
    if spec is None:
        return ""
    if spec.submodule_search_locations:
        return _package_digest(spec.submodule_search_locations)
    if spec.origin and Path(spec.origin).is_file():
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""


def _package_digest(folders: Iterable[str]) -> str:
    """Compute one SHA-256 over the files of a package that decide how the package works.

    These are the Python, TOML, Markdown, YAML, JSON and JSON Lines files in ``folders`` and their
    subfolders. The digest covers the content of each file and its path in the folder. The order of
    ``folders`` matters, but within a folder the files are sorted by path.
    """
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix not in _COMPARED:
                continue
            # The zero byte ends the path, so no path and digest can read as another pair
            total.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
