"""FedAvg (McMahan et al. 2017): the mean of weights and float buffers, weighted by samples.

Messages in both directions: ``arrays`` holds every parameter and float buffer of the network by its
state-dict name, float32. ``Cyclic`` and ``Mix`` send the same arrays, but do not average.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from fedsilo.core.array_names import is_statistic
from fedsilo.core.errors import SettingError
from fedsilo.core.messages import TRAIN
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, Method, State


class FedAvg(Method):
    """Averages the weights that all sites trained."""

    capabilities = Capabilities(
        paced_epochs=True,
        initial_weights=True,
        some_sites=True,
        aggregations=AGGREGATIONS,
        updates=True,
    )

    def initial_state(self) -> Any:
        """Return a state with the network's initial weights.

        The weights are drawn from the seed, or read from files that settings name.

        Raises:
            SettingError: a file of weights is missing or does not fit the network.
        """
        return self.state_class(self.starting_weights())

    def round(self, state: Any, ask: Ask) -> Any:
        """Send the weights to each asked site for training, and average the weights that return.

        'server.aggregation' is the rule of the average, usually the mean weighted by samples. A
        site that fails or sends invalid arrays is left out.

        Raises:
            SiteError: fewer sites replied than 'run.min-sites' or the aggregation requires.
        """
        trained = ask(TRAIN, dict.fromkeys(ask.sites, state.arrays))
        return replace(state, arrays=self.average(trained, state.arrays))

    def towards(self, replies: Replies, model: Arrays, rate: float) -> dict[str, Any]:
        """Move ``model`` towards the mean of the replies by the fraction ``rate``.

        'server.aggregation' defines the mean. Each resulting array is model + rate * (mean -
        model), as float32 under its name in ``model``. A rate of 1 gives the mean itself. Running
        statistics of batch norm always become the mean. Without replies the result equals
        ``model``.
        """
        after = self.average(replies, model)
        if rate == 1:
            return after  # the bits of the mean itself
        for name, mean in after.items():
            if not is_statistic(name):
                old = model[name].astype(np.float64)
                after[name] = np.asarray(old + rate * (mean - old), np.float32)
        return after

    def disclosures(self) -> Disclosures:
        """Describe the data that a site sends, as sentences for ``privacy.json``.

        The first sentence says that all weights and batch-norm statistics of the network are sent.
        With secure aggregation it adds that they are clipped and masked, and that the server learns
        only their mean. A second sentence then names the keys and shares of keys that masking
        needs.
        """
        what = "all weights and batch-norm statistics of the network, each round"
        if self.common.secure_aggregation == "none":
            return Disclosures(what)
        return Disclosures(
            f"{what}, clipped and masked; the server learns only their mean over all sites",
            "keys for masks, and shares of keys that only other sites can open, each round",
        )


class Cyclic(FedAvg):
    """Passes the model from silo to silo (cyclic weight transfer).

    A round is a lap that visits each silo once, in an order drawn from the seed and the round.
    """

    capabilities = Capabilities(paced_epochs=True, initial_weights=True, some_sites=True)

    def round(self, state: State, ask: Ask) -> State:
        """Pass the model from silo to silo: each trains the model that the previous silo returned.

        All silos of the round (``ask.sites``) are visited once, in an order drawn from the seed and
        the round. The last silo's model becomes the new model. Nothing is averaged.

        Raises:
            SiteError: a silo failed or sent invalid arrays, whatever 'run.min-sites' is.
        """
        seed = derive_seed(self.common.seed, "cycle", state.round + 1)
        for site in np.random.default_rng(seed).permutation(ask.sites).tolist():
            trained = ask(TRAIN, {site: state.arrays})
            state = replace(state, arrays=dict(trained[site].arrays))
        return state

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: the weights, which the next silo receives unchanged."""
        return Disclosures(
            "all weights and batch-norm statistics of the network as this site trained it, each "
            "round, to the server and one other site"
        )


class Mix(FedAvg):
    """Lets the first site of a simulation, the trainer, train on the data of all sites: an oracle.

    ``note.sites`` names the sites whose data the trainer pools; only the trainer returns weights. A
    deployment refuses this method, because no hospital could do it.
    """

    capabilities = Capabilities(
        # No 'server.aggregation' but the mean and no bounds per site,
        # because one update comes from all patients
        paced_epochs=True,
        initial_weights=True,
    )

    def initial_state(self) -> State:
        """Check that all sites are simulated, and return the network's initial weights.

        Real hospitals cannot pool their data for this method. The weights come from the seed or
        from files.

        Raises:
            SettingError: a site is not simulated, or a file of weights is missing or does not fit.
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
        """Let one site train on the pooled data of all simulated sites, and adopt its weights.

        The trainer is the first of all sites by name. Every asked site receives the model, which it
        may measure, and the names of all sites. Only the trainer returns arrays. If the trainer
        fails, the model does not change.
        """
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
