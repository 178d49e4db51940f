"""What a method asks of sites: the question, and the ask that puts it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ConfigRecord

from fedsilo.models.contract.notes import Notes
from fedsilo.strategies.loop.replies import Replies
from fedsilo.strategies.wire.reply import Arrays, Check, Specs, shapes


@dataclass(frozen=True)
class Question:
    """What a phase sends to each site, and what must come back.

    Attributes:
        phase: the phase's name.
        send: the arrays by site; who is not in it is not asked.
        expect: the arrays of each site's reply.
        reference: by site, the arrays of which its reply is an update.
        notes: what else a site is told, by site.
        metrics: metrics without which a reply is of no use.
        fault: says why a reply of the right form cannot be used, if it cannot.
        records: for secure aggregation, what goes beside the instruction, by site.
    """

    phase: str
    send: Mapping[str, Arrays]
    expect: Mapping[str, Specs]
    reference: Mapping[str, Arrays] = field(default_factory=dict)
    notes: Mapping[str, Notes] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    fault: Check | None = None
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)


class Ask(ABC):
    """What a method is given to ask the sites of a round; a test passes one of its own.

    Attributes:
        sites: those that the round may ask, sorted.
        stateful_sites: those that keep private state of this run.
    """

    sites: Sequence[str]
    stateful_sites: Collection[str]

    def __call__(
        self,
        phase: str,
        send: Mapping[str, Arrays],
        *,
        expect: Mapping[str, Specs] | None = None,
        reference: Mapping[str, Arrays] | None = None,
        notes: Mapping[str, Notes] | Notes | None = None,
        metrics: Sequence[str] = (),
        fault: Check | None = None,
    ) -> Replies:
        """Ask sites and return the usable replies.

        Args:
            phase: a site's method answers it by the function of that name.
            send: the arrays for each site that is asked.
            expect: the arrays of each site's reply; None for those that it was sent, trained.
            reference: what each site's reply is an update of, by which it is measured; None for
                what it was sent, where ``expect`` is None, else nothing.
            notes: what else all sites, or each, are told.
            metrics: metrics without which a reply is of no use.
            fault: says why a reply of the right form cannot be used, if it cannot.

        Raises:
            SiteError: too few sites answered with something usable, or one takes no part.
        """
        if expect is None:
            reference = send if reference is None else reference
            expect = {site: shapes(arrays) for site, arrays in send.items()}
        each = dict.fromkeys(send, notes) if isinstance(notes, Notes) else notes or {}
        return self.put(Question(phase, send, expect, reference or {}, each, metrics, fault))

    @abstractmethod
    def put(self, question: Question) -> Replies:
        """Put a question to the sites that it names, see ``__call__``."""


class _Asked(Exception):
    """A question that is not sent."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.phase)
        self.question = question


class _FirstQuestion(Ask):
    """Sends nothing and ends with its first question."""

    def __init__(self, sites: Sequence[str], stateful_sites: Collection[str]) -> None:
        self.sites = sites
        self.stateful_sites = stateful_sites

    def put(self, question: Question) -> Replies:
        """End with the question."""
        raise _Asked(question)


def first_question(
    asks: Callable[[Ask], object], sites: Sequence[str], stateful_sites: Collection[str] = ()
) -> Question:
    """Return what a round or an evaluation of a method asks first; nothing is sent.

    Args:
        asks: calls ``Method.round`` or ``Method.evaluate`` with the ask that it is given.
        sites: those that may be asked.
        stateful_sites: those that keep private state of the run.
    """
    try:
        asks(_FirstQuestion(sites, stateful_sites))
    except _Asked as asked:
        return asked.question
    return Question("", {}, {})
