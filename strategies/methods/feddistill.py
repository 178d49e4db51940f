"""FedDistill (Seo et al. 2022, after Jeong et al. 2018): sites exchange mean logits, never weights.

Messages, float32: ``train`` sends ``logits/<class>`` (classes,), the unweighted mean over all other
sites that send the class; none in round 1. The reply holds ``logits/<class>`` (classes,), the mean
over the site's training samples of that class, for each class with enough samples (``held``).
``evaluate`` sends nothing.

The server keeps each site's logits until the site sends newer ones, so a site that misses a round
still counts for the others.
"""

from dataclasses import replace

import numpy as np

from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.feddistill import LOGITS, FedDistillSettings
from fedsilo.strategies.loop.method import Arrays, Ask, State
from fedsilo.strategies.methods.class_means import ClassMeans
from fedsilo.strategies.wire.reply import Specs


class FedDistill(ClassMeans):
    """Stores each site's mean logits and sends every site the other sites' mean.

    The state holds them as ``logits/<site>/<class>``.
    """

    settings: FedDistillSettings
    kind = LOGITS

    def means_that_leave(self) -> list[str]:
        """Describe the logits, their smallest number of samples, and their recipients."""
        recipients = {1: "nobody gets them", 2: "the other site gets them as they are"}
        means = (
            f"each round: for each class that {self.enough()}, the mean "
            f"logits of those samples, {self.fewest()}; "
        )
        everybody = "each site gets the mean over the other sites that send the class"
        return [means + recipients.get(len(self.participants.sites()), everybody)]

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train on the others' mean logits, and store the logits that they send."""
        send: dict[str, Arrays] = {}
        expect: dict[str, Specs] = {}
        for site in ask.sites:
            send[site] = {**self._logits_for(site, state), **self.start(site, ask)}
            expect[site] = self.specs(site)
        replies = ask(TRAIN, send, expect=expect)
        arrays = dict(state.arrays)
        for site, reply in replies.items():
            for label in self.held(site):
                arrays[f"{LOGITS}{site}/{label}"] = reply.arrays[f"{LOGITS}{label}"]
        return replace(state, arrays=arrays)

    def _logits_for(self, site: str, state: State) -> Arrays:
        """Return the others' mean logits for each class that ``site`` sends itself."""
        mean_logits = {}
        for label in self.held(site):
            logits = []
            for other in self.participants.sites():
                name = f"{LOGITS}{other}/{label}"
                if other != site and name in state.arrays:
                    logits.append(state.arrays[name].astype(np.float64))
            if logits:
                mean_logits[f"{LOGITS}{label}"] = np.mean(logits, axis=0).astype(np.float32)
        return mean_logits

    @property
    def size(self) -> int:
        """The number of classes, because a mean consists of logits."""
        return self.task.classes
