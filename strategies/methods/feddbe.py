"""FedDBE at the server: FedAvg, and in round 1 the mean of the sites' mean features.

Messages in both directions: FedAvg's, and ``mean/tokens`` (l, c), float32. The server sends zeros
until it knows the mean. Sites return their own mean in that round, and later the mean that they
received. So the server needs only a mean over sites, which can be a secret sum.
"""

from dataclasses import replace

import numpy as np

from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.feddbe import MEAN
from fedsilo.strategies.loop.method import Ask, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class FedDBE(FedAvg):
    """Averages the networks, and once the sites' mean features.

    A mean feature is the encoder's mean output over a site's training samples. Each site also
    trains a bias of its own, which is added to the encoder's output and stays at the site.
    """

    beside = (MEAN,)
    # A site that joins a round late would train without its bias; epochs have a mean of their own
    capabilities = replace(FedAvg.capabilities, some_sites=False, paced_epochs=False)

    def initial_state(self) -> State:
        """Return the network's initial weights, and zeros for the mean feature.

        The mean feature is the encoder's output, averaged over all sites' training samples. Its
        shape is (tokens, channels), and zeros mean that it is not known yet.
        """
        network = self.blueprint
        mean = np.zeros((network.tokens, network.channels), np.float32)
        return State(self.starting_weights() | {MEAN: mean})

    def round(self, state: State, ask: Ask) -> State:
        """Send the network and the mean feature to each asked site, and average the replies.

        A mean feature is the encoder's output, averaged over training samples. While the server's
        mean feature is all zeros, as in round 1, each site returns its own. Their average becomes
        the server's mean feature, which stays unchanged afterwards. The networks are averaged in
        every round. 'server.aggregation' is the rule, usually the mean weighted by samples. A site
        without a usable reply does not count.
        """
        send = dict.fromkeys(ask.sites, state.arrays)
        # Without the mean, which is no update of weights: its length must not count as one
        before = dict.fromkeys(ask.sites, self.model(state))
        trained = ask(TRAIN, send, expect=send, reference=before)
        after = self.average(trained, state.arrays)
        if state.arrays[MEAN].any():
            # The mean of what all sites returned unchanged would round
            after[MEAN] = state.arrays[MEAN]
        return replace(state, arrays=after)

    def disclosures(self) -> Disclosures:
        """Describe the data that a site sends: its weights and, in round 1 only, its mean feature.

        The mean feature is the encoder's output, averaged over the site's training samples. With
        secure aggregation the sentences also say that the data are masked.
        """
        mean = (
            "once, in the first round: the mean over all training samples of what the encoder "
            "makes of them, with the weights and protected like them; the mean over all sites "
            "goes to all sites"
        )
        return super().disclosures().also(mean)
