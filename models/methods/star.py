"""A star: silos around a server, each of which goes on from the mean of all (FedEFM's STAR)."""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.methods.decentralised import LinkSettings


@dataclass(frozen=True)
class StarSettings(LinkSettings):
    """Those of the links between silos."""
