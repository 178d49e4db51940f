"""MATCHA (Wang et al. 2019, arXiv:1905.09435): a round mixes over some matchings of a graph."""

from models.methods.decentralised import MatchaSettings

__all__ = ["MatchaSettings"]
