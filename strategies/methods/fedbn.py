"""FedBN at the server: FedPer's rounds; batch norms stay at the silos."""

from dataclasses import replace

from fedsilo.strategies.methods.fedper import FedPer


class FedBN(FedPer):
    """Averages all but batch norms, which networks of tables and ViTs do not have."""

    capabilities = replace(FedPer.capabilities, vit=False, tables=False)
