"""FedProto (Tan et al. 2022): sites exchange class prototypes, never weights.

Messages, float32: ``train`` sends ``prototype/<class>`` (d,) for every class with a global
prototype; none in round 1. The reply holds ``prototype/<class>`` (d,) for each class with enough
training samples (``held``). ``evaluate`` sends prototypes only if they classify (``inference``). A
site that sends none receives none. d is the tokens times the channels of the network.

A global prototype is the mean of the prototypes received in the last round, weighted by the sites'
counts of the class (eq. 6). Its further division by the number of sites is left out, because it
would shrink prototypes as sites join. A class that nobody sent keeps its prototype.
"""

from dataclasses import replace

import numpy as np

from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.fedproto import PROTOTYPE, FedProtoSettings
from fedsilo.models.networks.build import network_kind
from fedsilo.strategies.loop.method import Arrays, Ask, State
from fedsilo.strategies.methods.class_means import ClassMeans
from fedsilo.strategies.wire.reply import Specs


class FedProto(ClassMeans):
    """Stores the global prototypes."""

    settings: FedProtoSettings
    kind = PROTOTYPE

    def means_that_leave(self) -> list[str]:
        """Describe the prototypes and their smallest number of samples."""
        sentences = [
            f"each round: for each class that {self.enough()}, the mean "
            f"embedding of those samples, {self.fewest()}; the mean over "
            "sites goes to all sites that send one, and where one site alone sends a class that is "
            "this site's own"
        ]
        if network_kind(self.common, self.task) == "logistic":
            sentences.append(
                "of network 'logistic' an embedding is the row itself: what leaves is the exact "
                "mean of each such class's standardised rows; unless 'data.standardise' is "
                "'declared' the mean of the site's other rows follows from it, however few they are"
            )
        return sentences

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train near the global prototypes, and average those that they send (eq. 6)."""
        send: dict[str, Arrays] = {}
        expect: dict[str, Specs] = {}
        before: dict[str, Arrays] = {}
        for site in ask.sites:
            send[site] = {**self._prototypes_for(site, state), **self.start(site, ask)}
            expect[site] = self.specs(site)
            # A class's first prototype is an update of nothing
            known = expect[site].keys() & state.arrays.keys()
            before[site] = {name: state.arrays[name] for name in sorted(known)}
        replies = ask(TRAIN, send, expect=expect, reference=before)
        arrays = dict(state.arrays)
        for label in range(self.task.classes):
            name = f"{PROTOTYPE}{label}"
            sent, weights = [], []
            for site, reply in sorted(replies.items()):
                weight = self._prototype_weight(site, label)
                if weight:
                    sent.append(reply.arrays[name].astype(np.float64))
                    weights.append(weight)
            if sent:  # a class that nobody sent keeps its prototype
                arrays[name] = np.average(sent, axis=0, weights=weights).astype(np.float32)
        return replace(state, arrays=arrays)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return the prototypes if they classify; else empty, as sites measure their own models."""
        if self.settings.inference == "head":
            return {}
        return self._prototypes_for(site, state)

    def _prototypes_for(self, site: str, state: State) -> Arrays:
        """Return the global prototypes; empty for a site that cannot send any itself."""
        if not self.held(site):
            return {}
        return state.arrays

    def _prototype_weight(self, site: str, label: int) -> float:
        """Return the weight of a site's prototype: its count of the class.

        If 'run.site-weights' has an agreed number for the site, the count is scaled to it, so that
        a site cannot raise its weight.
        """
        count, agreed = self.held(site).get(label, 0), self.participants.agreed_samples()
        if site not in agreed:
            return count
        return count * agreed[site] / self.participants.facts[site].sizes()["train"]

    @property
    def size(self) -> int:
        """The number of values in all tokens of a sample."""
        return self.blueprint.tokens * self.blueprint.channels
