"""FedRep at the server: FedPer's rounds; only the silos' steps differ."""

from dataclasses import replace

from fedsilo.strategies.methods.fedper import FedPer


class FedRep(FedPer):
    """Averages the representation; heads stay at the silos."""

    capabilities = replace(FedPer.capabilities, paced_epochs=False)
