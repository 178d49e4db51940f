"""APFL at the server: FedAvg; each silo's own model stays there, and the mixture is measured."""

from fedsilo.strategies.methods.ditto import Ditto


class APFL(Ditto):
    """Averages what sites trained of the global model."""

    title = "APFL"
