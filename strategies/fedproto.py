"""FedProto (Tan et al. 2022): sites exchange class prototypes, never weights.

Messages: ``train`` brings ``prototype/<class>`` (d,) of every class that has a global prototype,
none in round 1; the reply holds ``prototype/<class>`` (d,) of each class that the site has training
samples of. ``evaluate`` brings them only where they classify (``inference``). Float32, d the tokens
times the channels of the network.

A global prototype is the mean of those that came in the last round, by the sites' counts of the
class (eq. 6, without its further division by the number of sites, by which prototypes would shrink
as sites join). A class that nobody sent keeps the prototype that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from models.contract import EVALUATE
from models.fedproto import PROTOTYPE, FedProtoSettings
from models.networks import Task, build_classifier, network_kind
from strategies.account import Published
from strategies.base import FederatedStrategy
from strategies.dermoscopy import dermoscopy
from strategies.roster import Roster
from strategies.state import ArraySpec, NDArray, RoundState, SiteReply


class FedProto(FederatedStrategy):
    """Keeps the global prototypes."""

    settings_class = FedProtoSettings
    settings: FedProtoSettings
    title = "FedProto"

    def leaves(self) -> list[str]:
        """Name the prototypes, and of how few samples one is."""
        found = [
            "each round: for each class that the site has training samples of, the mean embedding "
            f"of those samples, {fewest(self.roster)}; the mean over sites goes to all sites, and "
            "where one site alone has a class that is this site's own"
        ]
        if network_kind(self.common, self.roster.task()) == "logistic":
            found.append(
                "of network 'logistic' an embedding is the row itself: what leaves is the exact "
                "mean of each class's standardised rows"
            )
        return found

    def published(self) -> Published:
        """Return FedEvPrompt's table 1."""
        return dermoscopy("FedProto", self.common, self.roster)

    def initial_state(self, task: Task) -> RoundState:
        """Return an empty state: there are no prototypes before round 1."""
        return RoundState(0, {})

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the global prototypes; to measure with heads nothing is needed."""
        by_head = self.settings.inference == "head"
        return {} if phase == EVALUATE and by_head else state.arrays

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect a prototype of each class that the site has."""
        return {f"{PROTOTYPE}{n}": ArraySpec((self._size,)) for n in held(self.roster, site)}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the mean prototypes, by the sites' counts of the class."""
        arrays = dict(state.arrays)
        for label in range(self.roster.task().classes):
            counts = {site: held(self.roster, site).get(label, 0) for site in replies}
            if sum(counts.values()):
                arrays[f"{PROTOTYPE}{label}"] = _mean(f"{PROTOTYPE}{label}", replies, counts)
        return RoundState(state.round, arrays, state.extras)

    @cached_property
    def _size(self) -> int:
        with torch.device("meta"):  # only the size is wanted, no weight
            network = build_classifier(self.common, self.roster.task())
        return network.tokens * network.channels


def held(roster: Roster, site: str) -> dict[int, int]:
    """Return the classes that ``site`` has training samples of, with their counts."""
    counts = roster.facts[site].label_counts["train"]
    return {label: count for label, count in enumerate(counts) if count}


def fewest(roster: Roster) -> str:
    """Say of how few training samples a class's mean is at some site."""
    count, site, label = min(
        (count, site, label)
        for site in roster.sites()
        for label, count in held(roster, site).items()
    )
    if count == 1:
        return f"which at site {site}, class {label}, is that of one single sample"
    return f"of as few as {count} (site {site}, class {label})"


def _mean(name: str, replies: Mapping[str, SiteReply], counts: Mapping[str, int]) -> NDArray:
    """Return the mean of array ``name``, float32, of float64 sums in site order."""
    sites = [site for site in sorted(replies) if counts[site]]
    arrays = np.stack([replies[site].array(name).astype(np.float64) for site in sites])
    weights = [counts[site] for site in sites]
    mean: NDArray = np.average(arrays, axis=0, weights=weights)
    return mean.astype(np.float32)
