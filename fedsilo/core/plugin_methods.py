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

    The name may be ``module:Class``, the name of a module, or a name that an installed package
    offers as an entry point. If it leads to a module, the module must declare exactly one subclass
    of ``Method``, the base of all server classes. This subclass is returned.

    Args:
        name: the plugin, as the setting 'method' names it.
        ours: the names of fedsilo's own methods, which no plugin may take.

    Raises:
        SettingError: no plugin has that name, its module cannot be imported, the class is not a
            subclass of ``Method``, or the module does not declare exactly one.
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

    The class is in the module of the plugin's server class, and is checked here. For a server class
    ``Mine``, its name is ``MineSettings`` or ``MineSite``. A settings class has a ``group``, which
    is the first part of its keys. If the class does not set ``group``, the last part of the
    module's name becomes the group, with '-' in place of '_'.

    Args:
        server: the plugin's server class, such as ``Mine``.
        room: "models" for the settings class, "client_app" for the site class.
        suffix: the end of the class's name: "Settings" or "Site".

    Returns:
        The class; None if the module has no class of that name.

    Raises:
        SettingError: one of these faults was found:
            - The class does not extend ``OwnSettings`` or ``SiteMethod``, or leaves an abstract
              function undefined.
            - A settings class is not a dataclass, or has a field that ``setting`` did not declare.
            - The class is missing, but the module has a settings or site class whose name belongs
              to no server class.
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
    ``base`` itself counts if the module declares it. If the module has a class under two names, the
    class is listed twice.
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

    A plugin's settings class or site class is found by its name, which must be the name of a server
    class in the same module plus ``suffix``. Classes whose names begin with '_' are exempt. They
    may only serve as base classes.

    Args:
        module: the plugin's module.
        server: the plugin's server class, from which the error suggests a name.
        base: the base class of settings classes or site classes.
        suffix: the end of the names of such classes: "Settings" or "Site".

    Raises:
        SettingError: the name of a class belongs to no server class. The error names the first such
            class in alphabetical order.
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

    Each field must be made by ``setting(...)`` and have a type annotation, because fedsilo would
    ignore any other field. Whether the dataclass is frozen is not checked. ``where`` describes the
    module in the error, such as "module 'own'".

    Raises:
        SettingError: the class is not a dataclass, or a field breaks this rule. The error lists
            such fields.
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
