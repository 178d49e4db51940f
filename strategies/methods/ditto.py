"""Ditto at the server: FedAvg; each silo's own model stays there and is what is measured."""

from fedsilo.models.contract.settings import AGGREGATIONS
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Disclosures
from fedsilo.strategies.methods.fedavg import FedAvg


class Ditto(FedAvg):
    """Averages what sites trained of the global model."""

    title = "Ditto"
    capabilities = Capabilities(
        initial_weights=True, some_sites=True, aggregations=AGGREGATIONS, secure=True
    )

    def disclosures(self) -> Disclosures:
        """Name the global model's weights."""
        shared, *more = super().disclosures().leaves
        return Disclosures(f"{shared}; the site's own model stays", *more)
