"""How a method asks sites: ``Ask`` sends a ``Question`` and returns the ``Replies``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import NUM_EXAMPLES, Notes
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Check, Reply, Specs


class TooFewSitesError(SiteError):
    """Fewer sites than 'run.min-sites' gave a usable reply."""

    def __init__(self, text: str, reasons: str, codes: Collection[str] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons  # names each failed site and its failure, without advice
        # The error codes (``fedsilo.core.errors``) that the failed sites answered with
        self.codes = frozenset(codes)


@dataclass(frozen=True)
class ExactSum:
    """The sites' mean update from a secret sum, before it is rounded to float32.

    Attributes:
        samples: the sum of the numbers of samples that the sites count for.
        mean: the mean update of each array, float64, weighted by samples.
    """

    samples: int
    mean: Mapping[str, NDArray]


class Replies(dict[str, Reply]):
    """The usable replies to one question: site name -> reply, sorted by name."""

    # After a secure sum only the mean over sites is known: the replies hold no arrays
    sums: Mapping[str, NDArray] | None = None
    # The same sum in float64; None if nothing was summed in secret
    exact: ExactSum | None = None
    # The same holds for metrics that were summed in secret
    means: Mapping[str, float] = MappingProxyType({})
    # The number of sites that added 0 to the secret sum because they could not answer
    failed: int = 0

    def of(self, sites: Iterable[str]) -> Replies:
        """Return the replies of the given sites, in their present order.

        A site without a reply is skipped. If secure aggregation has summed the replies, the results
        ``sums``, ``exact``, ``means`` and ``failed`` are copied unchanged. They still cover all
        summed sites, because the server cannot take a single site out of a sum.
        """
        wanted = set(sites)
        chosen = Replies()
        for site, reply in self.items():
            if site in wanted:
                chosen[site] = reply
        chosen.sums, chosen.means, chosen.failed = self.sums, self.means, self.failed
        chosen.exact = self.exact
        return chosen

    def mean_metric(self, name: str) -> float:
        """Return the mean of a metric over the replies, weighted by each site's training samples.

        If secure aggregation has summed the metric, its mean over all summed sites (``means``) is
        returned. It is also weighted by samples.

        Raises:
            KeyError: a reply does not have the metric.
            ZeroDivisionError: there are no replies, or none has samples.
        """
        if name in self.means:
            return self.means[name]
        examples, total = 0, 0.0
        for reply in self.values():
            examples += reply.examples
            total += reply.examples * reply.metrics[name]
        return total / examples


def weighted_mean(
    replies: Mapping[str, Reply], names: Iterable[str], equal: bool = False
) -> dict[str, NDArray]:
    """Return the mean of each named array over all replies, as float32.

    Each site's weight is its number of training samples. The mean is computed in float64, and sites
    are added in the order of their names. The order in which replies arrived therefore does not
    change the result.

    Args:
        replies: the replies by site, at least one. Each must have all the named arrays. If
            ``equal`` is False, their samples must not all be 0.
        names: the names of the arrays to average. Other arrays are ignored.
        equal: whether all sites have the same weight.
    """
    sites = sorted(replies)
    weights = [replies[site].examples for site in sites]
    if equal:
        weights = [1] * len(sites)
    whole = sum(weights)
    mean: dict[str, NDArray] = {}
    # One array at a time, because the replies may lie in a file
    for name in sorted(names):
        total: Any = None
        for site, weight in zip(sites, weights, strict=True):
            # float64, because the rounding errors of many float32 summands would add up
            part = replies[site].arrays[name].astype(np.float64) * (weight / whole)
            total = part if total is None else total + part
        mean[name] = np.asarray(total).astype(np.float32)
    return mean


def weighted_sums(
    replies: Replies, names: Iterable[str]
) -> tuple[float, dict[str, npt.NDArray[np.float64]]]:
    """Return the sites' total number of samples, and the weighted sum of each array in float64.

    Each site's weight is the number of training samples that it reports. Numbers from the file
    'run.site-weights' are not used. If secure aggregation has summed the arrays, the results come
    from its sum (``replies.exact``) and not from single replies.

    Args:
        replies: the replies, at least one. Unless ``replies.exact`` is set, each must have the
            named arrays.
        names: the names of the arrays to sum.
    """
    if replies.exact is not None:
        exact = replies.exact
        return exact.samples, {name: exact.samples * exact.mean[name] for name in names}
    samples = 0.0
    sums: dict[str, Any] = dict.fromkeys(names, 0.0)
    for site in sorted(replies):
        reply = replies[site]
        # Not 'examples', which 'run.site-weights' may replace
        weight = reply.metrics[NUM_EXAMPLES]
        samples += weight
        for name in sums:
            sums[name] = sums[name] + weight * reply.arrays[name].astype(np.float64)
    return samples, sums


@dataclass(frozen=True)
class Question:
    """The messages of one phase and the expected replies; ``Ask.__call__`` explains the fields."""

    phase: str
    send: Mapping[str, Arrays]  # the arrays for each site; a site that is missing here is not asked
    expect: Mapping[str, Specs]
    reference: Mapping[str, Arrays] = field(default_factory=dict)
    notes: Mapping[str, Notes] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    fault: Check | None = None
    # The secure aggregation record for each site, sent with the instruction
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)


class Ask(ABC):
    """The interface that a method uses to ask the sites of a round; tests pass their own."""

    sites: Sequence[str]  # the sites that the round may ask, sorted
    stateful_sites: Collection[str]  # the sites that keep private state of this run

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
        """Send one question to sites, wait for them, and return their usable replies by site.

        A site without a usable reply is left out of the result.

        Args:
            phase: the phase; a site answers it with the function of that name in its method.
            send: the arrays for each site; a site that is not in it is not asked.
            expect: the arrays that each site must return, or arrays of the same shapes. None: the
                arrays in ``reference``.
            reference: the arrays that each site's reply updates, used to measure the update's size.
                None: the arrays sent, or no arrays if ``expect`` is given.
            notes: further values for the sites: one Notes for all, or one for each site.
            metrics: metrics that each reply must have.
            fault: returns why a well-formed reply is unusable, or None if it is usable.

        Raises:
            SiteError: too few sites gave a usable reply, or ``send`` has a site that does not take
                part.
            TypeError: ``notes``, or one of its values, is not a Notes.
        """
        if expect is None:
            # A site returns the arrays that it was sent, or those that its update is compared with
            if reference is None:
                reference = send
            expect = reference
        elif reference is None:
            reference = {}
        # Many sites share the same arrays, whose specs are then made only once
        made: dict[int, dict[str, ArraySpec]] = {}
        specs: dict[str, Specs] = {}
        for site, arrays in expect.items():
            if id(arrays) not in made:
                made[id(arrays)] = {}
                for name, array in arrays.items():
                    spec = array
                    if not isinstance(spec, ArraySpec):
                        spec = ArraySpec(array.shape)
                    made[id(arrays)][name] = spec
            specs[site] = made[id(arrays)]
        if isinstance(notes, Notes):
            notes = dict.fromkeys(send, notes)
        notes = notes or {}
        if not all(isinstance(own, Notes) for own in notes.values()):
            raise TypeError(
                f"{phase}: 'notes' must be a Notes, or one per site: derive a class from Notes"
            )
        return self.put(Question(phase, send, specs, reference, notes, metrics, fault))

    @abstractmethod
    def put(self, question: Question) -> Replies:
        """Send a question to its sites and return the usable replies; see ``__call__``."""


class _Asked(Exception):
    """Carries a question out of a method's code; the question is its only argument."""


class _FirstQuestion(Ask):
    """An Ask that sends nothing: it stops at the first question."""

    def __init__(self, sites: Sequence[str], stateful_sites: Collection[str]) -> None:
        self.sites = sites
        self.stateful_sites = stateful_sites

    def put(self, question: Question) -> Replies:
        """Raise ``_Asked`` with the question, so that the method's code stops here."""
        raise _Asked(question)


def first_question(
    asks: Callable[[Ask], object], sites: Sequence[str], stateful_sites: Collection[str] = ()
) -> Question:
    """Return the first question that a method asks its sites, without sending it.

    The method's code runs only up to this point. Outside a run, the question shows the arrays and
    other values that each site would receive.

    Args:
        asks: calls ``Method.round`` or ``Method.evaluate`` with the ``Ask`` that it receives.
        sites: the sites that may be asked.
        stateful_sites: the sites that already keep private state of the run.

    Returns:
        The question. If the method asks none, it has an empty phase and no sites.
    """
    try:
        asks(_FirstQuestion(sites, stateful_sites))
    except _Asked as asked:
        question: Question = asked.args[0]
        return question
    return Question("", {}, {})
