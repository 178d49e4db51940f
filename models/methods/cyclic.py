"""Cyclic weight transfer (Chang et al. 2018): one silo after the other trains the same model.

Equations (doi:10.1093/jamia/ocy017):
  (cyclical weight transfer) a round is one lap -> strategies.methods.cyclic.Cyclic.round
"""

from fedsilo.models.contract.own_settings import NoSettings as CyclicSettings

__all__ = ["CyclicSettings"]
