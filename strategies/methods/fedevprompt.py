"""FedEvPrompt (arXiv:2411.10071): sites exchange attention maps, never weights.

Messages: ``train`` brings ``maps/<site>/<class>`` (up to M, cells) of every other site, from the
round before; the reply holds ``maps/<class>`` (min(M, N_k), cells) of the classes that the site has
training samples of. A map is a rollout on the grid of patches, not negative, summing to 1. What is
averaged in the variants of table 2 (``shared-prompts``: ``prompts.b``, or all prompts and the head)
goes both ways by its name. ``evaluate`` brings only that. Float32 throughout.

The buffer holds what came in the last round: a site that did not answer has no map in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.contract.settings import AGGREGATIONS, CommonSettings
from fedsilo.models.methods.fedevprompt import (
    BUFFER,
    MAPS,
    FedEvPromptSettings,
    map_fault,
    shared_names,
)
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.wire.records import NDArray

if TYPE_CHECKING:
    from fedsilo.models.networks.prompted_vit import PromptedViT


class FedEvPrompt(Method):
    """Keeps the attention buffer; averages prompts only where the settings say so."""

    settings: FedEvPromptSettings
    title = "FedEvPrompt"
    capabilities = Capabilities(
        tables=False, late_join=True, initial_weights=True, aggregations=AGGREGATIONS
    )

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: FedEvPromptSettings) -> None:
        """Refuse what has no prompts, no evidence, or nothing of what is to be averaged."""
        if common.network != "vit" or common.prompt_sets == "none" or common.train_backbone:
            raise SettingError(
                "method 'fedevprompt' prompts a frozen ViT: set 'network' to 'vit', 'prompt-sets' "
                "to 'b-t' or 'g', and 'train-backbone' to false"
            )
        if common.loss == "cross-entropy":
            raise SettingError(
                "setting 'loss' is 'cross-entropy': method 'fedevprompt' is evidential; leave it "
                "at 'auto'"
            )
        if settings.shared_prompts == "none" and common.aggregation != "mean":
            raise SettingError(
                f"setting 'aggregation' is '{common.aggregation}' and 'fedevprompt.shared-prompts' "
                "'none', which averages nothing: leave it at 'mean'"
            )
        if settings.shared_prompts == "b" and common.prompt_sets == "g":
            raise SettingError(
                "setting 'fedevprompt.shared-prompts' is 'b' and 'prompt-sets' is 'g', which has "
                "no "
                "b-prompts: set 'prompt-sets' to 'b-t', or 'fedevprompt.shared-prompts' to 'all'"
            )

    def disclosures(self) -> Disclosures:
        """Name maps and averaged prompts."""
        own, sentences = self.settings, []
        if own.distillation_weight:
            chosen = "lowest vacuity" if own.buffer_selection == "uncertainty" else "any"
            sentences.append(
                f"each round: up to {own.buffer_maps} attention maps per class, each of one "
                f"training image ({chosen}), which go to all other sites"
            )
        shared = {"b": "the b-prompts", "all": "all prompts and the head"}
        if own.shared_prompts in shared:
            sentences.append(f"each round: {shared[own.shared_prompts]}")
        return Disclosures(*(sentences or ["no weights and no maps"]))

    def initial_state(self, task: Task) -> RoundState:
        """Return an empty buffer, and the initial values of what is averaged."""
        weights = initial_weights(starting_network(self.common, task))
        names = shared_names(self.settings, list(weights))
        return RoundState(0, {name: weights[name] for name in names})

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return what is averaged; to train also the others' maps and what a site starts from."""
        shared = _shared(state)
        if phase == EVALUATE:
            return shared
        foreign = {
            f"{MAPS}{name.removeprefix(BUFFER)}": maps
            for name, maps in state.arrays.items()
            if name.startswith(BUFFER) and _site_of(name) != site
        }
        return {**shared, **foreign, **self.start(site, state)}

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect maps of the classes that the site has, and what is averaged."""
        specs = {name: ArraySpec(array.shape) for name, array in _shared(state).items()}
        if self.settings.distillation_weight:
            cells = math.prod(self._grid)
            counts = self.participants.facts[site].label_counts["train"]
            for label, count in enumerate(counts):
                if count:
                    shape = (min(self.settings.buffer_maps, count), cells)
                    specs[f"{MAPS}{label}"] = ArraySpec(shape)
        return specs

    def rejection_reason(self, phase: str, reply: SiteReply, state: RoundState) -> str | None:
        """Refuse a map that is none."""
        names = self.expected(phase, reply.site, state) if phase != EVALUATE else {}
        for name in names:
            if name.startswith(MAPS):
                fault = map_fault(torch.from_numpy(np.array(reply.array(name))))
                if fault:
                    return f"array '{name}': {fault}"
        return None

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Replace the buffer by what came, and average what is averaged."""
        shared = _shared(state)
        arrays = self.average(replies, shared) if shared else {}
        for site, reply in replies.items():
            for name in self.expected(phase, site, state):
                if name.startswith(MAPS):
                    arrays[f"{BUFFER}{site}/{name.removeprefix(MAPS)}"] = reply.array(name)
        return RoundState(state.round, arrays, state.extras)

    def documents(
        self, state: RoundState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the buffer, for its picture."""
        maps = {n: a for n, a in state.arrays.items() if n.startswith(BUFFER)}
        if not maps:
            return {}
        sites: dict[str, dict[str, Any]] = {}
        for name, array in maps.items():
            label = name.rpartition("/")[2]
            sites.setdefault(_site_of(name), {})[label] = np.round(array, 7).tolist()
        first = self.participants.facts[self.participants.sites()[0]]
        document = {"grid": list(self._grid), "classes": list(first.class_names), "sites": sites}
        return {"buffer.json": document}

    @cached_property
    def _grid(self) -> tuple[int, int]:
        network = starting_network(self.common, self.participants.task())
        return cast("PromptedViT", network).grid_size()


def _shared(state: RoundState) -> dict[str, NDArray]:
    return {name: array for name, array in state.arrays.items() if not name.startswith(BUFFER)}


def _site_of(name: str) -> str:
    return name.removeprefix(BUFFER).rpartition("/")[0]
