"""What a phase asks for, and when too few have answered it."""

from collections.abc import Iterable

import pytest

from fedsilo.models.contract.errors import EpsilonSpentError, RefusedError, SiteError
from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.server_app.run.inline_engine import InlineGrid
from fedsilo.strategies.loop.ask import Question, TooFewSitesError
from fedsilo.strategies.loop.asking import GridAsk, Session, _Exchange
from fedsilo.strategies.loop.hooks import Hooks
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Spill


def exchanging(
    participants: Participants, phase: str, sites: Iterable[str] = (), evaluate_every: int = 1
) -> _Exchange:
    """Return a question of round 4 to ``sites`` that was not sent yet."""
    common = CommonSettings(evaluate_every=evaluate_every)
    grid = InlineGrid(lambda message, context: message, {}, [])  # type: ignore[arg-type]
    ask = GridAsk(Session(grid, common, participants, Hooks([])), 4, participants.sites(), Spill())
    return _Exchange(ask, Question(phase, {site: {} for site in sites}, {}))


ON_VAL = [f"incoming.val.{metric}" for metric in ("accuracy", "entropy", "loss")]
ON_TEST = [f"incoming.test.{metric}" for metric in ("accuracy", "entropy", "loss")]
LOSS = "trained.train.loss"


@pytest.mark.parametrize(
    ("phase", "measures", "held", "needed"),
    [
        (TRAIN, True, ["train", "val", "test"], [LOSS, *ON_VAL, *ON_TEST]),
        (TRAIN, True, ["train", "test"], [LOSS, *ON_TEST]),
        (TRAIN, True, ["train"], [LOSS]),
        (TRAIN, False, ["train", "val", "test"], [LOSS]),
        (EVALUATE, False, ["train", "val", "test"], [*ON_VAL, *ON_TEST]),
        (EVALUATE, True, ["train", "val"], ON_VAL),
        (EVALUATE, True, ["train"], []),
        ("centroids", True, ["train", "val", "test"], []),
    ],
)
def test_a_reply_owes_what_its_phase_measures_on_what_the_site_holds(
    participants: Participants, phase: str, measures: bool, held: list[str], needed: list[str]
) -> None:
    exchange = exchanging(participants, phase, evaluate_every=int(measures))
    assert list(exchange._needed_metrics(held)) == needed


@pytest.mark.parametrize(("answered", "failed", "min_sites"), [(3, 0, 0), (2, 1, 2), (1, 0, 3)])
def test_enough_answers_are_enough(
    participants: Participants, answered: int, failed: int, min_sites: int
) -> None:
    sites = [f"s{n}" for n in range(answered + failed)]
    exchanging(participants, TRAIN, sites)._refuse_too_few(answered, min_sites)


@pytest.mark.parametrize(("min_sites", "least"), [(0, 4), (3, 3), (9, 4)])
def test_too_few_answers_are_refused_with_each_reason_once(
    participants: Participants, min_sites: int, least: int
) -> None:
    exchange = exchanging(participants, TRAIN, "abcd")
    exchange.failed = {"a": "gone", "b": "full", "c": "gone"}
    message = (
        "^site a, site c, round 4, phase train: gone; site b, round 4, phase train: full -- "
        rf"1 of 4 sites answered and {least} are needed \('run.min-sites'\)"
    )
    with pytest.raises(TooFewSitesError, match=message):
        exchange._refuse_too_few(1, min_sites)


def test_at_the_end_of_a_run_a_site_whose_epsilon_is_spent_owes_no_measurements(
    participants: Participants,
) -> None:
    def exchange(phase: str) -> _Exchange:
        asked = exchanging(participants, phase, "abc")
        asked.codes = {"a": EpsilonSpentError.code, "b": RefusedError.code}
        asked.failed = {"a": "epsilon is spent"}
        return asked

    exchange(EVALUATE)._refuse_too_few(2, 0)
    with pytest.raises(SiteError, match="3 are needed"):
        exchange(TRAIN)._refuse_too_few(2, 0)
    with pytest.raises(SiteError, match="2 are needed"):
        exchange(EVALUATE)._refuse_too_few(1, 0)


def test_ask_for_a_site_that_takes_no_part_is_refused_in_one_line(
    participants: Participants,
) -> None:
    ask = exchanging(participants, TRAIN).ask
    with pytest.raises(SiteError) as caught:
        ask(TRAIN, {"s1a": {}, "nowhere": {}})
    assert str(caught.value) == (
        "round 4, phase train: the method asks nowhere, which takes no part; the sites are s1a, "
        "s2a, s3a"
    )


def test_ask_of_nobody_sends_nothing(participants: Participants) -> None:
    assert exchanging(participants, TRAIN).ask(TRAIN, {}) == {}
