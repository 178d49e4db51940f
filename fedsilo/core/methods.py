"""The table of methods: server and sites find a method's classes by its line here.

A line names a class of ``models/methods``, such as ``FedProxSettings``, and describes the method in
one sentence. The class has the method's settings and says what the method is (see ``OwnSettings``):
its title, where its server side and its site side are, whether private training suits it, and
whether secure sums are enough for it. Classes are imported when they are first used.

A method of another package or of a file, a plugin, has its classes in one module: ``OwnMethod`` for
the server, ``OwnMethodSettings`` and ``OwnMethodSite``. If the module lacks one of the last two,
the plugin uses that class of the method which it extends.
"""

import inspect
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import join_names
from fedsilo.core.plugins import load_plugins, plug, wrong
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import key_of


class Entry(NamedTuple):
    """One line of the table of methods."""

    settings: str  # ``module:Class``, the method's settings and what it says about itself
    # One sentence for lists of methods. It stands here and not in the class because the modules of
    # many classes import PyTorch, and a list must not wait for that.
    description: str


METHODS = {
    "apfl": Entry(
        "fedsilo.models.methods.apfl:APFLSettings",
        "APFL (Deng et al. 2020): each silo mixes a model of its own with the global model.",
    ),
    "cdl": Entry(
        "fedsilo.models.methods.cdl:CDLSettings",
        "CDL (Do, Nguyen et al. 2023): silos mix with neighbours and keep a second model at home.",
    ),
    "cross": Entry(
        "fedsilo.models.methods.cross:CrossSettings",
        "Cross (Jimenez-Sanchez et al. 2023): each site's model is tested at all other sites.",
    ),
    "cyclic": Entry(
        "fedsilo.models.methods.cyclic:CyclicSettings",
        "Cyclic weight transfer (Chang et al. 2018): the silos train one model in turn.",
    ),
    "distrans": Entry(
        "fedsilo.models.methods.distrans:DisTransSettings",
        "DisTrans (Yuan et al. 2022): a learned offset shifts each site's images, in two channels.",
    ),
    "ditto": Entry(
        "fedsilo.models.methods.ditto:DittoSettings",
        "Ditto (Li et al. 2021): FedAvg, and a second model at each silo that stays near it.",
    ),
    "ensemble": Entry(
        "fedsilo.models.methods.ensemble:EnsembleSettings",
        "Ensemble: the mean of the probabilities that the sites' own models give.",
    ),
    "fedadagrad": Entry(
        "fedsilo.models.methods.fedadam:FedAdagradSettings",
        "FedAdagrad (Reddi et al. 2021): FedAdam with the sum of all squared updates.",
    ),
    "fedadam": Entry(
        "fedsilo.models.methods.fedadam:FedAdamSettings",
        "FedAdam (Reddi et al. 2021): the server takes adaptive steps towards the mean.",
    ),
    "fedavg": Entry(
        "fedsilo.models.methods.fedavg:FedAvgSettings",
        "FedAvg (McMahan et al. 2017): the weighted mean of the weights that the sites trained.",
    ),
    "fedavg-ft": Entry(
        "fedsilo.models.methods.fedavg_ft:FedAvgFTSettings",
        "FedAvg+FT: FedAvg, then each site fine-tunes the model on its own data.",
    ),
    "fedavgm": Entry(
        "fedsilo.models.methods.fedavgm:FedAvgMSettings",
        "FedAvgM (Hsu et al. 2019): the server applies momentum to the sites' mean update.",
    ),
    "fedaligncl": Entry(
        "fedsilo.models.methods.fedaligncl:FedAlignCLSettings",
        "Fed-Align-CL (Jimenez-Sanchez et al. 2023): a curriculum and aligned features.",
    ),
    "fedbabu": Entry(
        "fedsilo.models.methods.fedavg_ft:FedBABUSettings",
        "FedBABU (Oh et al. 2022): FedAvg with a head that is trained only at the end.",
    ),
    "fedbn": Entry(
        "fedsilo.models.methods.fedbn:FedBNSettings",
        "FedBN (Li et al. 2021): each silo keeps the weights and statistics of its batch norms.",
    ),
    "feddistill": Entry(
        "fedsilo.models.methods.feddistill:FedDistillSettings",
        "FedDistill (Seo et al. 2022): sites share the mean logits of each class.",
    ),
    "feddyn": Entry(
        "fedsilo.models.methods.feddyn:FedDynSettings",
        "FedDyn (Acar et al. 2021): a term in each site's loss corrects its drift, round by round.",
    ),
    "fedefm": Entry(
        "fedsilo.models.methods.fedefm:FedEFMSettings",
        "FedEFM: neighbours train your model; you distil it back, by earth mover's distance.",
    ),
    "fedevprompt": Entry(
        "fedsilo.models.methods.fedevprompt:FedEvPromptSettings",
        "FedEvPrompt (Hendrix et al. 2024): evidential prompt tuning; sites share attention maps.",
    ),
    "fednova": Entry(
        "fedsilo.models.methods.fednova:FedNovaSettings",
        "FedNova (Wang et al. 2020): each update is divided by the site's steps before averaging.",
    ),
    "fedper": Entry(
        "fedsilo.models.methods.fedper:FedPerSettings",
        "FedPer (Arivazhagan et al. 2019): each silo keeps its last layers for itself.",
    ),
    "fedproto": Entry(
        "fedsilo.models.methods.fedproto:FedProtoSettings",
        "FedProto (Tan et al. 2022): sites share the mean embeddings of classes, not weights.",
    ),
    "fedprox": Entry(
        "fedsilo.models.methods.fedprox:FedProxSettings",
        "FedProx (Li et al. 2020): a proximal term keeps local weights near the global ones.",
    ),
    "fedrep": Entry(
        "fedsilo.models.methods.fedrep:FedRepSettings",
        "FedRep (Collins et al. 2021): FedPer whose silos train the head first.",
    ),
    "fedswa": Entry(
        "fedsilo.models.methods.fedswa:FedSWASettings",
        "FedSWA: FedAvg whose final model is the mean of the models of its last rounds.",
    ),
    "fedyogi": Entry(
        "fedsilo.models.methods.fedadam:FedYogiSettings",
        "FedYogi (Reddi et al. 2021): FedAdam with a second moment that changes slowly.",
    ),
    "local": Entry(
        "fedsilo.models.methods.local:LocalSettings",
        "Local: each site trains alone, and no part of its model reaches another site.",
    ),
    "matcha": Entry(
        "fedsilo.models.methods.decentralised:MatchaSettings",
        "MATCHA (Wang et al. 2019): silos average with neighbours that are drawn again each round.",
    ),
    "mix": Entry(
        "fedsilo.models.methods.mix:MixSettings",
        "Mix, an upper bound: one model trained on the pooled data of all sites.",
    ),
    "moon": Entry(
        "fedsilo.models.methods.moon:MoonSettings",
        "MOON (Li, He and Song 2021): a contrastive loss keeps features near the global ones.",
    ),
    "picsr": Entry(
        "fedsilo.models.methods.picsr:PICSRSettings",
        "PICSR (Enouen et al. 2024): a router over silo experts, by distance to silo prototypes.",
    ),
    "ring": Entry(
        "fedsilo.models.methods.decentralised:RingSettings",
        "Ring (Marfoq et al. 2020): each silo averages its model with its predecessor's.",
    ),
    "scaffold": Entry(
        "fedsilo.models.methods.scaffold:SCAFFOLDSettings",
        "SCAFFOLD (Karimireddy et al. 2020): control variates correct each site's drift.",
    ),
    "star": Entry(
        "fedsilo.models.methods.decentralised:StarSettings",
        "Star: after a round every silo has the plain mean of all models.",
    ),
    "uefl": Entry(
        "fedsilo.models.methods.uefl:UEFLSettings",
        "UEFL (Zhang, Cao and Liu 2025): a codebook that grows where a silo is uncertain.",
    ),
}


def class_name(name: str) -> str:
    """Return the class name of a method's server side: ``FedProx`` for ``fedprox``."""
    return METHODS[name].settings.partition(":")[2].removesuffix("Settings")


def title_of(name: str) -> str:
    """Return a method's name as people write it: ``FedAvg+FT`` for ``fedavg-ft``."""
    settings = settings_class(name)
    if name in METHODS:
        return settings.title
    # A plugin without settings of its own borrows a built-in class, whose title would be wrong here
    server = _server_side(name)
    if settings is not settings_class(_parent_method(server)) and "title" in vars(settings):
        return settings.title
    return server.__name__


def about(name: str) -> str:
    """Describe a method in one sentence, from the table or the first line of a plugin's module.

    Raises:
        SettingError: no method has that name.
    """
    if name in METHODS:
        return METHODS[name].description
    doc = import_module(_server_side(name).__module__).__doc__ or ""
    return doc.strip().partition("\n")[0]


def why_not_private(name: str) -> str | None:
    """Say why a method cannot be differentially private per patient; None if it can.

    A plugin with its own site class counts as private only if that class says so.
    """
    if name in METHODS:
        return settings_class(name).why_not_private
    site, extended = site_class(name), _parent_method(_server_side(name))
    if site is site_class(extended):
        return settings_class(extended).why_not_private
    # Only the author of a plugin knows what it sends, so that silence must not count as a promise
    if getattr(site, "bounded_per_patient", False):
        return None
    return (
        "does not say that all it sends is bounded per patient ('bounded_per_patient = True' in "
        f"class {site.__name__})"
    )


def needs_sums_only(name: str) -> bool:
    """Tell whether a method works with sums over the sites' arrays, without any single reply.

    A plugin whose settings class does not set ``sums_suffice`` takes the value of the method that
    it extends.
    """
    settings = settings_class(name)
    if name in METHODS:
        return settings.sums_suffice
    for cls in settings.__mro__:
        # Every class inherits a value from OwnSettings, which says nothing about this plugin
        if cls is not OwnSettings and "sums_suffice" in vars(cls):
            return settings.sums_suffice
    return settings_class(_parent_method(_server_side(name))).sums_suffice


def settings_class(name: str) -> type[OwnSettings]:
    """Return a method's settings class, which also says what the method is.

    Raises:
        SettingError: no method has that name, or its line in the table names no class.
    """
    if name not in METHODS:
        plugged: type[OwnSettings] = _plugged_part("models", name, "Settings")
        return plugged
    place = METHODS[name].settings
    settings: type[OwnSettings] = _found(place, f"method '{name}' in fedsilo/core/methods.py")
    return settings


def server_class(name: str) -> type[Any]:
    """Return the class of a method's server side.

    Raises:
        SettingError: no method has that name, its class is missing, or that class lacks a function
            that every method has.
    """
    return _side(name, "server")


def site_class(name: str) -> type[Any]:
    """Return the class of a method's site side, without importing the server's side.

    Raises:
        SettingError: see ``server_class``.
    """
    return _side(name, "site")


def _side(name: str, side: str) -> type[Any]:
    """Return a method's class for one ``side``, "server" or "site"."""
    if name not in METHODS:
        plugged: type[Any]
        if side == "server":
            plugged = _plugged_part("strategies", name, "")
        else:
            plugged = _plugged_part("client_app", name, "Site")
        return plugged
    settings = settings_class(name)
    place: str = getattr(settings, side)
    found = _found(place, f"'{side}' of class '{settings.__name__}'")
    _refuse_lacking(found, place.partition(":")[0])
    return found


def _found(place: str, named_by: str) -> type[Any]:
    """Import the class at ``place``, ``module:Class``; errors name ``named_by`` as its source."""
    module, _, cls = place.partition(":")
    try:
        found: type[Any] = getattr(import_module(module), cls)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != module:
            # The method's own file exists; a package that the file imports is missing
            raise
        raise SettingError(
            f"{named_by} names '{place}', but there is no such class: write it, or correct the line"
        ) from None
    return found


def _refuse_lacking(part: type, where: str) -> None:
    """Raise a SettingError for a class without a function that every method has."""
    lacking = sorted(getattr(part, "__abstractmethods__", ()))
    if lacking:
        functions = " and none ".join(repr(function) for function in lacking)
        raise SettingError(
            f"class '{part.__name__}' in {where} has no function {functions}: write it"
        )


# The base class that a plugin's class must extend, for each room
_BASES = {
    "models": "fedsilo.core.settings.own_settings:OwnSettings",
    "strategies": "fedsilo.strategies.loop.method:Method",
    "client_app": "fedsilo.client_app.methods.base:SiteMethod",
}


def load_plugin_files(named: str, pins: Mapping[str, str] = {}) -> None:
    """Execute the files of the setting 'plugin'; no file may have the name of a built-in method.

    Args:
        named: the setting's value.
        pins: module -> the only SHA-256 that its file may have; a module without one may have any.

    Raises:
        SettingError: a file has the name of a built-in method or another digest than its pin, or
            cannot be executed.
    """
    load_plugins(named, {name.replace("-", "_") for name in METHODS}, pins)


def _server_side(name: str) -> type:
    """Return a plugin's server class: the one that it names, or the only one in its module."""
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
    """Return the subclasses of ``base`` that a module or its submodules declare, not import."""
    own = []
    for part in vars(module).values():
        if not inspect.isclass(part) or not issubclass(part, base):
            continue
        # The dots keep 'mine_too' apart from the module 'mine'
        if f"{part.__module__}.".startswith(f"{module.__name__}."):
            own.append(part)
    return own


def _refuse_unused(module: ModuleType, server: type, base: type, suffix: str) -> None:
    """Raise a SettingError for a plugin's class that no method uses, because its name is wrong."""
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


def _refuse_undeclared(settings: type, what: str) -> None:
    """Raise a SettingError for a plugin's setting without a rule, whose value would be ignored."""
    odd = []
    if is_dataclass(settings):
        odd = [field.name for field in fields(settings) if "description" not in field.metadata]
    # A Field that is still in the class has no annotation, so that dataclass did not see it
    odd += [name for name, value in vars(settings).items() if isinstance(value, Field)]
    if is_dataclass(settings) and not odd:
        return
    named = ""
    if odd:
        named = f": {join_names(odd)}"
    raise SettingError(
        f"'{settings.__name__}' of {what} must be a frozen dataclass, each field declared by "
        f"setting(default, help){named}"
    )


def _parent_method(server: type) -> str:
    """Return the built-in method that a plugin's server class extends, or 'fedavg' for none."""
    # The classes come in the order in which Python looks up functions: the nearest parent decides
    names = {class_name(name): name for name in METHODS}
    for cls in server.__mro__:
        is_ours = cls.__module__.startswith("fedsilo.strategies.methods.")
        if is_ours and cls.__name__ in names:
            return names[cls.__name__]
    return "fedavg"


def _plugged_part(room: str, name: str, suffix: str) -> Any:
    """Return a plugin's class for one ``room``, or that of the method which the plugin extends.

    Args:
        room: "models" (settings), "strategies" (server) or "client_app" (site).
        name: the method, as the setting names it.
        suffix: the end of the class's name after that of the server class.
    """
    server = _server_side(name)
    module = import_module(server.__module__)
    part: Any = server
    if room != "strategies":
        part = getattr(module, server.__name__ + suffix, None)
    base, what = resolve_name(_BASES[room]), f"module '{module.__name__}'"
    if part is None:
        _refuse_unused(module, server, base, suffix)
        extended = _parent_method(server)
        if room == "models":
            return settings_class(extended)
        return site_class(extended)
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
