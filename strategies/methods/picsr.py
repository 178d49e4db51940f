"""PICSR (Enouen et al. 2024): experts and prototypes from all silos, a router trained by averaging.

Stages, by round: ``warmup`` (only if experts are finetuned: FedAvg), ``experts`` (each site alone;
in the last of these rounds the reply brings the expert and the prototype), ``router``.

Messages: in ``warmup`` as FedAvg's. In ``experts`` nothing, but the global weights where experts
are finetuned, until a site has its own; the last reply holds ``expert/<array>`` and ``prototype``
(*input_shape). In ``router`` and at the end ``expert/<site>/<array>``, ``prototype/<site>`` and
``router/<array>``; the reply holds ``router/<array>``, with train-experts also the experts.
``note.stage`` names the stage. Float32 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.array_names import arrays_below
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.contract.notes import Notes
from fedsilo.models.contract.settings import AGGREGATIONS, CommonSettings
from fedsilo.models.methods.picsr import (
    EXPERTS,
    OWN_EXPERT,
    OWN_PROTOTYPE,
    PROTOTYPE,
    ROUTER,
    ROUTING_STAGE,
    WARMUP,
    PICSRSettings,
    StageNotes,
    build_router,
    prototype_distances,
    routing_document,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import load_exchanged
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.mixture import EXPERT
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.methods.experts import collected_experts, expert_specs
from fedsilo.strategies.methods.personal_models import keepers, with_keepers
from fedsilo.strategies.wire.records import NDArray


class PICSR(Method):
    """Collects experts and prototypes, then averages the router."""

    settings: PICSRSettings
    title = "PICSR"
    # Mixed probabilities are no alpha
    capabilities = Capabilities(
        vit=False, evidence=False, initial_weights=True, aggregations=AGGREGATIONS
    )

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: PICSRSettings) -> None:
        """Refuse a blind router, a run without router rounds, and noise that hides nothing."""
        if common.standardise == "site":
            raise SettingError(
                "setting 'standardise' is 'site': by its own figures every site's mean sample is "
                "zero, all prototypes coincide and the router is blind; set it to 'pooled' or "
                "'declared'"
            )
        sums_leave = common.standardise == "pooled" and data_set(common.dataset).is_table
        if settings.prototype_noise and sums_leave:
            raise SettingError(
                f"setting 'picsr.prototype-noise' is {settings.prototype_noise:g} and "
                "'standardise' is "
                "'pooled': the sums that a site sends to be pooled give its exact mean away, so "
                "noise on the prototype hides nothing; set 'standardise' to 'declared'"
            )
        if sums_leave and settings.prototype_min_count > common.sums_min_count:
            raise SettingError(
                f"setting 'picsr.prototype-min-count' is {settings.prototype_min_count} and "
                f"'sums-min-count' is {common.sums_min_count}: a site that is too small for a "
                "prototype would send its sums, which give the same mean; raise 'sums-min-count'"
            )
        before = settings.expert_rounds + _warmup(settings)
        if before >= common.rounds:
            raise SettingError(
                f"setting 'rounds' is {common.rounds} and experts take {before} of them "
                "('picsr.warmup-rounds', 'picsr.expert-rounds'): none is left for the router"
            )

    def disclosures(self) -> Disclosures:
        """Name expert, prototype, router and routing figures."""
        noise = self.settings.prototype_noise
        sentences = [
            "once: all weights of the site's expert, which go to all other sites",
            "once: the site's prototype, the mean of its standardised training samples ("
            + (f"with Gaussian noise of sd {noise:g}" if noise else "without noise")
            + f"; none of fewer than {self.settings.prototype_min_count} samples), which goes to "
            "all other sites",
            "the router's weights, each round of its training",
            "mean and quantiles of the router's weights over validation and over test samples, of "
            f"no fewer than {self.settings.prototype_min_count}",
        ]
        if self.settings.experts == "finetuned":
            sentences.insert(0, "all weights of the network, each warm-up round")
        if self.settings.train_experts:
            sentences.append("all experts' weights, each round of the router's training")
        return Disclosures(*sentences)

    def initial_state(self, task: Task) -> RoundState:
        """Return what FedAvg starts from, nothing where experts begin at once."""
        if self.settings.experts == "local":
            return RoundState(0, {})
        return RoundState(0, initial_weights(starting_network(self.common, task)))

    def stage(self, state: RoundState) -> str:
        """Return the stage of the round after ``state.round``."""
        warmup = _warmup(self.settings)
        if state.round < warmup:
            return WARMUP
        return EXPERTS if state.round < warmup + self.settings.expert_rounds else ROUTING_STAGE

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Tell the stage."""
        return StageNotes(self.stage(state))

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the state's arrays; to a site that trains an expert, what that starts from."""
        if self.stage(state) != EXPERTS:
            return state.arrays
        if self.settings.experts == "local" and phase != EVALUATE:
            return self.start(site, state)
        return {} if site in keepers(state, self.common) else state.arrays

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect what the stage trains."""
        if self.stage(state) == EXPERTS:
            if not self._collects(state):
                return {}
            task = self.participants.task()
            return expert_specs(self.common, task, OWN_EXPERT) | {
                OWN_PROTOTYPE: ArraySpec(task.input_shape)
            }
        return {name: ArraySpec(state.arrays[name].shape) for name in self._trained(state)}

    def rejection_reason(self, phase: str, reply: SiteReply, state: RoundState) -> str | None:
        """Refuse an expert that has no finite answer to its own silo's mean sample."""
        if phase == EVALUATE or not self._collects(state):
            return None
        network = build_classifier(self.common, self.participants.task())
        specs = expert_specs(self.common, self.participants.task(), OWN_EXPERT)
        load_exchanged(
            network,
            {
                name.removeprefix(OWN_EXPERT): torch.from_numpy(np.array(reply.array(name)))
                for name in specs
            },
        )
        mean = torch.from_numpy(np.array(reply.array(OWN_PROTOTYPE)))[None]
        with torch.no_grad():
            answer = network.eval()(mean)
        return None if answer.isfinite().all() else "its expert has no finite answer"

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Average, or collect experts and prototypes and start the router."""
        if self._collects(state):
            return RoundState(state.round, self._collected(replies), state.extras)
        if self.stage(state) == EXPERTS:
            return with_keepers(state, self.common, replies)
        equal = self.stage(state) == ROUTING_STAGE and self.settings.router_average == "equal"
        trained = {name: state.arrays[name] for name in self._trained(state)}
        mean = self.average(replies, trained, equal)
        return RoundState(state.round, {**state.arrays, **mean}, state.extras)

    def documents(
        self, state: RoundState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return who routes to whom, and how far the prototypes are apart."""
        if not any(name.startswith(ROUTER) for name in state.arrays):
            return {}  # the run was stopped before
        arrays = {name: torch.from_numpy(np.array(one)) for name, one in state.arrays.items()}
        prototypes = arrays_below(PROTOTYPE, arrays)
        shape = self.participants.task().input_shape
        router = build_router(self.settings, shape, len(prototypes), self.common.seed)
        load_exchanged(router, arrays_below(ROUTER, arrays))
        distances = prototype_distances(router, prototypes)
        return {"routing.json": routing_document(values, list(prototypes), distances)}

    def _collects(self, state: RoundState) -> bool:
        """Tell whether the next round is the one that brings experts and prototypes."""
        return state.round + 1 == _warmup(self.settings) + self.settings.expert_rounds

    def _collected(self, replies: Mapping[str, SiteReply]) -> dict[str, NDArray]:
        task = self.participants.task()
        specs = expert_specs(self.common, task, OWN_EXPERT)
        arrays = collected_experts(replies, specs, OWN_EXPERT)
        for site, reply in replies.items():
            arrays[f"{PROTOTYPE}{site}"] = reply.array(OWN_PROTOTYPE)
        router = build_router(self.settings, task.input_shape, len(replies), self.common.seed)
        arrays |= {f"{ROUTER}{name}": array for name, array in initial_weights(router).items()}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def _trained(self, state: RoundState) -> list[str]:
        if self.stage(state) == WARMUP:
            return list(state.arrays)
        prefixes = (ROUTER, EXPERT) if self.settings.train_experts else (ROUTER,)
        return [name for name in state.arrays if name.startswith(prefixes)]


def _warmup(settings: PICSRSettings) -> int:
    return settings.warmup_rounds if settings.experts == "finetuned" else 0
