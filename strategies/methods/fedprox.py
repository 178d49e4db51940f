"""FedProx (Li et al. 2020): FedAvg whose sites stay near the global weights.

Messages as FedAvg's. The server's side of FedProx is that of FedAvg; the proximal term is the
sites' (``client_app/methods/fedprox.py``).
"""

from __future__ import annotations

from fedsilo.strategies.loop.reporting import Published
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.published.conditions import first_of
from fedsilo.strategies.published.fedevprompt import dermoscopy
from fedsilo.strategies.published.picsr import heart_disease


class FedProx(FedAvg):
    """Averages what all sites trained with a proximal term."""

    title = "FedProx"

    def published(self) -> Published:
        """Return PICSR's table 1 or FedEvPrompt's tables."""
        heart = heart_disease("FedProx", self.common, self.participants)
        return first_of(heart, dermoscopy("FedProx", self.common, self.participants))
