"""The methods the server can run: name -> module and class, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from models.contract.settings_schema import unknown_name

if TYPE_CHECKING:
    from strategies.loop.federated_strategy import FederatedStrategy

METHODS = {
    "cdl": "strategies.methods.cdl:CDL",
    "cross": "strategies.methods.cross:Cross",
    "ensemble": "strategies.methods.ensemble:Ensemble",
    "fedavg": "strategies.methods.fedavg:FedAvg",
    "fedavg-ft": "strategies.methods.fedavg_ft:FedAvgFT",
    "fedaligncl": "strategies.methods.fedaligncl:FedAlignCL",
    "feddistill": "strategies.methods.feddistill:FedDistill",
    "fedefm": "strategies.methods.fedefm:FedEFM",
    "fedevprompt": "strategies.methods.fedevprompt:FedEvPrompt",
    "fedproto": "strategies.methods.fedproto:FedProto",
    "fedprox": "strategies.methods.fedprox:FedProx",
    "local": "strategies.methods.local:Local",
    "matcha": "strategies.methods.matcha:Matcha",
    "mix": "strategies.methods.mix:Mix",
    "moon": "strategies.methods.moon:Moon",
    "picsr": "strategies.methods.picsr:PICSR",
    "ring": "strategies.methods.ring:Ring",
    "star": "strategies.methods.star:Star",
    "uefl": "strategies.methods.uefl:UEFL",
}


def strategy_class(name: str) -> type[FederatedStrategy]:
    """Return the Strategy class of method ``name``."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    module, _, attribute = METHODS[name].partition(":")
    found: type[FederatedStrategy] = getattr(import_module(module), attribute)
    return found
