"""Methods that average one model and leave another at each site: FedAvg+FT, FedBABU and Ditto.

Messages are FedAvg's. FedAvg+FT and FedBABU fine-tune in the last ``finetune-rounds``: the first of
these sends the global weights once more, and after that no array crosses the wire. The personal
models stay at the sites, and sites measure them.

A site reports only that it keeps state. If its optimiser continues over the run, this is true after
the first round already. So the server notes the sites that replied while personal models were
trained (``PersonalState``; PICSR uses it too).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.models.networks.site_network import last_layers
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, Reply, State
from fedsilo.strategies.methods.fedavg import FedAvg


@dataclass(frozen=True)
class PersonalState(State):
    """A state that remembers the names of the sites with a personal model, sorted."""

    personal: Sequence[str] = ()

    def with_keepers(self, replies: Mapping[str, Reply]) -> PersonalState:
        """Return a copy of the state that also lists the sites with a new personal model.

        Sites are added to ``personal`` if their replies have ``keeps_state`` set. Sites that did
        not reply remain in this list, which is sorted and has no duplicates.
        """
        personal = set(self.personal)
        for site, reply in replies.items():
            if reply.keeps_state:
                personal.add(site)
        return replace(self, personal=sorted(personal))


class FedAvgFT(FedAvg):
    """Averages first, then lets each site fine-tune the average."""

    settings: FedAvgFTSettings
    # No paced epochs, because the server knows from a site's kept state that it fine-tunes
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS, updates=True)
    state_class = PersonalState

    def round(self, state: PersonalState, ask: Ask) -> State:
        """Average like FedAvg, but in the run's last rounds let each site fine-tune its own model.

        In the last 'finetune-rounds' rounds, a site without a personal model receives the global
        weights and fine-tunes them. A site with a personal model receives no arrays and trains that
        model. No site returns arrays in these rounds, so the global weights do not change. A site
        stores the fine-tuned model and reports that. The new state's ``personal`` lists the sites
        that have ever reported it.
        """
        if self._finetunes(state):
            send = {site: self.model_for(site, state) for site in ask.sites}
            alone = ask(TRAIN, send, expect={})
            return state.with_keepers(alone)
        after: State = super().round(state, ask)
        return after

    def model_for(self, site: str, state: PersonalState) -> Arrays:
        """Return the global weights for ``site``, or no arrays if it has a personal model.

        ``state.personal`` lists the sites with a personal model. Such a site fine-tunes or measures
        that model, so it needs no weights.
        """
        if site in state.personal:
            return {}
        return state.arrays

    def disclosures(self) -> Disclosures:
        """Describe in one sentence that a site sends all weights, and in how many rounds.

        A site sends all weights in each round before the last 'finetune-rounds' rounds. The
        sentence also says that the fine-tuned model stays at the site.
        """
        averaged = self.common.rounds - self.settings.finetune_rounds
        return Disclosures(
            f"all weights and batch-norm statistics of the network, each of the first {averaged} "
            "rounds; the fine-tuned model stays at the site"
        )

    def _finetunes(self, state: State) -> bool:
        return state.round >= self.common.rounds - self.settings.finetune_rounds


class FedBABU(FedAvgFT):
    """Averages the bodies (all layers but the last), then lets each site fine-tune.

    Sites receive the fixed head but never return it, so neither differential privacy's noise nor a
    site's reply can change it.
    """

    def initial_state(self) -> Any:
        """Check that FedBABU can train more than the last layer, and return the initial weights.

        The weights are drawn from the seed or read from files.

        Raises:
            SettingError: the network has no trainable layer but the last, or a file of weights is
                missing or does not fit the network.
        """
        head = last_layers(self.blueprint, 1)
        trained = set()
        for name, parameter in self.blueprint.named_parameters():
            if parameter.requires_grad:
                trained.add(name)
        if trained <= set(head):
            raise SettingError(
                "fedbabu trains all but the last layer, and this network has no other: choose "
                "another 'network.name'"
            )
        return super().initial_state()

    def round(self, state: PersonalState, ask: Ask) -> State:
        """Average all layers but the last or, in the run's last rounds, let each site fine-tune.

        Before the last 'finetune-rounds' rounds, sites receive all layers and return all but the
        last, which stays fixed. 'server.aggregation' averages the returned layers, usually weighted
        by samples. In the last 'finetune-rounds' rounds each site fine-tunes all layers of its own
        copy, and returns no arrays.
        """
        if self._finetunes(state):
            return super().round(state, ask)
        body = dict(state.arrays)
        for name in last_layers(self.blueprint, 1):
            body.pop(name, None)
        send = dict.fromkeys(ask.sites, state.arrays)
        trained = ask(TRAIN, send, reference=dict.fromkeys(ask.sites, body))
        return replace(state, arrays={**state.arrays, **self.average(trained, body)})

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: all weights but the last layer's, before fine-tuning."""
        (said,) = super().disclosures().leaves
        head = f"of the network except {', '.join(last_layers(self.blueprint, 1))}"
        return Disclosures(said.replace("of the network", head))


class Ditto(FedAvg):
    """Averages the sites' updates of the global model; each site measures its own model."""

    capabilities = replace(FedAvg.capabilities, paced_epochs=False)

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: the global model's weights, never its own model."""
        shared, *more = super().disclosures().leaves
        return Disclosures(f"{shared}; the site's own model stays", *more)
