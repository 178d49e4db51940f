"""FedBN at the server: FedPer, with the batch norms as the arrays that stay at the silos."""

from dataclasses import replace

from fedsilo.strategies.methods.fedper import FedPer


class FedBN(FedPer):
    """Averages everything but batch norms; networks for tables and ViTs have none."""

    capabilities = replace(FedPer.capabilities, vit=False, tables=False)
