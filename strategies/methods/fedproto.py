"""FedProto (Tan et al. 2022): sites exchange class prototypes, never weights.

Messages: ``train`` brings ``prototype/<class>`` (d,) of every class that has a global prototype,
none in round 1; the reply holds ``prototype/<class>`` (d,) of each class that the site has enough
training samples of (``held``). ``evaluate`` brings them only where they classify (``inference``). A
site that sends none is sent none. Float32, d the tokens times the channels of the network.

A global prototype is the mean of those that came in the last round, by the sites' counts of the
class (eq. 6, without its further division by the number of sites, by which prototypes would shrink
as sites join). A class that nobody sent keeps the prototype that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.maths.class_means import large_classes
from fedsilo.models.methods.fedproto import PROTOTYPE, FedProtoSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task, network_kind
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Disclosures, Method, State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply


class FedProto(Method):
    """Keeps the global prototypes."""

    settings: FedProtoSettings
    title = "FedProto"
    capabilities = Capabilities(initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Name the prototypes, and of how few samples one is."""
        min_samples = self.settings.class_min_count
        if not any(self._held(site) for site in self.participants.sites()):
            return Disclosures(nothing_leaves(self.participants, min_samples))
        sentences = [
            f"each round: for each class that {enough(self.participants, min_samples)}, the mean "
            f"embedding of those samples, {fewest(self.participants, min_samples)}; the mean over "
            "sites goes to all sites that send one, and where one site alone sends a class that is "
            "this site's own"
        ]
        if network_kind(self.common, self.participants.task()) == "logistic":
            sentences.append(
                "of network 'logistic' an embedding is the row itself: what leaves is the exact "
                "mean of each such class's standardised rows; unless 'standardise' is 'declared' "
                "the mean of the site's other rows follows from it, however few they are"
            )
        return Disclosures(*sentences)

    def initial_state(self, task: Task) -> State:
        """Return an empty state: there are no prototypes before round 1."""
        return State()

    def round(self, state: State, ask: Ask) -> State:
        """Have sites train near the global prototypes, and average those that they send (eq. 6)."""
        sites = ask.sites
        expected = {site: self._specs(site) for site in sites}
        known = {s: {n: state.arrays[n] for n in expected[s] if n in state.arrays} for s in sites}
        replies = ask(
            TRAIN,
            {
                site: {**self._prototypes_for(site, state), **self.start(site, ask)}
                for site in sites
            },
            expect=expected,
            reference=known,
        )
        arrays = dict(state.arrays)
        for label in range(self.participants.task().classes):
            counts = {site: self._weight(site, label) for site in replies}
            if sum(counts.values()):
                arrays[f"{PROTOTYPE}{label}"] = _mean(f"{PROTOTYPE}{label}", replies, counts)
        replies.became.after |= arrays
        return replace(state, arrays=arrays)

    def evaluate(self, state: State, ask: Ask) -> None:
        """Have the sites' models measured, by the prototypes where these classify."""
        by_head = self.settings.inference == "head"
        send = {s: {} if by_head else self._prototypes_for(s, state) for s in ask.sites}
        ask(EVALUATE, send, expect={})

    def _prototypes_for(self, site: str, state: State) -> Arrays:
        """Return the global prototypes; a site that can send none is ``local`` and gets none."""
        return state.arrays if self._held(site) else {}

    def _specs(self, site: str) -> dict[str, ArraySpec]:
        return {f"{PROTOTYPE}{label}": ArraySpec((self._size,)) for label in self._held(site)}

    def _weight(self, site: str, label: int) -> float:
        """Return what a site's prototype weighs: its count, in the measure that was agreed."""
        count, agreed = self._held(site).get(label, 0), self.participants.agreed()
        if site not in agreed:
            return count
        return count * agreed[site] / self.participants.facts[site].sizes()["train"]

    def _held(self, site: str) -> dict[int, int]:
        return held(self.participants, site, self.settings.class_min_count)

    @cached_property
    def _size(self) -> int:
        with torch.device("meta"):  # only the size is wanted, no weight
            network = build_classifier(self.common, self.participants.task())
        return network.tokens * network.channels


def held(participants: Participants, site: str, min_samples: int) -> dict[int, int]:
    """Return the classes whose means ``site`` sends, with their counts of training samples.

    ``min_samples`` is the run's 'class-min-count'; the site's own floor may be higher.
    """
    facts = participants.facts[site]
    return large_classes(facts.label_counts["train"], max(min_samples, facts.floor))


def enough(participants: Participants, min_samples: int) -> str:
    """Say how many training samples of a class a site must have to send its mean."""
    floors = {
        site: max(min_samples, participants.facts[site].floor) for site in participants.sites()
    }
    lowest = min(floors.values())
    higher = [f"site {site} {floor}" for site, floor in floors.items() if floor > lowest]
    return f"the site has at least {lowest} training samples of" + (
        f" ({', '.join(higher)})" if higher else ""
    )


def nothing_leaves(participants: Participants, min_samples: int) -> str:
    """Say that no site sends a class mean, and why."""
    condition = enough(participants, min_samples)
    return f"each round: no class mean, since there is no class that {condition}"


def fewest(participants: Participants, min_samples: int) -> str:
    """Say of how few training samples a class's mean is at some site; one must send some."""
    count, site, label = min(
        (count, site, label)
        for site in participants.sites()
        for label, count in held(participants, site, min_samples).items()
    )
    if count == 1:
        return f"which at site {site}, class {label}, is that of one single sample"
    return f"of as few as {count} (site {site}, class {label})"


def _mean(name: str, replies: Mapping[str, Reply], counts: Mapping[str, float]) -> NDArray:
    """Return the mean of array ``name``, float32, of float64 sums in site order."""
    sites = [site for site in sorted(replies) if counts[site]]
    arrays = np.stack([replies[site].arrays[name].astype(np.float64) for site in sites])
    weights = [counts[site] for site in sites]
    mean: NDArray = np.average(arrays, axis=0, weights=weights)
    return mean.astype(np.float32)
