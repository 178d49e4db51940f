"""The ensemble: the mean of the sites' models' probabilities (``models.networks.mixture``)."""

from fedsilo.models.contract.own_settings import NoSettings as EnsembleSettings

__all__ = ["EnsembleSettings"]
