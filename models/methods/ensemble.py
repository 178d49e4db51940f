"""Ensemble: the mean of the probabilities that the sites' models give."""

from fedsilo.models.contract.own_settings import NoSettings as EnsembleSettings

__all__ = ["EnsembleSettings"]
