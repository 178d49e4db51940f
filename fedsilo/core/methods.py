"""The table of methods, in which server and sites look up a method's classes.

Each entry names a class of ``models/methods``, such as ``FedProxSettings``, and describes the
method in one sentence. The class has the method's settings and facts about the method (see
``OwnSettings``): its title, where its server side and its site side are, whether private training
suits it, and whether secure sums are enough for it. Classes are imported when they are first used.

A method that is not in the table is a plugin, whose classes ``plugin_methods`` finds.
"""

from collections import ChainMap
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from fedsilo.core.errors import SettingError
from fedsilo.core.plugin_methods import plugin_part, plugin_server, refuse_lacking
from fedsilo.core.plugins import load_plugins
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import Value, defaults


class Entry(NamedTuple):
    """One line of the table of methods."""

    settings: str  # ``module:Class``, the class of the method's settings and facts
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
    "fedcross": Entry(
        "fedsilo.models.methods.fedcross:FedCrossSettings",
        "FedCross (Hu et al. 2024): each silo trains another model; unlike models are mixed.",
    ),
    "feddbe": Entry(
        "fedsilo.models.methods.feddbe:FedDBESettings",
        "FedDBE (Zhang et al. 2023): each silo keeps what is peculiar to its features.",
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
    "fedpac": Entry(
        "fedsilo.models.methods.fedpac:FedPACSettings",
        "FedPAC (Xu, Tong and Huang 2023): aligned features, and classifiers mixed for each silo.",
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

# Methods that train no network, so they are not compared with those above: commands of their own
# run them, such as ``fedsilo fit``
ESTIMATORS = {
    "glm": Entry(
        "fedsilo.models.methods.glm:GLMSettings",
        "Regression by sums of gradients and Hessians, with standard errors (fedsilo fit).",
    ),
}
# A view of both tables, those of METHODS first when iterated
OURS: Mapping[str, Entry] = ChainMap(ESTIMATORS, METHODS)


def class_name(name: str) -> str:
    """Return the name of a built-in method's server class: ``FedProx`` for ``fedprox``.

    Raises KeyError for any other method.
    """
    return OURS[name].settings.partition(":")[2].removesuffix("Settings")


def title_of(name: str) -> str:
    """Return a method's title, which is its name for readers: ``FedAvg+FT`` for ``fedavg-ft``.

    The settings class of a built-in method has the title. A plugin's title is the ``title`` in its
    own settings class. If there is none, the title is the name of the plugin's server class.

    Raises:
        SettingError: no method has that name, or its plugin cannot be imported.
    """
    settings = settings_class(name)
    if name in OURS:
        return settings.title
    # A plugin without settings of its own borrows a built-in class, whose title would be wrong here
    server = plugin_server(name, METHODS)
    if settings is not settings_class(_parent_method(server)) and "title" in vars(settings):
        return settings.title
    return server.__name__


def about(name: str) -> str:
    """Return one sentence that describes a method.

    The sentence of a built-in method is in the table ``OURS``. For a method of a plugin, the
    plugin's module is imported. The first line of the module's docstring is then the sentence.
    Without a docstring, the sentence is empty.

    Raises:
        SettingError: no method has that name, or its plugin cannot be imported.
    """
    if name in OURS:
        return OURS[name].description
    doc = import_module(plugin_server(name, METHODS).__module__).__doc__ or ""
    return doc.strip().partition("\n")[0]


def why_not_private(name: str) -> str | None:
    """Return the reason why a method cannot have differential privacy per patient; None if it can.

    The reason follows the method's name, as in "sends ...". It comes from one of three places:

    - A built-in method states the reason in its settings class.
    - A plugin without its own site class has the reason of the built-in method that it extends. A
      plugin that extends none counts as FedAvg.
    - A plugin with its own site class has no reason if ``bounded_per_patient`` of that class is
      True. Otherwise the reason is that the class does not state this.

    Raises:
        SettingError: no method has that name, or its plugin cannot be imported.
    """
    if name in OURS:
        return settings_class(name).why_not_private
    site, extended = site_class(name), _parent_method(plugin_server(name, METHODS))
    if site is site_class(extended):
        return settings_class(extended).why_not_private
    # Only the author of a plugin knows what it sends, so silence must not count as a promise
    if getattr(site, "bounded_per_patient", False):
        return None
    return (
        "does not say that all it sends is bounded per patient ('bounded_per_patient = True' in "
        f"class {site.__name__})"
    )


def needs_sums_only(name: str) -> bool:
    """Return whether a method's server needs only sums over sites, so secure aggregation suits it.

    The attribute ``sums_suffice`` of the method's settings class decides. For a plugin, the class
    may define the attribute itself or inherit it from a parent class. The default in the common
    base class ``OwnSettings`` does not count. If no other class defines the attribute, the built-in
    method that the plugin extends decides.

    Raises:
        SettingError: no method has that name, or its plugin cannot be imported.
    """
    settings = settings_class(name)
    if name in OURS:
        return settings.sums_suffice
    for cls in settings.__mro__:
        # The value that every class inherits from OwnSettings is not a statement of this plugin
        if cls is not OwnSettings and "sums_suffice" in vars(cls):
            return settings.sums_suffice
    return settings_class(_parent_method(plugin_server(name, METHODS))).sums_suffice


def proves_sums(common: CommonSettings) -> bool:
    """Return whether the server of a run must prove its sums to the sites.

    This is so if the run's level of trust is 'sums' and its method has ``proves_sums`` set.
    """
    return common.trust == SUMS and settings_class(common.method).proves_sums


def settings_class(name: str) -> type[OwnSettings]:
    """Return a method's settings class, which also states facts such as the method's title.

    A plugin without its own settings class gets the class of the built-in method that it extends.
    If it extends none, it gets FedAvg's.

    Raises:
        SettingError: no method has that name, its plugin cannot be imported, or its settings class
            does not exist or cannot be used.
    """
    if name not in OURS:
        plugged: type[OwnSettings] = _plugin_class(name, "models", "Settings")
        return plugged
    place = OURS[name].settings
    settings: type[OwnSettings] = _import_class(
        place, f"method '{name}' in fedsilo/core/methods.py"
    )
    return settings


def known_defaults() -> dict[str, Value]:
    """Map each common setting and each setting of a built-in method to its default.

    The keys of the mapping are those of the run config. Common settings are those that all methods
    share. The settings of plugins are left out.
    """
    known = defaults(CommonSettings)
    for method in OURS:
        known |= defaults(settings_class(method))
    return known


def server_class(name: str) -> type[Any]:
    """Import the class of a method's server side, which combines the sites' replies.

    Raises:
        SettingError: no method has that name, the method's class does not exist, or the class
            leaves an abstract function undefined.
    """
    return _class_of_side(name, "server")


def site_class(name: str) -> type[Any]:
    """Import the class of a method's site side, which trains at a site and answers the server.

    A plugin without its own site class gets the class of the built-in method that it extends. If it
    extends none, it gets FedAvg's.

    Raises:
        SettingError: no method has that name, its plugin cannot be imported, or its site class does
            not exist, cannot be used, or leaves an abstract function undefined.
    """
    return _class_of_side(name, "site")


def _class_of_side(name: str, side: str) -> type[Any]:
    """Import the server class or the site class of a method, which may be built-in or a plugin.

    A plugin without its own site class gets the class of the built-in method that it extends.

    Args:
        name: the method, as the setting 'method' names it.
        side: "server" or "site".

    Raises:
        SettingError: no method has that name, its plugin cannot be imported, its class does not
            exist or cannot be used, or the class leaves an abstract function undefined.
    """
    if name not in OURS:
        if side == "site":
            plugged: type[Any] = _plugin_class(name, "client_app", "Site")
            return plugged
        server = plugin_server(name, METHODS)
        refuse_lacking(server, f"module '{server.__module__}'")
        return server
    settings = settings_class(name)
    place: str = getattr(settings, side)
    found = _import_class(place, f"'{side}' of class '{settings.__name__}'")
    refuse_lacking(found, place.partition(":")[0])
    return found


def _import_class(place: str, named_by: str) -> type[Any]:
    """Import the class that a string such as ``module:Class`` names.

    Args:
        place: the module and the class.
        named_by: the source of ``place``, as the subject of the error: "'server' of class
            'FedAvgSettings'".

    Raises:
        SettingError: the module or its class does not exist.
        ModuleNotFoundError: the module imports another module that is not installed.
    """
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


def load_plugin_files(named: str, pins: Mapping[str, str] = {}) -> None:
    """Execute the plugin files in the setting 'plugin', and register them as modules.

    A file that was executed before and has not changed is not executed again. A file's name without
    '.py' must be a Python identifier. It must not be the name of a built-in method, or of a module
    that is not a plugin file.

    Args:
        named: the value of the setting: files FILE.py and names of installed modules, separated by
            commas. Only the files are executed.
        pins: module -> the SHA-256 that its file must have. A file without a pin may have any
            content.

    Raises:
        SettingError: a file cannot be read or executed, its digest differs from its pin, or its
            name is not allowed.
    """
    load_plugins(named, {name.replace("-", "_") for name in OURS}, pins)


def _parent_method(server: type) -> str:
    """Return the name of the built-in method that a plugin's server class extends.

    If the class extends several, the first one in Python's method resolution order counts. If it
    extends none, the result is 'fedavg'.
    """
    # The classes are in the order Python looks up functions, so the nearest parent decides
    names = {class_name(name): name for name in OURS}
    for cls in server.__mro__:
        is_ours = cls.__module__.startswith("fedsilo.strategies.methods.")
        if is_ours and cls.__name__ in names:
            return names[cls.__name__]
    return "fedavg"


def _plugin_class(name: str, room: str, suffix: str) -> Any:
    """Return the settings class or the site class of a plugin method.

    A plugin without such a class gets that of the built-in method that it extends. If it extends
    none, it gets FedAvg's.

    Args:
        name: the plugin, as the setting 'method' names it.
        room: "models" for the settings class, "client_app" for the site class. These packages of
            fedsilo have such classes of built-in methods.
        suffix: the end of the class's name, after the name of the server class: "Settings" or
            "Site".

    Raises:
        SettingError: the plugin does not exist or cannot be imported, or its class cannot be used.
    """
    server = plugin_server(name, METHODS)
    part = plugin_part(server, room, suffix)
    if part is not None:
        return part
    extended = _parent_method(server)
    if room == "models":
        return settings_class(extended)
    return site_class(extended)
