"""FedDistill (Seo et al. 2022, after Jeong et al. 2018): sites exchange mean logits, never weights.

Messages: ``train`` brings ``logits/<class>`` (classes,), the unweighted mean over all other sites
that send the class, none in round 1; the reply holds ``logits/<class>`` (classes,), the site's mean
over its training samples of that class, for each class that it has enough of
(``fedsilo.strategies.methods.fedproto.held``). ``evaluate`` brings nothing. Float32.

The server keeps each site's logits until that site sends newer ones: a site that does not answer a
round still counts for the others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.methods.feddistill import LOGITS, FedDistillSettings
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Disclosures, Method, State
from fedsilo.strategies.methods.fedproto import enough, fewest, held, nothing_leaves
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import ArraySpec


class FedDistill(Method):
    """Keeps each site's mean logits, ``logits/<site>/<class>``, and sends each the others' mean."""

    settings: FedDistillSettings
    title = "FedDistill"
    capabilities = Capabilities(initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Name the logits, of how few samples they are, and who gets them."""
        site_count, min_samples = len(self.participants.sites()), self.settings.class_min_count
        if not any(self._held(site) for site in self.participants.sites()):
            return Disclosures(nothing_leaves(self.participants, min_samples))
        recipients = {1: "nobody gets them", 2: "the other site gets them as they are"}
        means = (
            f"each round: for each class that {enough(self.participants, min_samples)}, the mean "
            f"logits of those samples, {fewest(self.participants, min_samples)}; "
        )
        everybody = "each site gets the mean over the other sites that send the class"
        return Disclosures(means + recipients.get(site_count, everybody))

    def initial_state(self, task: Task) -> State:
        """Return an empty state: there are no logits before round 1."""
        return State()

    def round(self, state: State, ask: Ask) -> State:
        """Have sites train on the others' mean logits, and keep the logits that they send."""
        spec = ArraySpec((self.participants.task().classes,))
        replies = ask(
            TRAIN,
            {s: {**self._logits_for(s, state), **self.start(s, ask)} for s in ask.sites},
            expect={s: {f"{LOGITS}{label}": spec for label in self._held(s)} for s in ask.sites},
        )
        newest = {
            f"{LOGITS}{site}/{label}": reply.arrays[f"{LOGITS}{label}"]
            for site, reply in replies.items()
            for label in self._held(site)
        }
        return replace(state, arrays={**state.arrays, **newest})

    def evaluate(self, state: State, ask: Ask) -> None:
        """Have the sites' own models measured."""
        ask(EVALUATE, {site: {} for site in ask.sites}, expect={})

    def _logits_for(self, site: str, state: State) -> dict[str, NDArray]:
        """Return the others' mean logits of each class that ``site`` sends."""
        mean_logits: dict[str, NDArray] = {}
        for label in self._held(site):
            names = [
                f"{LOGITS}{other}/{label}" for other in self.participants.sites() if other != site
            ]
            logits = [state.arrays[n].astype(np.float64) for n in names if n in state.arrays]
            if logits:
                mean_logits[f"{LOGITS}{label}"] = np.mean(logits, axis=0).astype(np.float32)
        return mean_logits

    def _held(self, site: str) -> dict[int, int]:
        return held(self.participants, site, self.settings.class_min_count)
