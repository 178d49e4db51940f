"""The one table of methods: a line each, from which both ends of the wire find their files.

The method ``fedavg-ft``, here ``"fedavg-ft": "FedAvgFT"``, is in three files of one name:
``models/methods/fedavg_ft.py`` with ``FedAvgFTSettings``, ``strategies/methods/fedavg_ft.py`` with
``FedAvgFT`` and ``client_app/methods/fedavg_ft.py`` with ``FedAvgFTSite``. Each is imported when it
is first used. A method whose part in a room is another's has no file there.

A method of another package or a file, a plug, has its classes in one module: ``OwnMethod`` of the
server, ``OwnMethodSettings`` and ``OwnMethodSite``. What it lacks is that of the method it extends.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import listed
from fedsilo.models.contract.plugs import load_plugins, plug, wrong
from fedsilo.models.contract.settings_schema import key_of

METHODS = {
    "apfl": "APFL",
    "cdl": "CDL",
    "cross": "Cross",
    "cyclic": "Cyclic",
    "distrans": "DisTrans",
    "ditto": "Ditto",
    "ensemble": "Ensemble",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedavg": "FedAvg",
    "fedavg-ft": "FedAvgFT",
    "fedavgm": "FedAvgM",
    "fedaligncl": "FedAlignCL",
    "fedbabu": "FedBABU",
    "fedbn": "FedBN",
    "feddistill": "FedDistill",
    "feddyn": "FedDyn",
    "fedefm": "FedEFM",
    "fedevprompt": "FedEvPrompt",
    "fednova": "FedNova",
    "fedper": "FedPer",
    "fedproto": "FedProto",
    "fedprox": "FedProx",
    "fedrep": "FedRep",
    "fedswa": "FedSWA",
    "fedyogi": "FedYogi",
    "local": "Local",
    "matcha": "Matcha",
    "mix": "Mix",
    "moon": "Moon",
    "picsr": "PICSR",
    "ring": "Ring",
    "scaffold": "SCAFFOLD",
    "star": "Star",
    "uefl": "UEFL",
}

# By room the methods whose part in it is another's: its file and class
_PARTS = {
    "models": {
        "fedadagrad": ("fedadam", "FedAdagrad"),
        "fedbabu": ("fedavg_ft", "FedAvgFT"),
        "fedyogi": ("fedadam", "FedYogi"),
        "matcha": ("decentralised", "Matcha"),
        "ring": ("decentralised", "Link"),
        "star": ("decentralised", "Link"),
    },
    "strategies": {
        "apfl": ("ditto", "Ditto"),
        "fedadagrad": ("fedavgm", "FedAvgM"),
        "fedadam": ("fedavgm", "FedAvgM"),
        "fedprox": ("fedavg", "FedAvg"),
        "fedyogi": ("fedavgm", "FedAvgM"),
        "matcha": ("decentralised", "Decentralised"),
        "ring": ("decentralised", "Decentralised"),
    },
    "client_app": {
        "cyclic": ("fedavg", "FedAvg"),
        "fedadagrad": ("fedavg", "FedAvg"),
        "fedadam": ("fedavg", "FedAvg"),
        "fedavgm": ("fedavg", "FedAvg"),
        "fedbn": ("fedper", "FedPer"),
        "fedswa": ("fedavg", "FedAvg"),
        "fedyogi": ("fedavg", "FedAvg"),
        "matcha": ("decentralised", "Decentralised"),
        "ring": ("decentralised", "Decentralised"),
    },
}
# Names for people that are no class's
_TITLES = {
    "fedavg-ft": "FedAvg+FT",
    "fedaligncl": "Fed-Align-CL",
    "matcha": "MATCHA",
    "mix": "Mix (oracle)",
    "moon": "MOON",
}


def title_of(name: str) -> str:
    """Return the name of method ``name`` for people."""
    return _TITLES.get(name) or METHODS.get(name) or str(_server_side(name).__name__)


# Of those whose settings are in another's file, what that file's first line does not say
_ABOUT = {
    "fedadagrad": "FedAdagrad (Reddi et al. 2021): FedAdam by the sum of all squares of updates.",
    "fedbabu": "FedBABU (Oh et al. 2022): FedAvg with a head that is trained only at the end.",
    "fedyogi": "FedYogi (Reddi et al. 2021): FedAdam with a second moment that changes slowly.",
    "matcha": "MATCHA (Wang et al. 2019): silos average with neighbours, drawn again each round.",
    "ring": "Ring (Marfoq et al. 2020): each silo averages its model with its predecessor's.",
    "star": "Star: after a round every silo has the plain mean of all models.",
}


def about(name: str) -> str:
    """Return a line about a method: the first of its settings' file, not executed, or of a plug.

    Raises:
        SettingError: there is no such method.
    """
    if name in _ABOUT:
        return _ABOUT[name]
    if name not in METHODS:
        doc = import_module(_server_side(name).__module__).__doc__ or ""
    else:
        file = name.replace("-", "_")
        path = Path(__file__).parents[1] / "methods" / f"{file}.py"
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.strip().partition("\n")[0]


# Why what a method sends, or trains on, is not bounded per patient; the others are
_NOT_PRIVATE = {
    "apfl": "trains a second model by the same batches, whose gradients are not bounded",
    "cdl": "trains a second model by the same batches, whose gradients are not bounded",
    "fedaligncl": "sends embeddings of single images, which no noise hides",
    "fedbn": "keeps each site's batch norms, and private training has none",
    "fedefm": "weighs its neighbours by whole batches, in which patients meet",
    "fedevprompt": "sends attention maps of single images, which no noise hides",
    "mix": "pools the data of all sites, whose parts nothing bounds",
}


def why_not_private(name: str) -> str | None:
    """Return why a method cannot be differentially private per patient, or None if it can."""
    if name in METHODS:
        return _NOT_PRIVATE.get(name)
    site, extended = method_part("client_app", name, "Site"), _extended(_server_side(name))
    if site is method_part("client_app", extended, "Site"):
        return _NOT_PRIVATE.get(extended)
    if getattr(site, "bounded_per_patient", False):
        return None
    return (
        "does not say that all it sends is bounded per patient ('bounded_per_patient = True' in "
        f"class {site.__name__})"
    )


# Of what sites send by these the mean by samples is enough, so that it can be summed in secret
_SUMMED = (
    *("apfl", "ditto", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbn", "feddyn", "fednova"),
    *("fedper", "fedprox", "fedrep", "fedswa", "fedyogi", "moon", "scaffold"),
)


def needs_sums_only(name: str) -> bool:
    """Tell whether a method needs only sums of what sites send; a plug's server side says so."""
    own: Any = None if name in METHODS else _server_side(name)
    return own.capabilities.secure if own else name in _SUMMED


def settings_class(name: str) -> type:
    """Return the dataclass of the settings that method ``name`` has of its own."""
    settings: type = method_part("models", name, "Settings")
    return settings


def method_part(room: str, name: str, suffix: str = "") -> Any:
    """Return the class of method ``name`` in ``room``, one of the top-level packages.

    Raises:
        SettingError: no method has that name, its file has no such class, or the class lacks
            functions that every method has (``round`` at the server, ``train`` at a site).
    """
    if name not in METHODS:
        return _plugged_part(room, name, suffix)
    own = name.replace("-", "_"), METHODS[name]
    file, cls = _PARTS[room].get(name, own)
    module = f"fedsilo.{room}.methods.{file}"
    try:
        part = getattr(import_module(module), f"{cls}{suffix}")
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != module:
            raise  # what the file itself imports is missing
        raise SettingError(
            f"method '{name}' of the table in models/contract/methods.py has no class "
            f"'{cls}{suffix}' in {room}/methods/{file}.py: write it, or correct the line"
        ) from None
    _refuse_lacking(part, f"{room}/methods/{file}.py")
    return part


def _refuse_lacking(part: type, where: str) -> None:
    if lacking := sorted(getattr(part, "__abstractmethods__", ())):
        raise SettingError(
            f"class '{part.__name__}' in {where} has no function "
            f"{' and none '.join(repr(function) for function in lacking)}: write it"
        )


# What the classes of a plug extend, by room
_BASES = {
    "models": "fedsilo.models.contract.own_settings:OwnSettings",
    "strategies": "fedsilo.strategies.loop.method:Method",
    "client_app": "fedsilo.client_app.methods.base:SiteMethod",
}


def load_plugin_files(named: str, pins: Mapping[str, str] = {}) -> None:
    """Execute the files of the setting 'plugin', of which none may be called as a method of ours.

    Args:
        named: the setting's value.
        pins: module -> the only SHA-256 that its file may have.

    Raises:
        SettingError: a file has such a name or another digest, or cannot be executed.
    """
    load_plugins(named, {name.replace("-", "_") for name in METHODS}, pins)


def _server_side(name: str) -> type:
    """Return the server's class of a plug: the one that it names, or the only one of its module."""
    found, base = plug("method", name, METHODS), resolve_name(_BASES["strategies"])
    if inspect.ismodule(found):
        own = _classes_in(found, base)
        if len(own) != 1:
            raise SettingError(
                f"method '{name}': module '{found.__name__}' has {len(own)} classes of Method "
                "(fedsilo.strategies.loop.method); name one, as module:Class"
            )
        found = own[0]
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise wrong("method", name, found, "class of Method (fedsilo.strategies.loop.method)")
    cls: type = found
    return cls


def _classes_in(module: ModuleType, base: type) -> list[type]:
    """Return the classes of ``base`` that a module, or one below it, declares."""
    return [
        part
        for part in vars(module).values()
        if inspect.isclass(part)
        and issubclass(part, base)
        and f"{part.__module__}.".startswith(f"{module.__name__}.")
    ]


def _refuse_unused(module: ModuleType, server: type, base: type, suffix: str) -> None:
    """Raise a SettingError for a class that no method of a plug takes: its name is another."""
    methods = _classes_in(module, resolve_name(_BASES["strategies"]))
    taken = {f"{method.__name__}{suffix}" for method in methods}
    names = {part.__name__ for part in _classes_in(module, base)} - taken
    if unused := sorted(name for name in names if not name.startswith("_")):
        raise SettingError(
            f"no method takes class '{unused[0]}' of module '{module.__name__}': call it "
            f"'{server.__name__}{suffix}', or '_{unused[0]}' if others extend it"
        )


def _refuse_undeclared(settings: type, what: str) -> None:
    """Raise a SettingError for settings of a plug without a rule: what is set would be ignored."""
    declared = fields(settings) if is_dataclass(settings) else None
    odd = [field.name for field in declared or () if "rule" not in field.metadata]
    odd += [name for name, value in vars(settings).items() if isinstance(value, Field)]
    if odd or declared is None:
        raise SettingError(
            f"'{settings.__name__}' of {what} must be a frozen dataclass, each field declared by "
            f"setting(default, help){': ' if odd else ''}{listed(odd)}"
        )


def _extended(server: type) -> str:
    """Return the method of ours that the server's class of a plug extends; FedAvg for none."""
    names = {cls: name for name, cls in METHODS.items()}
    ours = (c for c in server.__mro__ if c.__module__.startswith("fedsilo.strategies.methods."))
    return next((names[cls.__name__] for cls in ours if cls.__name__ in names), "fedavg")


def _plugged_part(room: str, name: str, suffix: str) -> Any:
    """Return the class of a plug in ``room``, or that of the method which it extends."""
    server = _server_side(name)
    module = import_module(server.__module__)
    part: Any = server if room == "strategies" else getattr(module, server.__name__ + suffix, None)
    base, what = resolve_name(_BASES[room]), f"module '{module.__name__}'"
    if part is None:
        _refuse_unused(module, server, base, suffix)
        return method_part(room, _extended(server), suffix)
    if not (inspect.isclass(part) and issubclass(part, base)):
        raise SettingError(
            f"'{server.__name__}{suffix}' of {what} is not a class of {base.__name__}"
        )
    _refuse_lacking(part, what)
    if room == "models":
        _refuse_undeclared(part, what)
        if "group" not in vars(part):
            part.group = key_of(module.__name__.rpartition(".")[2])  # type: ignore[attr-defined]
    return part
