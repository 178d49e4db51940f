"""A ring of silos that mix with their neighbours (Marfoq et al. 2020).

Equations (arXiv:2010.12229):
  (topology) the ring and its weights -> strategies.topology.graphs.build_topology
  (cycle time) the slowest circuit -> strategies.topology.cycle_time.topology_document
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.methods.decentralised import LinkSettings


@dataclass(frozen=True)
class RingSettings(LinkSettings):
    """Those of the links between silos."""
