"""Mix, an oracle: one site of a simulation trains on the training data of all sites.

Messages are FedAvg's, but only the trainer returns weights. ``note.sites`` names the sites whose
data it pools. A deployment refuses this method, because no hospital could do it.
"""

from dataclasses import replace

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.strategies.loop.method import Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class Mix(FedAvg):
    """Lets the first site train on the data of all."""

    capabilities = Capabilities(
        # No 'server.aggregation' but the mean and no bounds per site,
        # because one update comes from all patients
        paced_epochs=True,
        initial_weights=True,
    )

    def initial_state(self) -> State:
        """Return the initial weights.

        Raises:
            SettingError: a site is not simulated.
        """
        real = []
        for site, facts in self.participants.facts.items():
            if not facts.simulated:
                real.append(site)
        if real:
            raise SettingError(
                f"method 'mix' pools the data of all sites, and {', '.join(real)} are not "
                "simulated sites: choose a federated method"
            )
        return State(self.starting_weights())

    def round(self, state: State, ask: Ask) -> State:
        """Let the trainer train on all data; if it fails, the state is unchanged."""
        trainer, sites = self.participants.sites()[0], self.participants.sites()
        replies = ask(
            TRAIN,
            dict.fromkeys(ask.sites, state.arrays),
            reference={trainer: state.arrays},
            notes=PoolNotes(tuple(sites)),
        )
        return replace(state, arrays=self.average(replies.of([trainer]), state.arrays))

    def disclosures(self) -> Disclosures:
        """State that this is not a federated method."""
        return Disclosures(
            "everything: the oracle reads the training data of all sites (simulation only)"
        )
