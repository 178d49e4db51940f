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
        """Describe the data that a site sends, as sentences for ``privacy.json``.

        A site sends its own network, called its expert, and the mean of its training samples. It
        also sends the router, which weighs the experts, and statistics of the router's weights. If
        'experts' is "finetuned", a sentence adds the weights of the warm-up rounds.
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
        """Return the state before round 1, with starting weights if experts are fine-tuned.

        An expert is a network that one site trains alone. If 'experts' is "finetuned", all experts
        start from common weights, which the first rounds train as in FedAvg. If it is "local",
        experts need no common weights, and the state is empty.

        Raises:
            SettingError: a file of weights is missing or does not fit the network.
        """
        if self.settings.experts == "local":
            return PersonalState()
        return PersonalState(self.starting_weights())

    def round(self, state: PersonalState, ask: Ask) -> PersonalState:
        """Run the next round, which belongs to one of three stages.

        The number of finished rounds decides the stage:

        - Warm-up: sites train a common network as in FedAvg.
        - Experts: each site trains its own network, the expert. The last such round collects the
          experts and the sites' prototypes, which are mean samples.
        - Router: each asked site receives all experts, all prototypes and the router, which weighs
          the experts. It trains and returns only the router.

        'server.aggregation' averages the networks of the warm-up and the routers. If
        'router-average' is "equal", all sites' routers have the same weight.
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

        An expert is a network that one site trains alone. Before the last of these rounds, sites
        return no arrays, and ``personal`` in the new state records the sites that keep an expert.
        In the last round each asked site returns its expert and its prototype, the mean of its
        training samples. A reply is unusable if the expert's output for the prototype is not
        finite. A site without a usable reply then has no expert in the mixture.
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

        All sites receive the whole final model: the experts, which are networks of single sites,
        and the router that weighs them. A run that stopped earlier has no router:

        - A site that has trained an expert receives no arrays, and measures its expert.
        - Any other site receives the global weights or, if experts are local, no arrays.
        """
        stage = self.settings.stage(state.round)
        send = dict.fromkeys(ask.sites, state.arrays)
        if stage == EXPERTS:
            for site in set(state.personal).intersection(send):
                send[site] = {}  # it has its own expert
        ask(EVALUATE, send, expect={}, notes=StageNotes(stage))

    def _expert_start(self, site: str, state: PersonalState, ask: Ask) -> Arrays:
        """Return the arrays that ``site`` needs to start its expert.

        An expert is a network that one site trains alone. A site that already keeps an expert needs
        no arrays. For any other site, 'experts' decides:

        - "finetuned": the global weights.
        - "local": the weights of the file 'train.initial-weights'. Without a file there are no
          arrays, because the site draws its weights from the seed.
        """
        if self.settings.experts == "local":
            return self.start(site, ask)
        if site in state.personal:
            return {}
        return state.arrays

    def _fault_of_expert(self, reply: Reply) -> str | None:
        """Describe the fault of a reply whose expert is not usable, or return None if it is usable.

        An expert is the network that a site trained alone. It is applied to the prototype that the
        reply also holds, which is the site's mean sample. The expert is not usable if any logit is
        infinite or NaN.
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
        """Return the content of ``routing.json`` by file name: the experts' weights and distances.

        "sites" has the weight of each expert at each site, from the final test metrics in
        ``values`` (site -> metric -> value). "prototype distances" compares the sites' prototypes
        and the router's embeddings of these prototypes. The mapping is empty if the run stopped
        before the experts were collected.
        """
        if not arrays_below(ROUTER, state.arrays):
            return {}  # the run stopped before the router was made
        arrays = _to_tensors(state.arrays)
        prototypes = arrays_below(PROTOTYPE, arrays)
        router = open_router(self.settings, prototypes, arrays)
        distances = prototype_distances(router, prototypes)
        return {"routing.json": routing_document(values, list(prototypes), distances)}

    def _collect_experts(self, replies: Mapping[str, Reply]) -> dict[str, NDArray]:
        """Return the arrays for the first router round, from the replies of the last experts round.

        - ``expert/<site>/<array>``: the network that the site trained alone.
        - ``prototype/<site>``: the site's mean training sample.
        - ``router/<array>``: a new router, with one output per reply and weights from the seed.
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
        """Return the arrays of the state that the sites train and return in the next round.

        In a warm-up round, which trains a common network, these are all arrays. In a router round
        these are the arrays ``router/...``.
        """
        if self.settings.stage(state.round) == WARMUP:
            return state.arrays
        return with_prefix(ROUTER, arrays_below(ROUTER, state.arrays))


def _to_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors, because an array may be read-only or lie in a file."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
