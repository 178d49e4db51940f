"""A star of silos: all mix with one in the middle (``strategies.topology.graphs``)."""

from __future__ import annotations

from dataclasses import dataclass

from models.methods.decentralised import LinkSettings


@dataclass(frozen=True)
class StarSettings(LinkSettings):
    """Those of the links between silos."""
