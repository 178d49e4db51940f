"""An ask whose replies a test gives: a method's rounds without a grid and without messages."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.core.messages import (
    EVALUATE,
    KEPT_STATE,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    TRAIN,
)
from fedsilo.strategies.loop.ask import Ask, Question, Replies
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.wire.reply import Arrays, Reply, Specs

Given = Mapping[str, Mapping[str, Reply]]


class NoReplies(Exception):
    """The method asked for a phase to which the test gives no replies."""


class ScriptedAsk(Ask):
    """Answers each phase with the replies that are given for it, and keeps what was asked.

    Attributes:
        asked: the questions by phase.
    """

    def __init__(
        self, sites: Iterable[str], given: Given | None = None, stateful_sites: Sequence[str] = ()
    ) -> None:
        self.sites = sorted(sites)
        self.given = dict(given or {})
        self.stateful_sites = stateful_sites
        self.asked: dict[str, Question] = {}
        self.replies: dict[str, Replies] = {}

    def put(self, question: Question) -> Replies:
        phase = question.phase
        self.asked[phase] = question
        if phase not in self.given:
            raise NoReplies(phase)
        given = sorted(self.given[phase].items())
        self.replies[phase] = Replies({site: r for site, r in given if site in question.send})
        return self.replies[phase]


def make_reply(site: str, arrays: Mapping[str, Any] | None = None, **metrics: Any) -> Reply:
    """Return a usable reply; None leaves a metric out, underscores are dashes."""
    given = {key.replace("_", "-"): value for key, value in metrics.items()}
    told = {NUM_EXAMPLES: 36, SECONDS: 0.5, PEAK_MEMORY: 1000} | given
    kept = {key: float(value) for key, value in told.items() if value is not None}
    unpacked = {name: np.asarray(array) for name, array in (arrays or {}).items()}
    keeps = kept.get(KEPT_STATE, 0) == 1
    return Reply(site, unpacked, kept, int(kept.get(NUM_EXAMPLES, 1)), keeps_state=keeps)


def ask_of(method: Method, state: Any, given: Given | None = None) -> ScriptedAsk:
    """Return the ask of a round of ``method``, run as far as replies are given."""
    ask = ScriptedAsk(method.participants.sites(), given, state.stateful_sites)
    with contextlib.suppress(NoReplies):
        method.round(state, ask)
    return ask


def state_after(
    method: Method, state: Any, replies: Mapping[str, Reply], phase: str = TRAIN
) -> Any:
    """Return the state after a round of one phase, to which sites answered with ``replies``."""
    ask = ScriptedAsk(method.participants.sites(), {phase: replies}, state.stateful_sites)
    return method.round(state, ask)


def question_of(
    method: Method, state: Any, phase: str = TRAIN, given: Given | None = None
) -> Question:
    """Return what the round after ``state`` asks in ``phase``; ``given`` answers phases before."""
    if phase == EVALUATE:
        return evaluation_of(method, state)
    return ask_of(method, state, given).asked[phase]


def arrays_sent(method: Method, state: Any, phase: str = TRAIN) -> Mapping[str, Arrays]:
    """Return the arrays that each site is sent in the round after ``state``."""
    return question_of(method, state, phase).send


def arrays_expected(method: Method, state: Any, phase: str = TRAIN) -> dict[str, Specs]:
    """Return the arrays that each site must answer with."""
    asked = question_of(method, state, phase)
    return {site: asked.expect.get(site, {}) for site in asked.send}


def fault_of(method: Method, state: Any, reply: Reply, phase: str = TRAIN) -> str | None:
    """Return why the method cannot use a reply."""
    check = question_of(method, state, phase).fault
    return check(reply) if check else None


def evaluation_of(method: Method, state: Any) -> Question:
    """Return what the final evaluation asks."""
    ask = ScriptedAsk(method.participants.sites(), {EVALUATE: {}}, state.stateful_sites)
    method.evaluate(state, ask)
    return ask.asked[EVALUATE]
