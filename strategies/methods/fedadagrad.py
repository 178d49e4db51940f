"""FedAdagrad at the server (Reddi et al. 2021): FedAvgM's rounds, with the step of its settings."""

from fedsilo.strategies.methods.fedavgm import FedAvgM


class FedAdagrad(FedAvgM):
    """Steps towards the mean as Adagrad does."""

    title = "FedAdagrad"
