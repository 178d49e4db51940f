"""Star: the client-server baseline of FedEFM; after a round every silo has the mean of all.

Messages down: ``model/<array>``, Theta, in every round; up: the silo's trained arrays. It is FedAvg
with equal weights, for comparison with the topologies: its mixing matrix is J, all 1 / n, and its
cycle time has its two hops. The topology ``hub`` is different: there a silo is in the middle, and
models are mixed by Metropolis weights.
"""

from dataclasses import replace

from fedsilo.core.array_names import with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.models.methods.decentralised import MODEL, LinkSettings
from fedsilo.strategies.loop.method import Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.decentralised import Decentralised


class Star(Decentralised):
    """Averages the models of all silos, and sends the mean to all."""

    settings: LinkSettings
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS)

    def kind(self) -> str:
        """Return "star", the topology with the server in the middle."""
        return "star"

    def round(self, state: State, ask: Ask) -> State:
        """Let all silos train Theta, and take the mean with equal weights."""
        theta = self.model(state)
        trained = ask(
            TRAIN,
            dict.fromkeys(ask.sites, with_prefix(MODEL, theta)),
            reference=dict.fromkeys(ask.sites, theta),
        )
        self.time(trained)
        mean = self.average(trained, theta, equal=True)
        return replace(state, arrays=with_prefix(MODEL, mean))

    def disclosures(self) -> Disclosures:
        """Describe the weights; no silo sees another silo's."""
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; "
            "their mean over all silos goes to all silos"
        )
