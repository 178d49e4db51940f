"""What a phase asks for, and when too few have answered it."""

from collections.abc import Iterable

import pytest

from fedsilo.core.errors import EpsilonSpentError, RefusedError, SiteError
from fedsilo.core.messages import EVALUATE, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.engines.inline_engine import InlineGrid
from fedsilo.strategies.loop.ask import Question, TooFewSitesError
from fedsilo.strategies.loop.hooks import Hooks
from fedsilo.strategies.loop.round import Round
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg


def round_4(participants: Participants, **settings: int) -> Round:
    """Return a round of FedAvg in which nothing was asked yet."""
    method = FedAvg(CommonSettings(**settings), NoSettings(), participants)  # type: ignore[arg-type]
    grid = InlineGrid(lambda message, context: message, {}, [])  # type: ignore[arg-type]
    return Round(4, participants.sites(), {}, method, Hooks([]), grid)


def question(phase: str, sites: Iterable[str]) -> Question:
    """Return a question of ``phase`` to ``sites`` without arrays."""
    return Question(phase, {site: {} for site in sites}, {})


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
    asked = round_4(participants, evaluate_every=int(measures))
    asked(phase, {})
    assert list(asked._needed_metrics(phase, held)) == needed


@pytest.mark.parametrize(("answered", "failed", "min_sites"), [(3, 0, 0), (2, 1, 2), (1, 0, 3)])
def test_enough_answers_are_enough(
    participants: Participants, answered: int, failed: int, min_sites: int
) -> None:
    sites = [f"s{n}" for n in range(answered + failed)]
    asked = round_4(participants, min_sites=min_sites)
    asked._refuse_too_few(question(TRAIN, sites), answered)


@pytest.mark.parametrize(("min_sites", "least"), [(0, 4), (3, 3), (9, 4)])
def test_too_few_answers_are_refused_with_each_reason_once(
    participants: Participants, min_sites: int, least: int
) -> None:
    asked = round_4(participants, min_sites=min_sites)
    asked.failed = {"a": "gone", "b": "full", "c": "gone"}
    message = (
        "^site a, site c, round 4, phase train: gone; site b, round 4, phase train: full -- "
        rf"1 of 4 sites answered and {least} are needed \('run.min-sites'\)"
    )
    with pytest.raises(TooFewSitesError, match=message):
        asked._refuse_too_few(question(TRAIN, "abcd"), 1)


def test_at_the_end_of_a_run_a_site_whose_epsilon_is_spent_owes_no_measurements(
    participants: Participants,
) -> None:
    asked = round_4(participants)
    asked.codes = {"a": EpsilonSpentError.code, "b": RefusedError.code}
    asked.failed = {"a": "epsilon is spent"}
    asked._refuse_too_few(question(EVALUATE, "abc"), 2)
    with pytest.raises(SiteError, match="3 are needed"):
        asked._refuse_too_few(question(TRAIN, "abc"), 2)
    with pytest.raises(SiteError, match="2 are needed"):
        asked._refuse_too_few(question(EVALUATE, "abc"), 1)


def test_ask_for_a_site_that_takes_no_part_is_refused_in_one_line(
    participants: Participants,
) -> None:
    ask = round_4(participants)
    with pytest.raises(SiteError) as caught:
        ask(TRAIN, {"s1a": {}, "nowhere": {}})
    assert str(caught.value) == (
        "round 4, phase train: the method asks nowhere, which does not take part; the sites are "
        "s1a, "
        "s2a, s3a"
    )


def test_ask_of_nobody_sends_nothing(participants: Participants) -> None:
    assert round_4(participants)(TRAIN, {}) == {}
