"""What a method asks of sites: the question, the ask that puts it, the replies and their mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import Notes
from fedsilo.models.contract.settings import AUTO, CommonSettings
from fedsilo.strategies.loop.robust import robust_mean
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Check, Reply, Specs, shapes


class TooFewSitesError(SiteError):
    """Fewer sites than 'min-sites' gave a usable answer."""

    def __init__(self, text: str, reasons: str, codes: Collection[str] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons  # which site failed in what way, without what to do about it
        # The codes (``models.contract.errors``) of what the failed sites answered
        self.codes = frozenset(codes)


class Replies(dict[str, Reply]):
    """Replies by site, sorted."""

    def __init__(
        self,
        replies: Mapping[str, Reply],
        sums: Mapping[str, NDArray] | None = None,
        means: Mapping[str, float] | None = None,
        failed: int = 0,
    ) -> None:
        super().__init__(sorted(replies.items()))
        # Where weights were summed in secret, their mean by samples; the replies have none
        self.sums = sums
        # Where measurements were summed in secret, the mean of each; the replies have none
        self.means = means or {}
        # How many of these sites added 0 to the secret sum because they could not answer
        self.failed = failed

    def of(self, sites: Iterable[str]) -> Replies:
        """Return the replies of ``sites``, as far as there are some."""
        wanted = set(sites)
        chosen = {site: reply for site, reply in self.items() if site in wanted}
        return Replies(chosen, self.sums, self.means, self.failed)

    def mean_metric(self, name: str) -> float:
        """Return the mean by samples of a metric that all replies have, or of its secret sum."""
        if name in self.means:
            return self.means[name]
        examples = sum(reply.examples for reply in self.values())
        return sum(reply.examples * reply.metrics[name] for reply in self.values()) / examples

    def average(
        self, common: CommonSettings, before: Arrays, equal: bool = False
    ) -> dict[str, NDArray]:
        """Return the arrays named in ``before``, which sites began with, combined; float32.

        By 'aggregation': the mean weighted by samples, with ``equal`` each site weighing the same,
        or one that a few sites cannot turn.

        Raises:
            SiteError: too few sites have answered for 'aggregation'.
        """
        if self.sums is not None:
            return {name: self.sums[name] for name in sorted(before)}
        if not self:
            return dict(before)  # nobody has moved them
        if common.aggregation in (AUTO, "mean"):
            return weighted_mean(self, before, equal)
        return robust_mean(common, self, before, equal)


def weighted_mean(
    replies: Mapping[str, Reply], names: Iterable[str], equal: bool = False
) -> dict[str, NDArray]:
    """Return the weighted mean of the arrays ``names``, float32, of float64 sums in site order.

    Operation by operation it is Flower's ``aggregate_arrayrecords``: the same replies give the same
    bits in whatever order they came. An array is summed over the sites before the next is read, so
    that memory never has more than the mean and one array of one site.
    """
    ordered = [reply for _, reply in sorted(replies.items())]
    weights = [1 if equal else reply.examples for reply in ordered]
    mean: dict[str, NDArray] = {}
    for name in sorted(names):
        total: Any = None
        for reply, weight in zip(ordered, weights, strict=True):
            part = reply.arrays[name].astype(np.float64) * (weight / sum(weights))
            total = part if total is None else total + part
        mean[name] = np.asarray(total).astype(np.float32)
    return mean


@dataclass(frozen=True)
class Question:
    """What a phase sends to each site, and what must come back; ``Ask.__call__`` has the rest."""

    phase: str
    send: Mapping[str, Arrays]  # the arrays by site; who is not in it is not asked
    expect: Mapping[str, Specs]
    reference: Mapping[str, Arrays] = field(default_factory=dict)
    notes: Mapping[str, Notes] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    fault: Check | None = None
    # For secure aggregation, what is sent with the instruction, by site
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)


class Ask(ABC):
    """What a method is given to ask the sites of a round; a test passes one of its own."""

    sites: Sequence[str]  # those that the round may ask, sorted
    stateful_sites: Collection[str]  # those that keep private state of this run

    def __call__(
        self,
        phase: str,
        send: Mapping[str, Arrays],
        *,
        expect: Mapping[str, Mapping[str, NDArray | ArraySpec]] | None = None,
        reference: Mapping[str, Arrays] | None = None,
        notes: Mapping[str, Notes] | Notes | None = None,
        metrics: Sequence[str] = (),
        fault: Check | None = None,
    ) -> Replies:
        """Ask sites and return the usable replies.

        Args:
            phase: a site's method answers it by the function of that name.
            send: the arrays for each site that is asked.
            expect: the arrays of each site's reply, or others of their shapes; None for those of
                ``reference``.
            reference: what each site's reply is an update of, by which it is measured; None for
                what it was sent, or for nothing where ``expect`` says what comes.
            notes: what else is sent to all sites, or to each.
            metrics: metrics that a reply must have.
            fault: says why a reply of the right form cannot be used, if it cannot.

        Raises:
            SiteError: too few sites answered with something usable, or one takes no part.
        """
        if reference is None:
            reference = send if expect is None else {}
        wanted = reference if expect is None else expect
        spec = {id(arrays): shapes(arrays) for arrays in wanted.values()}  # many sites share one
        specs = {site: spec[id(arrays)] for site, arrays in wanted.items()}
        each = dict.fromkeys(send, notes) if isinstance(notes, Notes) else notes or {}
        if not all(isinstance(own, Notes) for own in each.values()):
            raise TypeError(f"{phase}: 'notes' is no Notes, nor one by site: derive a class of it")
        return self.put(Question(phase, send, specs, reference, each, metrics, fault))

    @abstractmethod
    def put(self, question: Question) -> Replies:
        """Put a question to the sites that it names, see ``__call__``."""


class _Asked(Exception):
    """Its only argument is a question that is not sent."""


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
        question: Question = asked.args[0]
        return question
    return Question("", {}, {})
