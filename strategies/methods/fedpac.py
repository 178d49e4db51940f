"""FedPAC at the server: averages the features' part, and mixes the classifiers for each site.

Messages down: all arrays of the network, the classifier as mixed for this site, and
``prototype/<class>`` (d,) from round 2 on. Messages up: the same as trained, and
``received/<class>`` (d + 1,), statistics of the received network. Classes as in ``class_means``.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.fedpac import (
    HEAD,
    RECEIVED,
    FedPACSettings,
    mixing_weights,
    variance_of,
)
from fedsilo.models.methods.fedproto import PROTOTYPE
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import Arrays, ArraySpec, Ask, Disclosures, Reply, State
from fedsilo.strategies.methods.class_means import FedProto
from fedsilo.strategies.methods.fedper import refuse_one_part
from fedsilo.strategies.wire.records import NDArray


class FedPAC(FedProto):
    """Shares the features' part, and gives each site its own mix of the sites' classifiers.

    The state holds the shared arrays, ``head/<site>/<array>`` and ``prototype/<class>``.
    """

    # Not FedProto's settings, because a prototype never classifies here
    settings: FedPACSettings  # type: ignore[assignment]
    beside = (PROTOTYPE,)

    def initial_state(self) -> State:
        """Return the initial weights, with one copy of the classifier for each site.

        The copies are equal, and are named ``head/<site>/<array>``. All other arrays keep their
        names.

        Raises:
            SettingError: the network has no classifier or nothing else, or a file of weights is
                missing or does not fit the network.
        """
        arrays = self.starting_weights()
        head = {name: arrays.pop(name) for name in self._head}
        refuse_one_part(self.common.method, len(arrays), len(head))
        for site in self.participants.sites():
            arrays |= with_prefix(f"{HEAD}{site}/", head)
        return State(arrays)

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train, then average the shared arrays and mix a classifier for each site.

        Each asked site receives the shared arrays and its mixed classifier, and returns them
        trained. A site with enough training samples of a class also sends statistics of the class,
        and receives the global prototypes, the mean embeddings of classes. The server averages
        shared arrays and prototypes over the replies. The class statistics decide how it mixes the
        classifiers. A site that did not reply keeps its classifier, which enters no mix.
        """
        send: dict[str, Arrays] = {}
        expect: dict[str, dict[str, NDArray | ArraySpec]] = {}
        before: dict[str, Arrays] = {}
        for site in ask.sites:
            # A site's update is measured from its own mix of classifiers
            before[site] = self.model_for(site, state)
            send[site] = {**before[site], **self._prototypes_for(site, state)}
            expect[site] = {**before[site], **self.specs(site)}
        replies = ask(TRAIN, send, expect=expect, reference=before)
        arrays = dict(state.arrays)
        arrays |= self.average(replies, self._common_part(state))
        self.merge_prototypes(replies, arrays)
        arrays |= self._mix_heads(replies)
        return replace(state, arrays=arrays)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return the shared arrays with the classifier mixed for ``site``."""
        return {**self._common_part(state), **arrays_below(f"{HEAD}{site}/", state.arrays)}

    def specs(self, site: str) -> dict[str, ArraySpec]:
        """Return the type and shape of each class statistic that ``site`` sends, by its name.

        Each class with enough training samples has two arrays, where d is the length of an
        embedding:

        - ``prototype/<class>`` (d,): the mean embedding by the network that the site has trained.
        - ``received/<class>`` (d + 1,): the mean embedding by the network as received, then the
          mean squared length of these embeddings.
        """
        specs = super().specs(site)
        for label in self.sent_classes(site):
            specs[f"{RECEIVED}{label}"] = ArraySpec((self.size + 1,))
        return specs

    def disclosures(self) -> Disclosures:
        """Describe the data that a site sends: weights, class means, and statistics of embeddings.

        A class mean is the mean embedding of a class by the trained network. The statistics are the
        mean embedding and the mean squared length of an embedding by the received network. If no
        class of any site has enough samples, one sentence says that no class means are sent.
        """
        weights = Disclosures(
            "all weights and batch-norm statistics of the network, each round; "
            f"{', '.join(self._head)} go to other sites, mixed with other sites' or, where that "
            "fits best, as they are"
        )
        if not any(map(self.sent_classes, self.participants.sites())):
            return weights.also(*super().disclosures().leaves)
        return weights.also(
            *self.means_that_leave(),
            "each round: of the same samples the mean embedding and its mean squared length by the "
            "received network, to the server alone",
        )

    def _common_part(self, state: State) -> dict[str, NDArray]:
        """Return the state's arrays that all sites share.

        All arrays are shared except the sites' classifiers, ``head/...``, and the prototypes,
        ``prototype/...``.
        """
        shared = {}
        for name, array in state.arrays.items():
            if not name.startswith((HEAD, PROTOTYPE)):
                shared[name] = array
        return shared

    def _mix_heads(self, replies: Replies) -> dict[str, NDArray]:
        """Mix a classifier for each site that replied, from the classifiers of these sites.

        Each site has its own weights in its mix, which a quadratic program finds
        (``mixing_weights``). They favour sites with similar class statistics. A site that sends no
        statistics keeps the classifier that it trained, which enters no mix.

        Args:
            replies: the replies to the training, with classifiers and class statistics.

        Returns:
            The classifiers, ``head/<site>/<array>``. Mixed ones are float32.
        """
        arrays: dict[str, NDArray] = {}
        # Without statistics nothing says whose classifiers would help a site, or whom its own
        known = replies.of(site for site in replies if self.sent_classes(site))
        for site in replies.keys() - known.keys():
            own = {name: replies[site].arrays[name] for name in self._head}
            arrays |= with_prefix(f"{HEAD}{site}/", own)
        features, variances = [], []
        for site, reply in known.items():
            feature, variance = self._statistics(site, reply)
            features.append(feature)
            variances.append(variance)
        # Each site has an optimum of its own, since all distances are from its own features
        for place, site in enumerate(known):
            weights = mixing_weights(place, np.stack(features), np.array(variances))
            mix = {}
            for name in self._head:
                parts = [reply.arrays[name].astype(np.float64) for reply in known.values()]
                mix[name] = np.average(parts, axis=0, weights=weights).astype(np.float32)
            arrays |= with_prefix(f"{HEAD}{site}/", mix)
        return arrays

    def _statistics(self, site: str, reply: Reply) -> tuple[NDArray, float]:
        """Return a site's class features and their variance, which give the mixing weights.

        The feature of a class is its share of the site's training samples, times its mean embedding
        by the received network. The variance is that of the embeddings, divided by the number of
        samples (``variance_of``). A class whose statistics the site does not send counts as zeros.

        Returns:
            The features of all classes, joined into (classes * embedding length,), and the
            variance.
        """
        classes, samples = self.shape.outputs, self.participants.facts[site].sizes["train"]
        means, squares = np.zeros((classes, self.size)), np.zeros(classes)
        shares = np.zeros(classes)
        for label, count in self.sent_classes(site).items():
            sent = reply.arrays[f"{RECEIVED}{label}"].astype(np.float64)
            means[label], squares[label] = sent[:-1], sent[-1]
            shares[label] = count / samples
        # A class that was not sent has share 0 and a mean of zeros, so it adds nothing
        weighted = shares[:, None] * means
        return weighted.ravel(), variance_of(shares, means, squares, samples)

    @cached_property
    def _head(self) -> list[str]:
        return list(self.settings.personal(self.blueprint))
