"""Ditto at the server: FedAvg; each silo's own model stays at the silo and is the measured one."""

from dataclasses import replace

from fedsilo.strategies.loop.method import Disclosures
from fedsilo.strategies.methods.fedavg import FedAvg


class Ditto(FedAvg):
    """Averages the sites' updates of the global model."""

    capabilities = replace(FedAvg.capabilities, paced_epochs=False)

    def disclosures(self) -> Disclosures:
        """Describe the weights of the global model."""
        shared, *more = super().disclosures().leaves
        return Disclosures(f"{shared}; the site's own model stays", *more)
