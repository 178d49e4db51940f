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
        """Return a state with the network's initial weights, from the seed or from files.

        Raises:
            SettingError: a file of weights is missing or belongs to another network.
        """
        return self.state_class(self.starting_weights())

    def round(self, state: Any, ask: Ask) -> Any:
        """Send the weights to each asked site to train, and average the weights that it returns.

        The average is that of 'server.aggregation', usually the mean weighted by samples. A site
        without a usable reply does not count. Too few usable replies ('run.min-sites') make the
        round fail.
        """
        trained = ask(TRAIN, dict.fromkeys(ask.sites, state.arrays))
        return replace(state, arrays=self.average(trained, state.arrays))

    def towards(self, replies: Replies, model: Arrays, rate: float) -> dict[str, Any]:
        """Return the arrays after a step from ``model`` towards the replies' mean, float32.

        The mean is that of 'server.aggregation'. The step is ``rate`` times the distance, so a rate
        of 1 gives the mean itself, and a larger rate goes beyond it. Running statistics of batch
        norm always become the mean. Without replies the result equals ``model``.
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
        """List the data sent by a site: all weights.

        With secure aggregation the weights are described as clipped and masked, and the keys for
        masks and the shares of keys are listed too.
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
        the round. The last silo's model becomes the new model. Nothing is averaged. If a silo gives
        no usable reply, the round fails, whatever 'run.min-sites' is.
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
        """Return the network's initial weights, drawn from the seed or read from files.

        Raises:
            SettingError: a site is not simulated (real hospitals cannot pool their data), or a file
                of weights is missing or belongs to another network.
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
        """Let the first site by name train on all sites' data, and adopt its weights as the model.

        The server sends all asked sites the model and the names of all sites. Only the first site
        returns arrays. If it gives no usable reply, the model does not change.
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
