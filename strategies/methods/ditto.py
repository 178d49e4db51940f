"""Ditto at the server: FedAvg; each silo's own model stays there and is what is measured."""

from dataclasses import replace

from fedsilo.strategies.loop.method import Disclosures
from fedsilo.strategies.methods.fedavg import FedAvg


class Ditto(FedAvg):
    """Averages what sites trained of the global model."""

    capabilities = replace(FedAvg.capabilities, paced_epochs=False)

    def disclosures(self) -> Disclosures:
        """Name the global model's weights."""
        shared, *more = super().disclosures().leaves
        return Disclosures(f"{shared}; the site's own model stays", *more)
