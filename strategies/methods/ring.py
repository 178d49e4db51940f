"""Ring: each silo goes on from the mean of its own model and its predecessor's, (A + I) / 2."""

from __future__ import annotations

from fedsilo.models.methods.decentralised import LinkSettings
from fedsilo.strategies.methods.decentralised import Decentralised


class Ring(Decentralised):
    """Mixes on a directed ring."""

    settings: LinkSettings
    title = "Ring"
