"""The ensemble: the mean of the silos' models' probabilities (``models.networks.mixture``)."""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.settings import NoSettings


@dataclass(frozen=True)
class EnsembleSettings(NoSettings):
    """None of its own."""
