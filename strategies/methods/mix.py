"""Mix, an oracle: one site of a simulation trains on the training data of all.

Messages as FedAvg's, but only the trainer answers with weights. ``note.sites`` names the sites
whose data it pools. In a deployment it is refused: no hospital could do it.
"""

from dataclasses import replace

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import TRAIN
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.strategies.loop.method import Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class Mix(FedAvg):
    """Lets the first site train on everything."""

    capabilities = Capabilities(
        # One vector of all patients: no site's part of it is bounded
        paced_epochs=True,
        initial_weights=True,
    )

    def initial_state(self) -> State:
        """Return initial weights.

        Raises:
            SettingError: a site is a real one.
        """
        if real := [site for site, facts in self.participants.facts.items() if not facts.simulated]:
            raise SettingError(
                f"method 'mix' pools the data of all sites, and {', '.join(real)} are not "
                "simulated sites: choose a federated method"
            )
        return State(self.starting_weights())

    def round(self, state: State, ask: Ask) -> State:
        """Have the trainer train on all data; if it failed, the state is as it was."""
        trainer, sites = self.participants.sites()[0], self.participants.sites()
        replies = ask(
            TRAIN,
            dict.fromkeys(ask.sites, state.arrays),
            reference={trainer: state.arrays},
            notes=PoolNotes(tuple(sites)),
        )
        return replace(state, arrays=self.average(replies.of([trainer]), state.arrays))

    def disclosures(self) -> Disclosures:
        """Say that this is not a federated method."""
        return Disclosures(
            "everything: the oracle reads the training data of all sites (simulation only)"
        )
