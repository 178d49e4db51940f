"""Which sites keep a model of their own, for methods that send the shared one until they do.

A site says only that it keeps state. Where its optimiser goes on over the run that is true after
its first round, so the server counts the sites that answered while personal models were trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.method import Reply, State


@dataclass(frozen=True)
class PersonalState(State):
    """A state that remembers the sites with a ``personal`` model, where optimisers go on."""

    personal: Sequence[str] = ()


def keepers(state: PersonalState, common: CommonSettings) -> Collection[str]:
    """Return the sites that have trained a model of their own and keep it."""
    return state.stateful_sites if common.optimiser_state == "round" else state.personal


def with_keepers(
    state: PersonalState, common: CommonSettings, replies: Mapping[str, Reply]
) -> PersonalState:
    """Return ``state`` after a round in which the sites trained models that stay with them."""
    if common.optimiser_state == "round":
        return state
    keeping = {site for site, reply in replies.items() if reply.keeps_state()}
    return replace(state, personal=sorted({*state.personal, *keeping}))
