"""PICSR (Enouen et al. 2024): a router over silo experts, by distance to silo prototypes.

A prototype is the mean training sample of a silo. The router embeds a sample and all prototypes by
f, inverts the distances ||f(x) - f(p_i)||_2, and maps them by one linear layer and a softmax to the
experts' weights h(x) of eq. 1.

Equations (AAAI 2024, vol. 38 no. 21, pages 23482-23483):
  (1) experts mixed -> models.networks.mixture.mixed_log_probabilities
  (p) prototype of a silo -> models.methods.picsr.prototype
  (dist) distances to the prototypes -> models.methods.picsr.Router.distances
  (inversion) similarity of a distance -> models.methods.picsr.invert_distances
  (parts) what each feature adds to a distance -> models.methods.picsr.feature_contributions
  (h) weights of the experts -> models.methods.picsr.Router.log_weights
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.errors import SettingError
from fedsilo.core.messages import Notes
from fedsilo.core.metric_names import ROUTING, read_metric
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.networks.mixture import Mixture
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays, load_exchanged

PROTOTYPE = "prototype/"
ROUTER = "router/"
WARMUP, EXPERTS, ROUTING_STAGE = "warmup", "experts", "router"  # the stages of a run
OWN_EXPERT, OWN_PROTOTYPE = "expert/", "prototype"  # names in the owner's reply
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class PICSRSettings(OwnSettings):
    """Settings of PICSR, including values that the paper does not give."""

    title = "PICSR"
    tasks = (CLASSIFICATION,)
    why_tasks = "mixes class probabilities"
    server = "fedsilo.strategies.methods.picsr:PICSR"
    site = "fedsilo.client_app.methods.picsr:PICSRSite"

    experts: Literal["local", "finetuned"] = setting(
        "local", "experts start from the seed's weights, or from a FedAvg model"
    )
    warmup_rounds: int = setting(
        10, "rounds of FedAvg before finetuned experts diverge; local ones have none", ge=1
    )
    expert_rounds: int = setting(10, "rounds in which each site trains its expert", ge=1)
    router_learning_rate: float = setting(1e-2, "step size of the router's training", gt=0.0)
    router_width: int = setting(16, "length of an embedding", ge=1)
    inversion: Literal["negative", "reciprocal"] = setting(
        "negative", "distance to similarity: -d or 1/(1+d)"
    )
    router_average: Literal["samples", "equal"] = setting(
        "samples", "a silo's weight in the router's average"
    )
    prototype_min_count: int = setting(
        10, "a prototype over fewer training samples does not leave its site", ge=1
    )

    @property
    def warmup(self) -> int:
        """The number of FedAvg rounds before the sites train experts; 0 for local experts."""
        if self.experts != "finetuned":
            return 0
        return self.warmup_rounds

    def collects(self, finished: int) -> bool:
        """Tell whether sites send experts and prototypes in the round after ``finished`` rounds.

        They send them once, in the last round in which experts are trained.
        """
        return finished + 1 == self.warmup + self.expert_rounds

    def stage(self, finished: int) -> str:
        """Return the stage of the next round: 'warmup', 'experts' or 'router'.

        The run begins with ``warmup`` rounds of FedAvg, which may be 0. In the next
        'picsr.expert-rounds' rounds each site trains its expert. All later rounds train the router.

        Args:
            finished: the number of finished rounds.
        """
        if finished < self.warmup:
            return WARMUP
        if finished < self.warmup + self.expert_rounds:
            return EXPERTS
        return ROUTING_STAGE

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check the settings that PICSR's prototypes and its router depend on.

        A prototype is the mean training sample of a site. A site with fewer training samples than
        'picsr.prototype-min-count' sends none, because the mean would reveal them.

        Args:
            common: the run's common settings.
            is_table: whether the data set is a table.

        Raises:
            SettingError: in one of these cases:

                - 'data.standardise' is "site", which makes the mean sample of every site 0.
                - 'picsr.prototype-min-count' exceeds 'privacy.sums-min-count', for a table with
                  'data.standardise' "pooled". A small site would then send sums that reveal its
                  mean.
                - The warm-up and the experts take all rounds, so that none is left for the router.
        """
        if common.standardise == "site":
            raise SettingError(
                "setting 'data.standardise' must be 'pooled' or 'declared', but is 'site': with "
                "statistics of its own every site has the mean sample 0, so all prototypes "
                "are equal; set it to 'pooled' or 'declared'"
            )
        # The pooled sums give the same mean as the prototype, so their floor must be as strict
        sums_leave = common.standardise == "pooled" and is_table
        if sums_leave and self.prototype_min_count > common.sums_min_count:
            raise SettingError(
                f"setting 'picsr.prototype-min-count' is {self.prototype_min_count}, but "
                f"'privacy.sums-min-count' is {common.sums_min_count}: a site that is too small "
                "for a prototype would send its sums, which give the same mean; raise "
                "'privacy.sums-min-count'"
            )
        before = self.expert_rounds + self.warmup
        if before >= common.rounds:
            raise SettingError(
                f"setting 'rounds' is {common.rounds}, but experts take {before} of them "
                "('picsr.warmup-rounds', 'picsr.expert-rounds'): none is left for the router"
            )


@dataclass(frozen=True)
class StageNotes(Notes):
    """The stage of the round: ``WARMUP``, ``EXPERTS`` or ``ROUTING_STAGE``."""

    stage: str


def prototype(inputs: Tensor) -> Tensor:
    """Compute the mean sample (*input_shape) of ``inputs`` (n, *input_shape)."""
    return inputs.double().mean(dim=0).float()


class Router(nn.Module):
    """Weighs experts by the distance of a sample to the prototypes of their silos."""

    def __init__(self, *, features: int, experts: int, settings: PICSRSettings) -> None:
        super().__init__()
        width = settings.router_width
        self.embedding = nn.Sequential(nn.Flatten(), nn.Linear(features, width))
        self.inversion = settings.inversion
        self.importance = nn.Linear(experts, experts)
        # The last layer starts as the identity. Before training, the weight of an expert then
        # depends only on the distance to its own prototype, which is the paper's intuition
        with torch.no_grad():
            self.importance.weight.copy_(torch.eye(experts))
            self.importance.bias.zero_()

    def distances(self, inputs: Tensor, prototypes: Tensor) -> Tensor:
        """Compute the distances of samples to prototypes in the router's embedding.

        The distance of sample x to prototype p_i is ||f(x) - f(p_i)||_2, where f is the embedding.

        Args:
            inputs: x, (batch, *input_shape).
            prototypes: p_i, (experts, *input_shape).

        Returns:
            The distances, (batch, experts).
        """
        here, there = self.embedding(inputs), self.embedding(prototypes)
        distances: Tensor = torch.linalg.vector_norm(here[:, None] - there[None], dim=-1)
        return distances

    def scores(self, distances: Tensor) -> Tensor:
        """Split each expert's score for one sample into additive terms.

        There is one expert per prototype. An expert's score adds up a bias and, for each prototype,
        a trained weight times the sample's similarity to it. The similarity
        at distance d is -d or 1 / (1 + d), as ``inversion`` says. The softmax of the scores gives
        the experts' weights.

        Args:
            distances: the distances of the sample to the prototypes, (experts,).

        Returns:
            The terms, (experts, experts + 1), a row for each expert. The bias is in the last
            column.
        """
        similarities = invert_distances(distances, self.inversion)
        # (experts, experts): a linear layer would add up each row, here the terms stay apart
        parts = self.importance.weight * similarities
        return torch.cat([parts, self.importance.bias[:, None]], dim=1)

    def log_weights(self, inputs: Tensor, prototypes: Tensor) -> Tensor:
        """Compute the logarithm of the experts' weights for each sample, (batch, experts).

        The weights are a softmax of the experts' scores, which are linear in the sample's
        similarities to the prototypes. The weights of a sample sum to 1.

        Args:
            inputs: (batch, *input_shape).
            prototypes: (experts, *input_shape).
        """
        similarities = invert_distances(self.distances(inputs, prototypes), self.inversion)
        return torch.log_softmax(self.importance(similarities), dim=-1)


def invert_distances(distances: Tensor, inversion: str) -> Tensor:
    """Convert distances d to similarities of the same shape.

    If ``inversion`` is 'negative', the similarity is -d. For any other name it is 1 / (1 + d).
    """
    if inversion == "negative":
        return -distances
    return 1 / (1 + distances)


def build_router(
    settings: PICSRSettings, input_shape: Sequence[int], experts: int, seed: int
) -> Router:
    """Build a router with initial weights drawn from ``seed``."""
    with seed_generators(seed, "router-weights"):
        return Router(features=math.prod(input_shape), experts=experts, settings=settings)


def open_router(
    settings: PICSRSettings, prototypes: Mapping[str, Tensor], arrays: Mapping[str, Tensor]
) -> Router:
    """Build the router from its trained weights.

    The router is a network that weights the sites' expert networks for each sample.

    Args:
        settings: the settings of PICSR.
        prototypes: site -> prototype (*input_shape), one for each expert and at least one.
        arrays: the received arrays by name, of which those named ``router/...`` are the trained
            weights. All other arrays are ignored.

    Raises:
        SettingError: the arrays do not fit the router.
    """
    shape = next(iter(prototypes.values())).shape
    # Any seed will do, because all weights are replaced
    router = build_router(settings, shape, len(prototypes), seed=0)
    load_exchanged(router, arrays_below(ROUTER, arrays))
    return router


class PICSRNetwork(Mixture):
    """Eq. 1: frozen experts in eval mode, mixed by the weights of a router that is trained."""

    def __init__(
        self,
        experts: Mapping[str, TokenClassifier],
        prototypes: Mapping[str, Tensor],
        router: Router,
    ) -> None:
        super().__init__(experts)
        self.router = router
        self.register_buffer("prototypes", torch.stack([prototypes[site] for site in self.sites]))
        self.prototypes: Tensor
        self.experts.requires_grad_(False)

    def train(self, mode: bool = True) -> PICSRNetwork:
        """Set the mode of the network and its router; the experts stay in eval mode."""
        super().train(mode)
        self.experts.eval()
        return self

    def log_weights(self, inputs: Tensor) -> Tensor:
        """Return the router's log h(x), (batch, experts)."""
        return self.router.log_weights(inputs, self.prototypes)

    def trained_arrays(self) -> dict[str, Tensor]:
        """Return the router's arrays by wire name."""
        return with_prefix(ROUTER, exchanged_arrays(self.router))


def routing_metrics(weights: Tensor, sites: Sequence[str], min_samples: int) -> dict[str, float]:
    """Summarise the weights of each expert network over a site's samples, as metrics by name.

    Expert networks are named after their sites. The metrics are ``routing.<expert>.mean`` and the
    quantiles ``routing.<expert>.q05``, ``.q25``, ``.q50``, ``.q75`` and ``.q95``. If there are
    fewer than ``min_samples`` samples, the result is empty, because it would reveal them.

    Args:
        weights: the experts' weights for each sample, (n, experts), rows summing to 1.
        sites: the expert's site for each column.
        min_samples: the smallest number of samples.
    """
    if len(weights) < min_samples:
        return {}
    metrics: dict[str, float] = {}
    for index, site in enumerate(sites):
        column = weights[:, index].double()
        metrics[f"{ROUTING}.{site}.mean"] = column.mean().item()
        for share in QUANTILES:
            key = f"{ROUTING}.{site}.q{round(100 * share):02d}"
            metrics[key] = torch.quantile(column, share).item()
    return metrics


def routing_weights(tokens: Tensor) -> Tensor:
    """Read the experts' weights (batch, experts) from the tokens of a ``Mixture``, on the CPU.

    The last channel of the tokens holds the weights' logarithms.
    """
    return tokens[..., -1].float().exp().cpu()


class RoutingProbe:
    """Collects the router's weights for the samples of a split; only a summary leaves the site."""

    def __init__(self, sites: Sequence[str], min_samples: int) -> None:
        self.sites = sites
        self.min_samples = min_samples
        self.weights: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """Collect the experts' weights for a batch, which are in the tokens of the mixture."""
        self.weights.append(routing_weights(tokens))

    def values(self) -> dict[str, float]:
        """Return ``routing_metrics`` over all collected weights."""
        return routing_metrics(torch.cat(self.weights), self.sites, self.min_samples)


def feature_contributions(
    router: Router, sample: Tensor, prototypes: Tensor, steps: int = 64
) -> Tensor:
    """Split a sample's distance to each prototype into the contributions of the features.

    The distance is |f(sample) - f(prototype)|, where f is the router's embedding. Contributions are
    integrated gradients along the line from the prototype to the sample. Their sum approximates the
    distance, and equals it if f is linear.

    Args:
        router: the router.
        sample: (*input_shape).
        prototypes: (experts, *input_shape).
        steps: the number of points on the line.

    Returns:
        The contributions, (experts, *input_shape).
    """
    # Integrated gradients (Sundararajan et al. 2017) of z -> ||f(z) - f(p_i)|| along the line from
    # p_i to the sample. The midpoint rule never evaluates p_i itself, where the norm has no
    # gradient. captum is imported here, because it takes seconds and only explanations need it
    from captum.attr import IntegratedGradients

    count = len(prototypes)
    gradients = IntegratedGradients(lambda points: router.distances(points, prototypes))
    contributions: Tensor = gradients.attribute(
        sample.expand(count, *sample.shape),
        prototypes,
        target=torch.arange(count),  # row i follows the line from p_i, so its distance is the i-th
        n_steps=steps,
        method="riemann_middle",
    )
    return contributions.detach()


def prototype_distances(
    router: Router, prototypes: Mapping[str, Tensor]
) -> dict[str, list[list[float]]]:
    """Compute the distances between all prototypes, before and after the router's embedding.

    Args:
        router: the router, whose embedding is f.
        prototypes: site -> prototype (*input_shape).

    Returns:
        Two matrices (experts, experts) of L2 distances without gradients, as lists of lists in the
        order of ``prototypes``. ``input`` has the distances of the prototypes themselves, and
        ``embedded`` those of their embeddings by f.
    """
    stacked = torch.stack(list(prototypes.values()))
    flat = stacked.flatten(1).double()
    with torch.no_grad():
        return {
            "input": torch.linalg.vector_norm(flat[:, None] - flat[None], dim=-1).tolist(),
            "embedded": router.distances(stacked, stacked).tolist(),
        }


def routing_document(
    values: Mapping[str, Mapping[str, float]],
    experts: Sequence[str],
    distances: Mapping[str, list[list[float]]],
) -> dict[str, Any]:
    """Build the content of routing.json: the weights that each site's samples give to each expert.

    Args:
        values: site -> test metrics by name. Only the names ``routing.<expert>.<statistic>`` are
            read.
        experts: the experts, named after their sites. Metrics of any other expert are left out.
        distances: the distances between prototypes, from ``prototype_distances``.

    Returns:
        A mapping with three keys:

        - ``experts``: the list ``experts``.
        - ``sites``: site -> expert -> statistic, such as ``mean`` -> value. An expert has an empty
          mapping if the site has no metrics of it.
        - ``prototype distances``: the argument ``distances``.
    """
    sites: dict[str, dict[str, dict[str, float]]] = {}
    for site, metrics in values.items():
        sites[site] = {expert: {} for expert in experts}
        for key, value in metrics.items():
            # Metrics of other families, and experts that are not among ``experts``, are skipped
            read = read_metric(key)
            if read and read.word == ROUTING and read.place in sites[site]:
                sites[site][read.place][read.part] = value
    return {"experts": list(experts), "sites": sites, "prototype distances": dict(distances)}
