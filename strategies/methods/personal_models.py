"""Which sites keep a model of their own, for methods that send the shared one until they do.

A site tells only that it keeps state. Where its optimiser goes on over the run that is true after
its first round, so the server counts those that answered while the models were trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.state import RoundState, SiteReply

_PERSONAL = "personal"


def keepers(state: RoundState, common: CommonSettings) -> Collection[str]:
    """Return the sites that have trained a model of their own and keep it."""
    if common.optimiser_state == "round":
        return state.stateful_sites
    kept: list[str] = state.extras.get(_PERSONAL, [])
    return kept


def with_keepers(
    state: RoundState, common: CommonSettings, replies: Mapping[str, SiteReply]
) -> RoundState:
    """Return ``state`` after a round in which the sites trained models that stay with them."""
    if common.optimiser_state == "round":
        return state
    told = {site for site, reply in replies.items() if reply.kept_state()}
    personal = sorted({*keepers(state, common), *told})
    return replace(state, extras={**state.extras, _PERSONAL: personal})
