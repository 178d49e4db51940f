"""The one table of methods: a line each, from which both ends of the wire find their files.

The method ``fedavg-ft``, here ``"fedavg-ft": "FedAvgFT"``, is in three files of one name:
``models/methods/fedavg_ft.py`` with ``FedAvgFTSettings``, ``strategies/methods/fedavg_ft.py`` with
``FedAvgFT`` and ``client_app/methods/fedavg_ft.py`` with ``FedAvgFTSite``. Each is imported when it
is first used. A method whose part in a room is another's has no file there.
"""

from importlib import import_module
from typing import Any

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import unknown_name

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
    return _TITLES.get(name, METHODS[name])


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
    return _NOT_PRIVATE.get(name)


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
        raise unknown_name("method", name, METHODS)
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
    if lacking := sorted(getattr(part, "__abstractmethods__", ())):
        raise SettingError(
            f"class '{cls}{suffix}' in {room}/methods/{file}.py has no function "
            f"{' and none '.join(repr(function) for function in lacking)}: write it"
        )
    return part
