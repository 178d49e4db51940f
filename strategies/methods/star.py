"""Star: silos mix with a hub among them, by Metropolis weights. No orchestrator: FedAvg has one."""

from __future__ import annotations

from models.methods.decentralised import LinkSettings
from strategies.methods.decentralised import Decentralised


class Star(Decentralised):
    """Mixes through a hub that is a silo itself."""

    settings: LinkSettings
    title = "Star"
