"""Decides which plugins of a run directory may be executed.

Anybody may have written a run directory, so naming a plugin does not make it trusted. Like Jupyter
for notebooks, fedsilo executes a plugin only if it is trusted and its SHA-256 equals the recorded
one. A plugin is trusted in one of three ways:

- the reader names their own copy, by ``--plugin`` (``name_plugins``);
- an installed package offers it to fedsilo, by an entry point;
- this user has run a plugin of this name and digest on this machine (``remember_plugins``). The
  digests are in ``~/.fedsilo/trusted-plugins``, or in the file that $FEDSILO_TRUSTED_PLUGINS names.
"""

import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedsilo.core import plugins
from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import one_line
from fedsilo.core.settings_schema import Value

PLACE = "FEDSILO_TRUSTED_PLUGINS"
# The file of digests is read up to here: 100,000 plugins
_MOST_BYTES = 10**7
_DIGITS = 12

_named: dict[str, str] = {}  # module -> the file or module that the reader names as their copy
_run_here: set[tuple[str, str]] = set()  # (module, digest) of each plugin that this process ran


def name_plugins(entries: Iterable[object]) -> None:
    """Trust the plugins that the user names by --plugin, for the rest of this process.

    A plugin recorded in a run is executed only if it is trusted. A plugin named here replaces the
    recorded one with the same module name. Its SHA-256 is compared with the recorded one only
    later. Nothing is executed, and a module need not be installed.

    Args:
        entries: files FILE.py, or modules of installed packages. One entry may list several of
            them, separated by commas, as in the setting 'plugin'.

    Raises:
        SettingError: a file is missing, or is not a regular file.
    """
    for text in entries:
        # One option may list several plugins, separated by commas
        for entry in plugins.plugin_entries(str(text)):
            _name_plugin(entry)


def _name_plugin(entry: str) -> None:
    """Trust a plugin that the user names by --plugin, until this process ends.

    The plugin will replace the one that a run has recorded under the same module name. Its SHA-256
    is compared only then. Nothing is executed, and a module need not be installed. A module is
    trusted as a whole package, so "mine.sub" trusts "mine".

    Args:
        entry: a file, such as "~/mine.py", or the name of a module. A name that does not end in
            ".py" is a module.

    Raises:
        SettingError: the file is missing, or is not a regular file.
    """
    if not entry.endswith(".py"):
        _named[entry.partition(".")[0]] = entry
        return
    path = Path(entry).expanduser().absolute()
    if not path.is_file():
        raise SettingError(f"--plugin {path} is not a file: name your copy of the plugin")
    _named[plugins.module_of(entry)] = str(path)


def remember_plugins(digests: Mapping[str, str]) -> None:
    """Record that the user has run these plugins, so that their runs can be read later.

    The plugins are recorded in this process and in the user's file of trusted plugins
    (``_digests_file``). A plugin that is recorded there with the same SHA-256 is not added again.
    If the file cannot be read or written, a warning is printed to stderr, and no error is raised.

    Args:
        digests: module -> SHA-256.
    """
    new = set(digests.items()) - _run_here
    _run_here.update(new)
    if not new:
        return
    try:
        new -= _read_remembered()
        path = _digests_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = ""
        for module, digest in sorted(new):
            lines += f"{digest}  {module}\n"
        # Links are not followed, because somebody could make this append to any file of the user
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            # A single write, so that two processes do not mix their lines
            file.write(lines)
    except (OSError, RuntimeError, SettingError) as error:  # a home that is missing or read-only
        print(
            f"fedsilo: the plugins of this run are not remembered ({one_line(error, 200)}): to "
            "read the run later, name them by --plugin",
            file=sys.stderr,
        )


def approve_plugins(
    values: Mapping[str, Value], used: Iterable[str], needs_pins: bool = True
) -> dict[str, Value]:
    """Check that each plugin in use may be executed, and keep only trusted files in 'plugin'.

    A plugin in use must have the SHA-256 in 'plugin-digests', and the user must trust it. The user
    trusts plugins that --plugin names, that the user has run before, or that an installed package
    offers. Plugin files are not executed here, but installed modules are imported.

    A file in 'plugin' that no setting uses is kept only if --plugin names it or if the user has run
    the same bytes before. Another plugin may need it.

    Args:
        values: the settings, as a config.toml has them. They are not changed.
        used: the top-level modules of the plugins that the settings use.
        needs_pins: whether every plugin in use must have a digest in 'plugin-digests'. If False, a
            trusted plugin without a digest is accepted.

    Returns:
        A copy of ``values`` in which 'plugin' lists the kept files, separated by commas. Unused
        files come first. Installed modules are not listed.

    Raises:
        SettingError: a plugin in use is not trusted, cannot be read, has another SHA-256, or cannot
            be imported. Unless the import failed, the message says how the user can trust the
            plugin.
    """
    recorded = _group_by_module(str(values.get("plugin", "")))
    pins = plugins.stated_digests(str(values.get(plugins.PINS, "")))
    used = sorted(set(used))
    if not needs_pins:
        for module in used:
            entry = _named.get(module, recorded.get(module, ""))
            pins.setdefault(module, _entry_digest(module, entry))
    approved = []
    for module in used:
        approved.append(_approve(module, recorded.get(module, ""), pins.get(module, "")))
    # A file that no setting names may be one that another plugin imports. It has no pin, so only
    # bytes that this user has run are executed, and any other file is left out
    for module, entry in recorded.items():
        if module not in used and entry.endswith(".py"):
            helper = _named.get(module, entry)
            if module in _named or _is_remembered(module, _file_digest(helper)):
                approved.insert(0, helper)
    return dict(values) | {"plugin": ", ".join(entry for entry in approved if entry)}


def remember_files(named: str) -> None:
    """Record that the user has run the plugin files that the setting 'plugin' lists.

    ``remember_plugins`` adds the SHA-256 of each file to the user's file of trusted plugins, and
    keeps older entries. Installed modules are skipped. Nothing is executed. A file that cannot be
    read causes no error, and does not become trusted.

    Args:
        named: the value of the setting: files and modules, separated by commas.
    """
    digests = {}
    for module, entry in _group_by_module(named).items():
        if entry.endswith(".py"):
            digests[module] = _file_digest(entry)
    remember_plugins(digests)


def _group_by_module(named: str) -> dict[str, str]:
    """Return the entries of a setting 'plugin', keyed by each entry's module name."""
    return {plugins.module_of(entry): entry for entry in plugins.plugin_entries(named)}


def refuse_unknown_files(named: str, where: str) -> None:
    """Check that this user has run every plugin file that a settings file names.

    The file's SHA-256 must be in this user's records (``remember_plugins``). A file that has
    changed or cannot be read is refused. Installed modules are not checked.

    Args:
        named: the value of the setting 'plugin': files and modules, separated by commas.
        where: the settings file, for the error.

    Raises:
        SettingError: the user has not run a plugin file. The first such file is named.
    """
    for entry in plugins.plugin_entries(named):
        module = plugins.module_of(entry)
        if entry.endswith(".py") and not _is_remembered(module, _file_digest(entry)):
            raise SettingError(
                f"{where} names plugin {one_line(entry, 200)}, whose bytes you have not run here: "
                f"read it, and trust it by 'fedsilo methods --plugin {module}.py'"
            )


def _approve(module: str, recorded: str, pin: str) -> str:
    """Approve a plugin of a run: return its file, or import it if it is an installed module.

    A plugin may be executed if the user trusts it and its SHA-256 is the recorded one. Plugins that
    are not trusted are not even read. The user trusts three kinds of plugins:

    - those that --plugin names,
    - those that the user has run before with the recorded SHA-256,
    - installed modules that their package offers to fedsilo by an entry point.

    Args:
        module: the name of the plugin's module.
        recorded: the file or module in the run's setting 'plugin'. It is empty if the setting does
            not name the plugin.
        pin: the SHA-256 that the run has recorded. It is empty if there is none, and every plugin
            is then refused.

    Returns:
        For a plugin file, its path: the file that --plugin names or, without one, ``recorded``. For
        an installed module, an empty string.

    Raises:
        SettingError: the plugin is not trusted, cannot be read, has another SHA-256, or cannot be
            imported.
    """
    entry = _named.get(module, recorded)
    is_file = entry.endswith(".py")
    # Trust comes first: if a plugin may not be executed, its bytes are not even read
    is_trusted = module in _named or _is_remembered(module, pin)
    if not is_trusted and not is_file:
        is_trusted = plugins.is_offered(module)
    found, fault, plugin = "", "", _name_with_digest(module, pin)
    if is_trusted:
        found = _entry_digest(module, entry)
    if not is_trusted:
        fault = (
            f"plugin {plugin} is named by a file and not by you, and you have not run "
            f"it here, so it is not executed: read it, and name your copy by --plugin {module}.py, "
            f"or by --plugin {module} if its package is installed"
        )
    elif not found:
        fault = (
            f"plugin {plugin} is needed, but {entry or 'no installed module'} cannot "
            f"be read: name your copy by --plugin {module}.py"
        )
    # Even a trusted plugin must be the run's version, or other code would read the run
    elif found != pin:
        fault = (
            f"{entry or 'the installed module'} is another version of plugin {plugin}, "
            f"its SHA-256 is {found[:_DIGITS]}: name the run's version by --plugin {module}.py"
        )
    if fault:
        raise SettingError(fault)
    if is_file:
        return entry
    plugins.import_plugin(module)
    return ""


def _name_with_digest(module: str, pin: str) -> str:
    """Return a plugin's module with the first digits of its recorded SHA-256, for errors."""
    digest = "not recorded"
    if pin:
        digest = one_line(pin, _DIGITS + 1)
    return f"'{one_line(module, 80)}' (SHA-256 {digest})"


def _entry_digest(module: str, entry: str) -> str:
    """Compute the SHA-256 of a plugin's file or installed module, or return "" if it is missing."""
    if entry.endswith(".py"):
        return _file_digest(entry)
    return plugins.module_digest(module)


def _file_digest(entry: str) -> str:
    """Compute the SHA-256 of a plugin's file, or return "" if the file cannot be read."""
    try:
        return hashlib.sha256(plugins.read_plugin(Path(entry).expanduser().absolute())).hexdigest()
    except (SettingError, OSError, RuntimeError, ValueError):  # a null byte, no home
        return ""


def _is_remembered(module: str, digest: str) -> bool:
    known = (module, digest)
    return bool(digest) and (known in _run_here or known in _read_remembered())


def _digests_file() -> Path:
    """Return the path of this user's file of trusted plugins, which may be missing.

    The variable $FEDSILO_TRUSTED_PLUGINS names the file. If it is empty or not set, the path is
    ~/.fedsilo/trusted-plugins.

    Raises:
        RuntimeError: the user's home folder is unknown.
    """
    return Path(os.environ.get(PLACE, "") or "~/.fedsilo/trusted-plugins").expanduser()


def _read_remembered() -> set[tuple[str, str]]:
    """Read the user's file of trusted plugins as a set of (module, SHA-256) pairs.

    Each line of the file has a SHA-256, two spaces and a module. Lines without two spaces are
    ignored. Only the first 10^7 characters are read, which is enough for 100,000 plugins. The set
    is empty if there is no file, or if the user's home folder is unknown.

    Raises:
        SettingError: the file cannot be read, is a link or not a regular file, belongs to another
            user, or can be written by other users.
    """
    try:
        path = _digests_file()
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, RuntimeError):
        return set()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None
    # Checked on the open file, because another file could be put in its place meanwhile
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        found = os.fstat(handle)
        theirs = found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if theirs or not stat.S_ISREG(found.st_mode):
            raise SettingError(
                f"{path} can be written by others, who could trust plugins in your name: remove "
                "it, or 'chmod 600' it after reading it"
            )
        lines = file.read(_MOST_BYTES).splitlines()
    remembered = set()
    for line in lines:
        digest, separator, module = line.partition("  ")
        if separator:
            remembered.add((module, digest))
    return remembered
