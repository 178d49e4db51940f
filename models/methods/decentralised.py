"""Methods that average models among neighbours: settings, wire names and the average.

Each silo continues from the weighted mean of its own and its in-neighbours' models (Lian et al.
2017, "Can decentralized algorithms outperform centralized algorithms?").

Equations (arXiv:1705.09056):
  (average) weighted mean of neighbours -> models.methods.decentralised.mix_models

Ring (Marfoq et al. 2020) averages on a directed ring of silos, MATCHA (Wang et al. 2019) in each
round over some matchings of a graph; a star's silos continue from the mean of all.

Equations (arXiv:2010.12229):
  (topology) the ring and its weights -> strategies.topology.graphs.build_topology
  (cycle time) the slowest circuit -> strategies.topology.cycle_time.topology_document

Equations (arXiv:1905.09435):
  (matchings) decomposition of the graph -> strategies.topology.matcha.decompose
  (budget) activation probabilities -> strategies.topology.matcha.activation_probabilities
  (mixing) step size alpha -> strategies.topology.matcha.step_size
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsilo.core.messages import Notes
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting

MODEL = "model/"  # the consensus model (Theta: the mean of the silos' models), for evaluation
NEIGHBOUR = "neighbour/"  # neighbour/<site>/<array>
Topology = Literal["complete", "ring", "star", "matcha", "graph"]  # who is whose neighbour


@dataclass(frozen=True)
class LinkSettings(OwnSettings):
    """Links between silos without 'split.silo-set', for the cycle time of a topology."""

    group: ClassVar[str] = "links"

    access_gbps: float = setting(
        10.0,
        "a silo's own line, shared by all that it sends, and by all that it receives",
        gt=0.0,
    )
    link_gbps: float = setting(1.0, "what a link between two silos carries", gt=0.0)
    link_latency_ms: float = setting(10.0, "what a link takes before the first bit", ge=0.0)


@dataclass(frozen=True)
class RingSettings(LinkSettings):
    """Ring has only the settings of links."""

    title = "Ring"
    server = "fedsilo.strategies.methods.decentralised:Decentralised"
    site = "fedsilo.client_app.methods.decentralised:DecentralisedSite"


@dataclass(frozen=True)
class StarSettings(LinkSettings):
    """Star has only the settings of links."""

    title = "Star"
    server = "fedsilo.strategies.methods.decentralised:Star"
    site = "fedsilo.client_app.methods.star:StarSite"


@dataclass(frozen=True)
class MixingNotes(Notes):
    """The silo's row of the mixing matrix: weight by site."""

    mixing: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MatchaSettings(LinkSettings):
    """Settings of MATCHA (Wang et al. 2019)."""

    title = "MATCHA"
    server = "fedsilo.strategies.methods.decentralised:Decentralised"
    site = "fedsilo.client_app.methods.decentralised:DecentralisedSite"

    group: ClassVar[str] = "matcha"

    matcha_budget: float = setting(
        0.5, "matcha: share of the graph's matchings that a round uses", gt=0.0, le=1.0
    )


@dataclass(frozen=True)
class TopologySettings(MatchaSettings):
    """The setting that decides which silos exchange models."""

    group: ClassVar[str] = "fedefm"

    topology: Topology = setting(
        "complete",
        "who is whose neighbour; star: around one of the silos; graph: the edges of "
        "'split.silo-set'",
    )


def mix_models(
    models: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """Compute the weighted mean of several sites' models, array by array: name -> array.

    The weights of the sites in ``models`` are scaled to sum to 1. A site that is missing there,
    such as a neighbour that failed, has no influence. The mean is computed in float64. Each array
    then gets the data type that it has at the first site in alphabetical order.

    Args:
        models: site -> arrays by name. All sites must have the same arrays.
        weights: site -> mixing weight. Every site in ``models`` needs one, and the sum of these
            weights must be above 0.
    """
    # Replies arrive in any order, but the sum must not depend on it: hence the order of the sites,
    # and float64
    sites = sorted(models)
    # Below 1 only if a neighbour's model is missing; the division restores a mean
    total = sum(weights[site] for site in sites)
    first = models[sites[0]]
    mixture = {}
    for name in first:
        parts = []
        for site in sites:
            parts.append(models[site][name].double() * (weights[site] / total))
        mixture[name] = torch.stack(parts).sum(dim=0).to(first[name].dtype)
    return mixture
