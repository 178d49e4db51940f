"""A ring of silos that mix with their neighbours (Marfoq et al. 2020, arXiv:2010.12229)."""

from __future__ import annotations

from dataclasses import dataclass

from models.methods.decentralised import LinkSettings


@dataclass(frozen=True)
class RingSettings(LinkSettings):
    """Those of the links between silos."""
