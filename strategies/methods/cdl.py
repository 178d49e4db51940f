"""CDL (Do, Nguyen et al. 2023): decentralised mixing of main models; support models stay at home.

Messages are those of ``strategies/methods/decentralised.py``, for the main model only. The silos
compute the contrastive divergence (``client_app/methods/cdl.py``).
"""

from fedsilo.models.methods.cdl import CDLSettings
from fedsilo.strategies.methods.decentralised import Decentralised, among_silos


class CDL(Decentralised):
    """Mixes main models on a ring or on another topology."""

    settings: CDLSettings

    def kind(self) -> str:
        """Return the kind of the topology."""
        return among_silos(self.settings.divergence_topology)
