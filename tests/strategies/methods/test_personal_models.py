"""Who has a model of its own: by what it keeps, or, where optimisers go on, by when it kept it."""

from __future__ import annotations

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.methods.personal_models import PersonalState, keepers, with_keepers
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import make_reply

ROUND, RUN = CommonSettings(), CommonSettings(optimiser_state="run")


def _replies(**kept: bool) -> dict[str, Reply]:
    return {site: make_reply(site, kept_state=int(value)) for site, value in kept.items()}


STATE = PersonalState({}, 2, ("a", "b", "c"))


def test_a_site_that_keeps_anything_has_a_model_where_optimisers_begin_afresh() -> None:
    state = STATE
    assert keepers(state, ROUND) == ("a", "b", "c")
    assert with_keepers(state, ROUND, _replies(a=True)) is state


def test_where_optimisers_go_on_only_who_kept_while_models_were_trained_has_one() -> None:
    state = STATE
    assert list(keepers(state, RUN)) == [], "all keep their optimisers' moments"
    state = with_keepers(state, RUN, _replies(c=True, a=True, b=False))
    assert list(keepers(state, RUN)) == ["a", "c"], "b's reply told of nothing kept"
    state = with_keepers(state, RUN, _replies(b=True))
    assert list(keepers(state, RUN)) == ["a", "b", "c"]
