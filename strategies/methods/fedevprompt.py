"""FedEvPrompt (arXiv:2411.10071): sites exchange attention maps, never weights.

Messages, float32: ``train`` sends ``maps/<site>/<class>`` (up to M, cells) of every other site from
the round before. The reply holds ``maps/<class>`` (min(M, N_k), cells) for the classes of the
site's training samples. A map is an attention rollout on the grid of patches; its values are at
least 0 and sum to 1. The variants of table 2 also average prompts (``shared-prompts``:
``prompts.b``, or all prompts and the head), which travel in both directions under their names.
``evaluate`` sends only these.

The buffer holds the maps of the last round, so it has no maps of a site that did not reply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fedsilo.core.array_names import arrays_below, by_site, select_others, with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.models.methods.fedevprompt import (
    BUFFER,
    MAPS,
    FedEvPromptSettings,
    map_fault,
    shared_names,
)
from fedsilo.strategies.loop.method import (
    Arrays,
    ArraySpec,
    Ask,
    Capabilities,
    Disclosures,
    Method,
    Reply,
    State,
)
from fedsilo.strategies.wire.records import NDArray

if TYPE_CHECKING:
    from fedsilo.models.networks.prompted_vit import PromptedViT


class FedEvPrompt(Method):
    """Passes each site's attention maps to all other sites, and never averages the backbone.

    The buffer in the state holds the maps of the last round. If 'shared-prompts' says so, the
    prompts are averaged, with or without the head.
    """

    settings: FedEvPromptSettings
    capabilities = Capabilities(
        tables=False, late_join=True, initial_weights=True, aggregations=AGGREGATIONS
    )

    def disclosures(self) -> Disclosures:
        """Describe all data that a site sends, as sentences for ``privacy.json``.

        One sentence is about attention maps of training images, which are sent unless
        'distillation-weight' is 0. Another is about the parts of the network that are sent after
        training. 'shared-prompts' selects them:

        - "b": the prompts of its first layers.
        - "all": all prompts and the head.
        - "none": no part, and no such sentence.

        If nothing is sent, one sentence says so.
        """
        own, sentences = self.settings, []
        if own.distillation_weight:
            chosen = "any"
            if own.buffer_selection == "uncertainty":
                chosen = "lowest vacuity"
            sentences.append(
                f"each round: up to {own.buffer_maps} attention maps per class, each of one "
                f"training image ({chosen}), which go to all other sites"
            )
        shared = {"b": "the b-prompts", "all": "all prompts and the head"}
        if own.shared_prompts in shared:
            sentences.append(f"each round: {shared[own.shared_prompts]}")
        return Disclosures(*(sentences or ["no weights and no maps"]))

    def initial_state(self) -> State:
        """Return a state without attention maps, and with initial values of the averaged arrays.

        'shared-prompts' selects the arrays of the network that the server averages. If it is
        "none", the state has no arrays.
        """
        weights = self.starting_weights()
        names = shared_names(self.settings, list(weights))
        return State({name: weights[name] for name in names})

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train on other sites' attention maps, average prompts, and store the new maps.

        'shared-prompts' selects the arrays that are averaged. A site receives them, with the maps
        that the other sites returned in the previous round. In round 1 there are no maps. The
        site returns the trained arrays and its own maps. 'server.aggregation' averages the arrays,
        usually weighted by samples. The new state has the maps of this round only. A reply is
        unusable if a map has negative values or does not sum to 1. Neither its arrays nor its maps
        are then used.
        """
        shared = _averaged_arrays(state)
        send: dict[str, Arrays] = {}
        expect: dict[str, Mapping[str, NDArray | ArraySpec]] = {}
        for site in ask.sites:
            start = self.start(site, ask)
            send[site] = {**shared, **_maps_of_others(site, state), **start}
            expect[site] = {**shared, **self._map_specs(site)}
        before = dict.fromkeys(ask.sites, shared)
        replies = ask(TRAIN, send, expect=expect, reference=before, fault=_fault_of_maps)
        arrays: dict[str, NDArray] = {}
        if shared:
            arrays = self.average(replies, shared)
        for site, reply in replies.items():
            arrays |= with_prefix(f"{BUFFER}{site}/", arrays_below(MAPS, reply.arrays))
        return replace(state, arrays=arrays)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return the averaged arrays, to which each site adds the prompts that it has kept."""
        return _averaged_arrays(state)

    def _map_specs(self, site: str) -> dict[str, ArraySpec]:
        """Return the specs of the attention maps that ``site`` sends, by name ``maps/<class>``.

        A class with n training samples has a float32 array (maps, cells). It has min(n,
        'buffer-maps') maps, and one cell for each patch of an image. A class without samples has no
        array. If 'distillation-weight' is 0, maps are not used, and the mapping is empty.
        """
        if not self.settings.distillation_weight:
            return {}
        cells, most = math.prod(self._grid), self.settings.buffer_maps
        counts = self.participants.facts[site].label_counts["train"]
        specs = {}
        for label, count in enumerate(counts):
            if count:
                specs[f"{MAPS}{label}"] = ArraySpec((min(most, count), cells))
        return specs

    def documents(self, state: State, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the content of ``buffer.json`` by file name: the attention maps of the last round.

        The content has three keys:

        - "grid": the number of rows and of columns of image patches.
        - "classes": the names of the classes.
        - "sites": site -> class number as a string -> list of maps.

        A map is a list of values, rounded to 7 decimal places. If the state has no maps, the result
        is empty. ``values`` is not used.
        """
        sites: dict[str, dict[str, Any]] = {}
        for site, maps in by_site(arrays_below(BUFFER, state.arrays)).items():
            sites[site] = {label: np.round(array, 7).tolist() for label, array in maps.items()}
        if not sites:
            return {}
        first = self.participants.facts[self.participants.sites()[0]]
        document = {"grid": list(self._grid), "classes": list(first.class_names), "sites": sites}
        return {"buffer.json": document}

    @property
    def _grid(self) -> tuple[int, int]:
        return cast("PromptedViT", self.blueprint).grid_size()


def _averaged_arrays(state: State) -> dict[str, Any]:
    return {name: array for name, array in state.arrays.items() if not name.startswith(BUFFER)}


def _maps_of_others(site: str, state: State) -> Arrays:
    """Return the buffer's maps of all sites but ``site``, named as they are sent."""
    return with_prefix(MAPS, arrays_below(BUFFER, select_others(site, state.arrays, BUFFER)))


def _fault_of_maps(reply: Reply) -> str | None:
    """Describe the first fault in the attention maps of a reply, or return None if all are valid.

    A map is one row of an array ``maps/<class>``. Its values must be finite and not negative, and
    must sum to 1 within 0.001. The description begins with the name of the array. Other arrays are
    not checked, and a reply without maps is valid.
    """
    for name, array in reply.arrays.items():
        if not name.startswith(MAPS):
            continue
        fault = map_fault(torch.from_numpy(np.array(array)))
        if fault:
            return f"array '{name}': {fault}"
    return None
