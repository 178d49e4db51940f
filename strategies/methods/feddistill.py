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
        replies = ask(
            TRAIN,
            {s: {**self._logits_for(s, state), **self.start(s, ask)} for s in ask.sites},
            expect={site: self.specs(site) for site in ask.sites},
        )
        newest = {
            f"{LOGITS}{site}/{label}": reply.arrays[f"{LOGITS}{label}"]
            for site, reply in replies.items()
            for label in self.held(site)
        }
        return replace(state, arrays={**state.arrays, **newest})

    def _logits_for(self, site: str, state: State) -> Arrays:
        """Return the others' mean logits for each class that ``site`` sends itself."""
        others = [other for other in self.participants.sites() if other != site]
        mean_logits = {}
        for label in self.held(site):
            names = [f"{LOGITS}{other}/{label}" for other in others]
            logits = [state.arrays[n].astype(np.float64) for n in names if n in state.arrays]
            if logits:
                mean_logits[f"{LOGITS}{label}"] = np.mean(logits, axis=0).astype(np.float32)
        return mean_logits

    @property
    def size(self) -> int:
        """The number of classes, because a mean consists of logits."""
        return self.task.classes
