"""CDL (Do, Nguyen et al. 2023): decentralised mixing of main models; support models stay at home.

Messages as those of ``strategies/methods/decentralised.py``, of the main model alone. The
contrastive divergence is the silos' (``client_app/methods/cdl.py``).
"""

from fedsilo.models.methods.cdl import CDLSettings
from fedsilo.strategies.methods.decentralised import Decentralised, among_silos


class CDL(Decentralised):
    """Mixes main models on a ring, or on another topology."""

    settings: CDLSettings

    def kind(self) -> str:
        """Return the topology's kind."""
        return among_silos(self.settings.divergence_topology)
