"""Which sites keep a model of their own, for methods that send the shared one until they do.

A site says only that it keeps state. Where its optimiser continues over the run that is true after
its first round, so the server counts the sites that answered while personal models were trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedsilo.strategies.loop.method import Reply, State


@dataclass(frozen=True)
class PersonalState(State):
    """A state that remembers the sites with a ``personal`` model, sorted."""

    personal: Sequence[str] = ()

    def with_keepers(self, replies: Mapping[str, Reply]) -> PersonalState:
        """Return the state after a round in which sites trained models that stay with them."""
        keeping = {site for site, reply in replies.items() if reply.keeps_state()}
        return replace(self, personal=sorted({*self.personal, *keeping}))
