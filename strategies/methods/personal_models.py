"""The sites with a personal model, for methods that send the shared model until then.

A site reports only that it keeps state. If its optimiser continues over the run, this is true after
the first round already. So the server notes the sites that replied while personal models were
trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedsilo.strategies.loop.method import Reply, State


@dataclass(frozen=True)
class PersonalState(State):
    """A state that remembers the names of the sites with a personal model, sorted."""

    personal: Sequence[str] = ()

    def with_keepers(self, replies: Mapping[str, Reply]) -> PersonalState:
        """Return the state after a round in which sites trained models that stay with them."""
        personal = set(self.personal)
        for site, reply in replies.items():
            if reply.keeps_state:
                personal.add(site)
        return replace(self, personal=sorted(personal))
