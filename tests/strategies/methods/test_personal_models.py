"""Who has a model of its own: by what it keeps, or, where optimisers go on, by when it kept it."""

from __future__ import annotations

from typing import Any, cast

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.state import RoundState, SiteReply
from fedsilo.strategies.methods.personal_models import keepers, with_keepers

ROUND, RUN = CommonSettings(), CommonSettings(optimiser_state="run")


class _Reply:
    def __init__(self, kept: bool) -> None:
        self.kept = kept

    def kept_state(self) -> bool:
        return self.kept


def _replies(**kept: bool) -> dict[str, SiteReply]:
    return {site: cast(SiteReply, _Reply(value)) for site, value in kept.items()}


def _state(**extras: Any) -> RoundState:
    return RoundState(2, {}, extras, stateful_sites=("a", "b", "c"))


def test_a_site_that_keeps_anything_has_a_model_where_optimisers_begin_afresh() -> None:
    state = _state(other=1)
    assert keepers(state, ROUND) == ("a", "b", "c")
    assert with_keepers(state, ROUND, _replies(a=True)) is state


def test_where_optimisers_go_on_only_who_kept_while_models_were_trained_has_one() -> None:
    state = _state(other=1)
    assert list(keepers(state, RUN)) == [], "all keep their optimisers' moments"
    state = with_keepers(state, RUN, _replies(c=True, a=True, b=False))
    assert list(keepers(state, RUN)) == ["a", "c"], "b's reply told of nothing kept"
    assert state.extras["other"] == 1
    state = with_keepers(state, RUN, _replies(b=True))
    assert list(keepers(state, RUN)) == ["a", "b", "c"]
