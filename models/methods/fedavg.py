"""FedAvg (McMahan et al. 2017, arXiv:1602.05629): the weighted mean of what sites trained."""

from __future__ import annotations

from dataclasses import dataclass

from models.contract.settings import NoSettings


@dataclass(frozen=True)
class FedAvgSettings(NoSettings):
    """None of its own."""
