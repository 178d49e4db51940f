"""MATCHA (Wang et al. 2019): each round averages over some matchings of a graph.

Equations (arXiv:1905.09435):
  (matchings) decomposition of the graph -> strategies.topology.matcha.decompose
  (budget) activation probabilities -> strategies.topology.matcha.activation_probabilities
  (mixing) step size alpha -> strategies.topology.matcha.step_size
"""

from fedsilo.models.methods.decentralised import MatchaSettings

__all__ = ["MatchaSettings"]
