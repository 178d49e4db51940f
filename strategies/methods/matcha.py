"""MATCHA (Wang et al. 2019): a round mixes over some matchings of a graph, sampled again each."""

from __future__ import annotations

from fedsilo.models.methods.decentralised import MatchaSettings
from fedsilo.strategies.methods.decentralised import Decentralised


class Matcha(Decentralised):
    """Mixes over matchings that keep the graph well connected on average."""

    settings: MatchaSettings
    title = "MATCHA"
