"""FedProx (Li et al. 2020): FedAvg whose sites stay near the global weights.

Messages as FedAvg's. The server's side of FedProx is that of FedAvg; the proximal term is the
sites' (``client_app/methods/fedprox.py``).
"""

from __future__ import annotations

from fedsilo.strategies.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """Averages what all sites trained with a proximal term."""

    title = "FedProx"
