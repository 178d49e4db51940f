"""Find the classes of a plugin's method, in another package or in a file.

All classes are in one module: ``OwnMethod`` for the server, ``OwnMethodSettings`` and
``OwnMethodSite``. If the module lacks one of the last two, the plugin uses the class of the method
that it extends.
"""

import inspect
from collections.abc import Collection
from dataclasses import Field, fields, is_dataclass
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import join_names
from fedsilo.core.plugins import resolve_plugin, wrong_plugin
from fedsilo.core.settings_schema import key_of

# The base class that a plugin's class must extend, for each room
_BASES = {
    "models": "fedsilo.core.settings.own_settings:OwnSettings",
    "strategies": "fedsilo.strategies.loop.method:Method",
    "client_app": "fedsilo.client_app.methods.base:SiteMethod",
}


def plugin_server(name: str, ours: Collection[str]) -> type:
    """Import the server class of a plugin method.

    A whole module must declare exactly one subclass of ``Method``, the base of server classes.

    Args:
        name: the plugin, as the setting 'method' names it.
        ours: fedsilo's own methods, whose names no plugin may take.

    Raises:
        SettingError: no plugin has that name, or it cannot be imported or has no such class.
    """
    found, base = resolve_plugin("method", name, ours), resolve_name(_BASES["strategies"])
    if inspect.ismodule(found):
        # A module that imports another method to extend it has two such classes, but declares only
        # one
        own = _classes_in(found, base)
        if len(own) != 1:
            raise SettingError(
                f"method '{name}': module '{found.__name__}' has {len(own)} classes of Method "
                "(fedsilo.strategies.loop.method); name one, as module:Class"
            )
        found = own[0]
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise wrong_plugin(
            "method", name, found, "class of Method (fedsilo.strategies.loop.method)"
        )
    cls: type = found
    return cls


def plugin_part(server: type, room: str, suffix: str) -> Any:
    """Find the settings class or the site class of a plugin method, if the plugin has its own.

    For a server class ``Mine``, it is ``MineSettings`` or ``MineSite`` in the same module.

    Args:
        server: the server class.
        room: "models" for settings, "client_app" for a site.
        suffix: "Settings" or "Site".

    Returns:
        The class; None if missing.

    Raises:
        SettingError: the class cannot be used, or is named after no server class.
    """
    module = import_module(server.__module__)
    part: Any = getattr(module, server.__name__ + suffix, None)
    base, where = resolve_name(_BASES[room]), f"module '{module.__name__}'"
    if part is None:
        _refuse_unused(module, server, base, suffix)
        return None
    if not (inspect.isclass(part) and issubclass(part, base)):
        raise SettingError(
            f"'{server.__name__}{suffix}' of {where} is not a class of {base.__name__}"
        )
    refuse_lacking(part, where)
    if room == "models":
        _refuse_undeclared(part, where)
        # Without a group, its settings could not be told apart from common settings
        if "group" not in vars(part):
            part.group = key_of(module.__name__.rpartition(".")[2])  # type: ignore[attr-defined]
    return part


def refuse_lacking(part: type, where: str) -> None:
    """Check that a class defines all abstract functions of its base classes.

    Args:
        part: the class, such as a plugin's site class.
        where: the module of the class, for the error, such as "module 'own'".

    Raises:
        SettingError: an abstract function is not defined. The error lists all such functions,
            sorted.
    """
    lacking = sorted(getattr(part, "__abstractmethods__", ()))
    if lacking:
        noun = "function"
        if len(lacking) > 1:
            noun = "functions"
        names = " and ".join(repr(function) for function in lacking)
        raise SettingError(f"class '{part.__name__}' in {where} must define the {noun} {names}")


def _classes_in(module: ModuleType, base: type) -> list[type]:
    """List the subclasses of ``base`` that a plugin's module declares, in the order of declaration.

    Classes that the module only imports are left out, unless they come from one of its submodules.
    ``base`` itself counts if the module declares it.
    """
    own = []
    for part in vars(module).values():
        if not inspect.isclass(part) or not issubclass(part, base):
            continue
        # The dots keep 'mine_too' apart from the module 'mine'
        if f"{part.__module__}.".startswith(f"{module.__name__}."):
            own.append(part)
    return own


def _refuse_unused(module: ModuleType, server: type, base: type, suffix: str) -> None:
    """Check that no settings or site class of a plugin would be ignored because of its name.

    Its name must be that of a server class plus ``suffix``, which is "Settings" or "Site", or begin
    with '_'. Otherwise a SettingError is raised.
    """
    methods = _classes_in(module, resolve_name(_BASES["strategies"]))
    taken = {f"{method.__name__}{suffix}" for method in methods}
    unused = []
    for part in _classes_in(module, base):
        if part.__name__ not in taken and not part.__name__.startswith("_"):
            unused.append(part.__name__)
    if unused:
        unused.sort()
        raise SettingError(
            f"no method takes class '{unused[0]}' of module '{module.__name__}': call it "
            f"'{server.__name__}{suffix}', or '_{unused[0]}' if others extend it"
        )


def _refuse_undeclared(settings: type, where: str) -> None:
    """Check that a plugin's settings class is a dataclass whose fields are all declared settings.

    Each field must be made by ``setting(...)`` and have a type annotation. Otherwise a SettingError
    is raised. ``where`` describes the module in it, such as "module 'own'".
    """
    undeclared = []
    if is_dataclass(settings):
        undeclared = [
            field.name for field in fields(settings) if "description" not in field.metadata
        ]
    # A Field that is still in the class lacks an annotation, so dataclass did not see it
    undeclared += [name for name, value in vars(settings).items() if isinstance(value, Field)]
    if is_dataclass(settings) and not undeclared:
        return
    named = ""
    if undeclared:
        named = f": {join_names(undeclared)}"
    raise SettingError(
        f"'{settings.__name__}' of {where} must be a frozen dataclass, each field declared by "
        f"setting(default, help){named}"
    )
