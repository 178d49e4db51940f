"""A ring of silos that average with their neighbours (Marfoq et al. 2020).

Equations (arXiv:2010.12229):
  (topology) the ring and its weights -> strategies.topology.graphs.build_topology
  (cycle time) the slowest circuit -> strategies.topology.cycle_time.topology_document
"""

from fedsilo.models.methods.decentralised import LinkSettings as RingSettings

__all__ = ["RingSettings"]
