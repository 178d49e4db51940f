"""Who has a model of its own: whoever kept something while models were trained."""

from fedsilo.strategies.methods.personal_models import PersonalState
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import make_reply


def _replies(**kept: bool) -> dict[str, Reply]:
    return {site: make_reply(site, kept_state=int(value)) for site, value in kept.items()}


def test_only_who_kept_something_while_models_were_trained_has_one() -> None:
    state = PersonalState({}, 2, dict.fromkeys("abc", 1))
    assert state.personal == (), "all keep their optimisers' moments"
    state = state.with_keepers(_replies(c=True, a=True, b=False))
    assert state.personal == ["a", "c"], "b's reply told of nothing kept"
    state = state.with_keepers(_replies(b=True))
    assert state.personal == ["a", "b", "c"]
