"""FedRep at the server: FedPer's rounds; what differs are the silos' steps."""

from dataclasses import replace

from fedsilo.strategies.methods.fedper import FedPer


class FedRep(FedPer):
    """Averages the representation."""

    capabilities = replace(FedPer.capabilities, paced_epochs=False)
