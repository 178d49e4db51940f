"""PICSR (Enouen et al. 2024): experts and prototypes from all silos, and an averaged router.

Stages, by round: ``warmup`` (FedAvg, only if experts are finetuned), ``experts`` (each site trains
alone; the last of these rounds collects experts and prototypes), ``router``.

Messages, float32: In ``warmup`` FedAvg's. In ``experts`` none, except the global weights for
finetuned experts until a site has its own; the last reply holds ``expert/<array>`` and
``prototype`` (*input_shape). In ``router`` and at the end ``expert/<site>/<array>``,
``prototype/<site>`` and ``router/<array>``; the reply holds ``router/<array>``. ``note.stage``
names the stage.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import EVALUATE, TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
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
    open_router,
    prototype_distances,
    routing_document,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.mixture import expert_array
from fedsilo.models.networks.site_network import load_exchanged
from fedsilo.strategies.loop.method import (
    Arrays,
    ArraySpec,
    Ask,
    Capabilities,
    Disclosures,
    Method,
    Reply,
    initial_weights,
)
from fedsilo.strategies.methods.personal_models import PersonalState
from fedsilo.strategies.wire.records import NDArray


class PICSR(Method):
    """Collects each site's expert and prototype, then averages a router that mixes the experts.

    An expert is a network that one site has trained. A prototype is a site's mean training sample.
    """

    settings: PICSRSettings
    # A mixture of probabilities does not have evidence alpha
    capabilities = Capabilities(
        vit=False, evidence=False, initial_weights=True, aggregations=AGGREGATIONS
    )
    state_class = PersonalState

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: expert, prototype, router and routing statistics.

        An expert is the site's own network, and a prototype is its mean training sample. The router
        weighs the experts. With finetuned experts the weights of the warm-up rounds are listed too.
        """
        sentences = [
            "once: all weights of the site's expert, which go to all other sites",
            "once: the site's prototype, the mean of its standardised training samples (without "
            f"noise; never over fewer than {self.settings.prototype_min_count} samples), which "
            "goes "
            "to all other sites",
            "the router's weights, each round of its training",
            "mean and quantiles of the router's weights over validation and over test samples, at "
            f"least {self.settings.prototype_min_count} of each",
        ]
        if self.settings.experts == "finetuned":
            sentences.insert(0, "all weights of the network, each warm-up round")
        return Disclosures(*sentences)

    def initial_state(self) -> PersonalState:
        """Return the state before round 1, with starting weights only if experts are finetuned.

        An expert is a network that one site trains alone. The setting 'experts' decides how it
        starts. "finetuned" experts start from common weights, which warm-up rounds train as in
        FedAvg. "local" experts need no common weights, so the state is empty.

        Raises:
            SettingError: a file of weights is missing or belongs to another network.
        """
        if self.settings.experts == "local":
            return PersonalState()
        return PersonalState(self.starting_weights())

    def round(self, state: PersonalState, ask: Ask) -> PersonalState:
        """Run the next round in its stage: warm-up, experts or router.

        The number of finished rounds decides the stage. In a warm-up round the sites train the
        network like FedAvg. In an experts round each site trains its own network, the expert
        (``_experts_round``). In a router round each asked site receives all experts, all prototypes
        (the sites' mean samples), and the router, which weighs the experts. It trains and returns
        only the router. The warm-up and router rounds average the returned arrays by
        'server.aggregation', usually weighted by samples. If 'router-average' is "equal", all sites
        have the same weight for the router.
        """
        stage = self.settings.stage(state.round)
        if stage == EXPERTS:
            return self._experts_round(state, ask)
        trained = self._trained_arrays(state)
        replies = ask(
            TRAIN,
            dict.fromkeys(ask.sites, state.arrays),
            reference=dict.fromkeys(ask.sites, trained),
            notes=StageNotes(stage),
        )
        equal = stage == ROUTING_STAGE and self.settings.router_average == "equal"
        mean = self.average(replies, trained, equal)
        return replace(state, arrays={**state.arrays, **mean})

    def _experts_round(self, state: PersonalState, ask: Ask) -> PersonalState:
        """Let each site train its own expert, and in the last of these rounds collect the experts.

        An expert is a site's own network. In the rounds before the last, sites return no arrays,
        and the new state only records the sites that keep an expert. In the last round each asked
        site returns its expert and its prototype, the mean of its training samples. Such a reply is
        unusable if the expert has no finite output for that prototype. A site without a usable
        reply in the last round has no expert in the mixture.
        """
        send = {site: self._expert_start(site, state, ask) for site in ask.sites}
        notes = StageNotes(EXPERTS)
        if not self.settings.collects(state.round):
            return state.with_keepers(ask(TRAIN, send, expect={}, notes=notes))
        specs = with_prefix(OWN_EXPERT, self.weight_specs())
        specs[OWN_PROTOTYPE] = ArraySpec(self.shape.input_shape)
        expect = dict.fromkeys(ask.sites, specs)
        replies = ask(TRAIN, send, expect=expect, notes=notes, fault=self._fault_of_expert)
        return replace(state, arrays=self._collect_experts(replies))

    def evaluate(self, state: PersonalState, ask: Ask) -> None:
        """Let each site measure the final model, and return only metrics.

        The final model is the mixture of the collected experts (one network per site), weighted by
        the router. All sites receive all arrays of this mixture. If the run stopped before the
        experts were collected, there is no mixture. Then a site that has trained an expert receives
        no arrays and measures its expert. Any other site receives the state's arrays: the global
        weights, or no arrays if experts are local.
        """
        stage = self.settings.stage(state.round)
        send = dict.fromkeys(ask.sites, state.arrays)
        if stage == EXPERTS:
            for site in set(state.personal).intersection(send):
                send[site] = {}  # it has its own expert
        ask(EVALUATE, send, expect={}, notes=StageNotes(stage))

    def _expert_start(self, site: str, state: PersonalState, ask: Ask) -> Arrays:
        """Return the arrays to send as the start of a site's expert.

        If the site already trains an expert, there are no arrays to send. Otherwise finetuned
        experts start from the global weights, and local experts from 'train.initial-weights'. If
        that setting is empty, no arrays are sent, because the site draws the weights from the seed.
        """
        if self.settings.experts == "local":
            return self.start(site, ask)
        if site in state.personal:
            return {}
        return state.arrays

    def _fault_of_expert(self, reply: Reply) -> str | None:
        """Describe the fault of a reply whose expert is not usable, or return None if it is usable.

        An expert is a site's own network. It is built and applied to the prototype (the site's mean
        sample) in the same reply. The expert is unusable if any logit is infinite or NaN, as very
        large weights can cause. The size of the logits is not checked.
        """
        # An expert with huge weights is finite itself but makes every mixture non-finite
        network = build_classifier(self.common, self.shape)
        arrays = _to_tensors(reply.arrays)
        load_exchanged(network, arrays_below(OWN_EXPERT, arrays))
        with torch.no_grad():
            answer = network.eval()(arrays[OWN_PROTOTYPE][None])
        if answer.isfinite().all():
            return None
        return "its expert has no finite answer"

    def documents(
        self, state: PersonalState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the content of routing.json by its file name: how sites weight the experts.

        The routing weights are read from the final test metrics in ``values`` (site -> metric ->
        value). The file also has the distances between the sites' prototypes, and between the
        router's embeddings of them. The mapping is empty if the run stopped before the experts were
        collected.
        """
        if not arrays_below(ROUTER, state.arrays):
            return {}  # the run stopped before the router was made
        arrays = _to_tensors(state.arrays)
        prototypes = arrays_below(PROTOTYPE, arrays)
        router = open_router(self.settings, prototypes, arrays)
        distances = prototype_distances(router, prototypes)
        return {"routing.json": routing_document(values, list(prototypes), distances)}

    def _collect_experts(self, replies: Mapping[str, Reply]) -> dict[str, NDArray]:
        """Return the arrays that the router rounds begin with, from the last experts round.

        Each reply's expert becomes ``expert/<site>/<array>``, and its prototype
        ``prototype/<site>``. A new router is added as ``router/<array>``. The router has one output
        per reply, and its weights are drawn from the seed.
        """
        # The router is built only now, because its outputs are the sites that delivered an expert
        router = build_router(self.settings, self.shape.input_shape, len(replies), self.common.seed)
        arrays = with_prefix(ROUTER, initial_weights(router))
        for site, reply in replies.items():
            expert = arrays_below(OWN_EXPERT, reply.arrays)
            arrays |= with_prefix(expert_array(site, ""), expert)
            arrays[f"{PROTOTYPE}{site}"] = reply.arrays[OWN_PROTOTYPE]
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def _trained_arrays(self, state: PersonalState) -> Arrays:
        """Return the arrays that the sites train in the next round.

        In a warm-up round all arrays of the state are trained, and in a router round only the
        router's arrays.
        """
        if self.settings.stage(state.round) == WARMUP:
            return state.arrays
        return with_prefix(ROUTER, arrays_below(ROUTER, state.arrays))


def _to_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors, because an array may be read-only or lie in a file."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
