"""PICSR at a site: train an expert, send it once with a prototype, then train the router.

The server tells the ``stage``: ``warmup`` (FedAvg), ``experts`` (alone, from the site's own state)
or ``router`` (all experts and prototypes came, the router is trained).
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.explain.routing import PatientExplanation, explain_routing
from fedsilo.client_app.methods.base import SiteMethod, refuse_row
from fedsilo.client_app.privacy.noise_source import noise_source
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.contract.array_names import arrays_below
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import START
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.picsr import (
    EXPERTS,
    OWN_EXPERT,
    OWN_PROTOTYPE,
    PROTOTYPE,
    ROUTER,
    ROUTING_STAGE,
    WARMUP,
    PICSRNetwork,
    PICSRSettings,
    StageNotes,
    build_router,
    prototype,
    routing_metrics,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.mixture import expert_array, open_experts
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.privacy.gaussian_noise import normals


class RoutingProbe:
    """The router's weights of a split's samples; only their summary is told."""

    def __init__(self, sites: list[str], min_samples: int) -> None:
        self.sites = sites
        self.min_samples = min_samples
        self.weights: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """Keep the weights of a batch."""
        self.weights.append(_routing_weights(tokens))

    def values(self) -> dict[str, float]:
        """Return mean and quantiles per expert."""
        return routing_metrics(torch.cat(self.weights), self.sites, self.min_samples)


class PICSRSite(SiteMethod):
    """Holds an expert; refuses to send a prototype of too few samples."""

    settings: PICSRSettings

    @classmethod
    def admit(cls, silo: Silo, common: CommonSettings, settings: PICSRSettings) -> None:
        """Refuse to take part with too few samples for a prototype."""
        bounds = {
            "picsr.prototype-min-count": settings.prototype_min_count,
            "sums-min-count": common.sums_min_count,  # a hospital's own floor may be behind it
        }
        count, key = len(silo.train), max(bounds, key=lambda name: bounds[name])
        if count < bounds[key]:
            raise SiteError(
                f"site {silo.name} sends no prototype: it has {count} training samples and "
                f"at least {bounds[key]} are needed ('{key}'); leave the site out"
            )

    def open_network(self) -> SiteNetwork:
        """Build the router with its experts, or this site's expert."""
        if self.stage() == ROUTING_STAGE:
            return self.compute.place(self._router_network())
        came = self.request.arrays(START) or self.request.arrays()
        return self.classifier(came or self.own_state() or None)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the stage's weights; with an expert also the prototype."""
        arrays = exchanged_arrays(network)
        if self.stage() == WARMUP:
            return arrays
        if self.stage() == EXPERTS:
            return {f"{OWN_EXPERT}{name}": array for name, array in arrays.items()} | {
                OWN_PROTOTYPE: self._prototype()
            }
        return self._trained(cast(PICSRNetwork, network))

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the expert while it trains."""
        return exchanged_arrays(network) if self.stage() == EXPERTS else {}

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train the router with a step size of its own."""
        training = super().local_training(network)
        if self.stage() != ROUTING_STAGE:
            return training
        settings = replace(
            training.settings,
            learning_rate=self.settings.router_learning_rate,
            weight_decay=self.settings.router_weight_decay,
        )
        return replace(training, settings=settings)

    def probe(self, network: SiteNetwork, split: str) -> RoutingProbe | None:
        """Return a probe of the routing, once there is a router."""
        if self.stage() != ROUTING_STAGE:
            return None
        least = max(self.settings.prototype_min_count, self.context.limits.sums_min_count)
        return RoutingProbe(cast(PICSRNetwork, network).sites, least)

    def sample_figures(self, network: SiteNetwork, tokens: Tensor) -> dict[str, Tensor]:
        """Return the router's weight of each expert, once there is a router."""
        if self.stage() != ROUTING_STAGE:
            return {}
        columns = _routing_weights(tokens).unbind(dim=1)
        sites = cast(PICSRNetwork, network).sites
        return {f"weight.{site}": weights for site, weights in zip(sites, columns, strict=True)}

    def explain(self, split: str, row: int) -> PatientExplanation:
        """Say which experts spoke for a patient, and which features made the patient close to whom.

        Raises:
            DataError: the split has no such row.
        """
        chosen = self.silo.splits()[split]
        refuse_row(self.silo, split, row)
        names = self.silo.class_names()
        title = (
            f"{self.silo.name}, {split} row {row}: truth {names[int(chosen.labels[row])]}; "
            f"probabilities are of '{names[-1]}'"
        )
        network = self._router_network()
        sample = float_inputs(chosen.inputs[row])
        return explain_routing(network, sample, title, list(self.silo.features))

    def stage(self) -> str:
        """Return what the server says that this round is about."""
        return StageNotes.from_values(self.request.instruction.notes).stage

    def _router_network(self) -> PICSRNetwork:
        arrays = self.request.arrays()
        experts = open_experts(self.common, self.silo.task, arrays)
        shape = self.silo.task.input_shape
        router = build_router(self.settings, shape, len(experts), self.common.seed)
        load_exchanged(router, arrays_below(ROUTER, arrays))
        prototypes = arrays_below(PROTOTYPE, arrays)
        return PICSRNetwork(experts, prototypes, router, self.settings.train_experts)

    def _trained(self, network: PICSRNetwork) -> dict[str, Tensor]:
        arrays = {f"{ROUTER}{n}": array for n, array in exchanged_arrays(network.router).items()}
        if self.settings.train_experts:
            for site, expert in zip(network.sites, network.experts, strict=True):
                arrays |= {
                    expert_array(site, name): array
                    for name, array in exchanged_arrays(expert).items()
                }
        return arrays

    def _prototype(self) -> Tensor:
        mean = prototype(float_inputs(self.silo.train.inputs))
        if not self.settings.prototype_noise:
            return mean
        rng = noise_source(self.request, self.common.seed, "prototype-noise", self.silo.name)
        return mean + self.settings.prototype_noise * normals(mean.shape, rng, torch.float32)


def _routing_weights(tokens: Tensor) -> Tensor:
    """Return the weights (batch, experts) in a mixture's tokens: the last channel's logarithms."""
    return tokens[..., -1].float().exp().cpu()
