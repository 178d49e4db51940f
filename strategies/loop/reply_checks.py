"""A message is a contract: a reply is checked before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from fedsilo.models.contract.errors import ERROR_CODES, EpsilonSpentError, SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    EVALUATE,
    INCOMING,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    TRAINED,
    TRAINING,
    measurement,
)
from fedsilo.models.contract.one_line import one_line, shortened
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.phase import Phase
from fedsilo.strategies.loop.ranges import array_fault, metric_fault, too_many
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.wire.bundles import bundle_fault, records_fault
from fedsilo.strategies.wire.records import ArrayError, read_header, unpack

_ANY = 2**16  # no method's arrays are longer where any length will do
_ALWAYS = (NUM_EXAMPLES, SECONDS, PEAK_MEMORY)


class TooFewSitesError(SiteError):
    """Fewer sites than 'min-sites' gave a usable answer.

    Attributes:
        reasons: which site failed in what way, without what to do about it.
        codes: the codes (``fedsilo.models.contract.errors``) of what the failed sites answered.
    """

    def __init__(self, text: str, reasons: str, codes: Collection[str] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons
        self.codes = frozenset(codes)


def code_of(number: int) -> str:
    """Return the code of a site's error by the number that Flower carries; empty: none of ours."""
    return next((code for code, known in ERROR_CODES.items() if known == number), "")


def expected_of(
    site: str, phase: Phase, method: Method, state: RoundState
) -> Mapping[str, ArraySpec]:
    """Return the arrays that a site must answer with; to an evaluation none."""
    return {} if phase.name == EVALUATE else method.expected(phase.name, site, state)


def why_unusable(
    reply: SiteReply,
    phase: Phase,
    method: Method,
    state: RoundState,
    expected: Mapping[str, ArraySpec],
) -> str | None:
    """Return why a reply cannot be used, None if it can: its form, its numbers, then the method."""
    facts = method.participants.facts[reply.site]
    needed = needed_metrics(phase, facts.held())
    if reason := refusal(reply.content, expected, needed, facts.classes):
        return reason
    held = facts.sizes()["train"]
    if (samples := reply.metric(NUM_EXAMPLES)) != held:
        return f"metric '{NUM_EXAMPLES}' is {samples:g}; the site has {held} samples"
    reason = method.rejection_reason(phase.name, reply, state)
    return shortened(reason) if reason else None  # it may quote the arrays themselves


def refusal(
    content: RecordDict,
    expected: Mapping[str, ArraySpec],
    metrics: Iterable[str] = (),
    classes: int = 2,
) -> str | None:
    """Return why a reply cannot be used, in one line, None if it can.

    Checks that ``metrics`` and those of every reply are there and can be (``ranges``), of a site
    with so many ``classes``, and that the arrays have exactly the expected names, float32, the
    expected shapes and values that can be.
    """
    reason = _bad_metrics(content, metrics, classes) or _bad_arrays(content, expected)
    return one_line(reason) if reason else None


def needed_metrics(phase: Phase, held: Collection[str]) -> list[str]:
    """Return the measurements without which a reply of ``phase`` is of no use.

    Args:
        phase: the phase asked for.
        held: the splits of which the site has samples and sends measurements.
    """
    incoming = [
        measurement(INCOMING, split, metric)
        for split in ("val", "test")
        if split in held
        for metric in ("accuracy", "entropy", "loss")
    ]
    trains = phase.name in TRAINING and "train" in held
    trained = [measurement(TRAINED, "train", "loss")] if trains else []
    return [*trained, *incoming] if phase.evaluates else trained


def refuse_too_few(phase: Phase, answered: int, failed: Mapping[str, str], min_sites: int) -> None:
    """Refuse to go on with fewer usable answers than ``min_sites``; 0 stands for all asked.

    A phase that asks few sites cannot be held to more answers than it asked for, and a run that is
    over not to measurements of a hospital whose epsilon is spent.

    Raises:
        TooFewSitesError: each failed site is named with its reason.
    """
    asked = answered + len(failed)
    over = phase.name == EVALUATE
    owed = asked - list(phase.codes.values()).count(EpsilonSpentError.code) * over
    needed = min(min_sites or owed, owed)
    if answered >= needed:
        return
    sites_of: dict[str, list[str]] = {}
    for site, reason in failed.items():
        sites_of.setdefault(reason, []).append(f"site {site}")
    reasons = "; ".join(
        f"{', '.join(sites)}, round {phase.round}, phase {phase.name}: {reason}"
        for reason, sites in sites_of.items()
    )
    raise TooFewSitesError(
        f"{reasons} -- {answered} of {asked} sites answered and {needed} are needed "
        "('min-sites'): mend the site and resume or start again, or set 'min-sites' to fewer",
        reasons,
        phase.codes.values(),
    )


def _bad_metrics(content: RecordDict, wanted: Iterable[str], classes: int) -> str | None:
    if METRICS not in content.metric_records:
        return "the reply has no metrics"
    metrics = content.metric_records[METRICS]
    for key in (*_ALWAYS, *wanted):
        if key not in metrics:
            return f"metric '{key}' is missing"
    if reason := too_many(len(metrics)):
        return reason
    faults = (metric_fault(key, value, classes) for key, value in metrics.items())
    if fault := next((fault for fault in faults if fault), None):
        return fault
    if float(str(metrics[NUM_EXAMPLES])) < 1:
        return f"metric '{NUM_EXAMPLES}' is {metrics[NUM_EXAMPLES]}, less than 1"
    return None


def _bad_arrays(content: RecordDict, expected: Mapping[str, ArraySpec]) -> str | None:
    records = content.array_records
    record = records.get(ARRAYS, ArrayRecord())
    if closed := records_fault(records) or bundle_fault(ARRAYS, record, most_bytes(expected)):
        return closed
    missing = sorted(expected.keys() - record.keys())
    surplus = sorted(record.keys() - expected.keys())
    if missing or surplus:
        told = f"missing {one_line(missing, 120)}, surplus {one_line(surplus, 120)}"
        return f"arrays do not match: {told}"
    faults = (_bad_array(name, record[name], spec) for name, spec in expected.items())
    return next((fault for fault in faults if fault), None)


def most_bytes(expected: Mapping[str, ArraySpec]) -> int:
    """Return how many bytes the numbers of a reply's arrays may have."""
    lengths = [[_ANY if n is None else n for n in spec.shape] for spec in expected.values()]
    return 4 * sum(map(math.prod, lengths))


def _bad_array(name: str, packed: Array, spec: ArraySpec) -> str | None:
    try:
        header = read_header(packed)  # what counts is the payload, not what the record says of it
        fits = len(header.shape) == len(spec.shape) and all(
            want is None or want == have
            for want, have in zip(spec.shape, header.shape, strict=True)
        )
        if header.dtype != np.dtype(spec.dtype) or not fits:
            shape = tuple("any" if length is None else length for length in spec.shape)
            return f"array '{name}' is {header.dtype} {header.shape}, expected {spec.dtype} {shape}"
        array = unpack(packed)
    except ArrayError as error:
        return f"array '{name}' cannot be unpacked: {error}"
    if not np.isfinite(array).all():
        return f"array '{name}' holds values that are not finite"
    return (array_fault(name, array) or None) if array.dtype.kind == "f" else None  # else masked
