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
    """Import a plugin's server class, a subclass of ``Method``.

    A name ``module:Class`` names the class itself. A name without a class names a module, which
    must declare exactly one subclass of ``Method``.

    Args:
        name: the plugin, as the setting 'method' names it.
        ours: the names of fedsilo's own methods, which no plugin may take.

    Raises:
        SettingError: no plugin has that name, its module does not import, the class is not a
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
    """Find a plugin's settings class or site class, in the module of its server class.

    The class's name is the name of the server class plus ``suffix``. If a settings class does not
    set ``group`` itself, this function sets the class's ``group`` to the module's name in
    kebab-case.

    Args:
        server: the plugin's server class.
        room: "models" for the settings class, "client_app" for the site class.
        suffix: the end of the class's name, after the name of the server class.

    Returns:
        The class; None if the module does not have a class of that name.

    Raises:
        SettingError: the class does not extend the base class of settings or site classes, or
            leaves an abstract function undefined. A settings class must also be a dataclass, with
            each field declared by ``setting``. The error is also raised if the class is missing,
            but the module has another class of its kind whose name fits none of the module's server
            classes.
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
    """Check that the class ``part`` defines all abstract functions of its base classes.

    ``where`` describes the module of the class in the error, such as "module 'own'".

    Raises:
        SettingError: an abstract function is not defined. The error lists these functions, sorted.
    """
    lacking = sorted(getattr(part, "__abstractmethods__", ()))
    if lacking:
        noun = "function"
        if len(lacking) > 1:
            noun = "functions"
        names = " and ".join(repr(function) for function in lacking)
        raise SettingError(f"class '{part.__name__}' in {where} must define the {noun} {names}")


def _classes_in(module: ModuleType, base: type) -> list[type]:
    """Return the classes in a module that extend ``base`` and that the module declares.

    Only the module's own namespace is searched. A class that the module imports from one of its own
    submodules counts as declared in the module. A class imported from elsewhere does not. ``base``
    is returned too if the module declares it. A class under two names occurs twice.
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
    """Check that each settings or site class in ``module`` belongs to one of its server classes.

    The name of a subclass of ``base`` must be the name of a server class plus ``suffix``. Otherwise
    no method would use it. Classes whose names begin with '_' are exempt.

    Args:
        module: the plugin's module.
        server: the plugin's server class, which the error uses as an example.
        base: the base class of settings classes or site classes.
        suffix: the end of the names of such classes.

    Raises:
        SettingError: names the first class with a wrong name, in alphabetical order.
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

    Each field must be made by ``setting(...)`` and have a type annotation, because fedsilo ignores
    all others. Whether the dataclass is frozen is not checked. ``where`` describes the module in
    the error, such as "module 'own'".

    Raises:
        SettingError: the class is not a dataclass, or a field is wrong. The error lists the wrong
            fields, if there are any.
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
