"""The methods a site can take part in: name -> module and class, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from models.contract.settings_schema import unknown_name

if TYPE_CHECKING:
    from client_app.methods.base import SiteMethod

METHODS = {
    "cdl": "client_app.methods.cdl:CDLSite",
    "cross": "client_app.methods.cross:CrossSite",
    "ensemble": "client_app.methods.ensemble:EnsembleSite",
    "fedavg": "client_app.methods.fedavg:FedAvgSite",
    "fedavg-ft": "client_app.methods.fedavg_ft:FedAvgFTSite",
    "fedaligncl": "client_app.methods.fedaligncl:FedAlignCLSite",
    "feddistill": "client_app.methods.feddistill:FedDistillSite",
    "fedefm": "client_app.methods.fedefm:FedEFMSite",
    "fedevprompt": "client_app.methods.fedevprompt:FedEvPromptSite",
    "fedproto": "client_app.methods.fedproto:FedProtoSite",
    "fedprox": "client_app.methods.fedprox:FedProxSite",
    "local": "client_app.methods.local:LocalSite",
    "matcha": "client_app.methods.matcha:MatchaSite",
    "mix": "client_app.methods.mix:MixSite",
    "moon": "client_app.methods.moon:MoonSite",
    "picsr": "client_app.methods.picsr:PICSRSite",
    "ring": "client_app.methods.decentralised:DecentralisedSite",
    "star": "client_app.methods.decentralised:DecentralisedSite",
    "uefl": "client_app.methods.uefl:UEFLSite",
}


def method_class(name: str) -> type[SiteMethod]:
    """Return the class that answers for method ``name`` at a site."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    module, _, attribute = METHODS[name].partition(":")
    found: type[SiteMethod] = getattr(import_module(module), attribute)
    return found
