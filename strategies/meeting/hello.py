"""Asking nodes who they are, and a hello as the server takes it: facts within bounds, or why not.

A hello is read before anybody knows who sent it, so nothing in it may stop a run: whatever it
holds, its own node alone is left out. A table's sums are compared with the training rows that the
same hello counts: counts are whole and no more than those rows, and the squares are what numbers of
such a sum can have (Cauchy and Schwarz, but for rounding).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsilo.datasets.silo.declared_silos import site_name_fault
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import CONFIG
from fedsilo.models.contract.one_line import one_line, site_reason
from fedsilo.models.contract.site_facts import SPLITS, SiteFacts, Sums
from fedsilo.models.contract.versions import own_versions
from fedsilo.strategies.wire.messaging import arriving
from fedsilo.strategies.wire.records import record_bytes

T = TypeVar("T")

_TIMEOUT = 600.0  # seconds: a first start may have to decode the data
_BYTES = 2**22  # of a hello or survey: names and counts of thousands of classes fit
_SOFTWARE = 10  # entries
_TEXT = 200  # characters of a name
_CLASSES = 10_000
_MOST = 10**9  # samples of a class
_LENGTH, _NUMBERS = 2**20, 2**28  # of one dimension of an input, and of all together
_DIMENSIONS = (1, 3)  # a row; channels, height and width
_SUM = 1e18  # no sum of measurements is larger, and its square is still a finite number
_ROUNDING, _TINY = 1e-9, 1e-300  # relative, of sums over rows; and of squares too small to be told
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_hello(content: RecordDict, counted: bool = True) -> SiteFacts:
    """Return what a node says of itself.

    Args:
        content: the hello.
        counted: whether it must have label counts; a run for sums alone gets none.

    Raises:
        SiteError: it cannot be read, or says what cannot be; one line.
    """
    with reading("its hello", content):
        facts = SiteFacts.from_config(content.config_records[CONFIG])
        if counted and not facts.label_counts:
            raise ValueError("it has no 'label-counts'")
    if fault := next(_faults(facts), ""):
        raise SiteError(site_reason(fault))
    return facts


def ask_nodes(
    grid: Grid,
    nodes: Iterable[int],
    kind: str,
    read: Callable[[RecordDict], T],
    away_timeout: float = 300.0,
) -> tuple[list[tuple[int, T, tuple[int, int]]], list[str]]:
    """Ask nodes who they are, or for a survey.

    Args:
        grid: over which they are asked.
        nodes: those that are.
        kind: of the messages.
        read: reads an answer; a SiteError says why it cannot be used.
        away_timeout: seconds after which a node that is disconnected is given up.

    Returns:
        The nodes that answered: id, answer, and the bytes down and up. Then a line for each other
        node, why its answer cannot be used.
    """
    asks = ConfigRecord({kind.removeprefix("query."): True, **own_versions()})
    content = RecordDict({CONFIG: asks})
    messages = [Message(content, node, kind) for node in nodes]
    replies = dict(arriving(grid, messages, _TIMEOUT, away_timeout))
    heard: list[tuple[int, T, tuple[int, int]]] = []
    refused: list[str] = []
    for node in sorted(nodes):
        reply = replies.get(node)
        if reply is None:
            refused.append(f"node {node}: no answer")
        elif reply.has_error():
            refused.append(site_reason(reply.error.reason or "an error"))
        else:
            try:
                said = read(reply.content)
            except SiteError as error:
                refused.append(f"node {node}: {error}")
            else:
                heard.append((node, said, (record_bytes(content), record_bytes(reply.content))))
    return heard, refused


@contextmanager
def reading(what: str, content: RecordDict) -> Iterator[None]:
    """Read within it what a stranger says: ``content``, of at most 4 MiB, in errors ``what``.

    Raises:
        SiteError: it is larger, or cannot be read; one line.
    """
    try:
        if (size := record_bytes(content)) > _BYTES:
            raise ValueError(f"it has {size} bytes, more than {_BYTES}")
        yield
    except Exception as error:  # a stranger's words can make a reader fail in any way
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise SiteError(
            f"{what} cannot be read ({reason}): server and site run different versions of fedsilo"
        ) from None


def _faults(facts: SiteFacts) -> Iterator[str]:
    """Yield what is wrong with facts of the right types, worst first."""
    if wrong := site_name_fault(facts.site):
        yield f"{one_line(wrong, 200)}: choose another 'site' in its node config"
    said = f"site {facts.site} says that"
    for each in (*_name_faults(facts), *_shape_faults(facts), *_count_faults(facts)):
        yield f"{said} {each}"
    if facts.sums is not None and (fault := sums_fault(facts, facts.sums)):
        yield f"{said} {fault}"


def _name_faults(facts: SiteFacts) -> Iterator[str]:
    """Yield what is wrong with texts and digests."""
    texts = {
        "distribution": [facts.distribution],
        "schema": [facts.schema],
        "backbone": [facts.backbone],
        "features": facts.features,
        "class-names": facts.class_names,
        "software": [*list(facts.software)[:_SOFTWARE], *list(facts.software.values())[:_SOFTWARE]],
    }
    if len(facts.software) > _SOFTWARE:
        yield f"its 'software' has {len(facts.software)} entries, not at most {_SOFTWARE}"
    for key, values in texts.items():
        if not all(len(value) <= _TEXT and value.isprintable() for value in values):
            yield f"its '{key}' are not printable text of at most {_TEXT} characters"
    if facts.distribution == "all":  # tables have a row of that name, the mean over all sites
        yield "its 'distribution' is 'all', which stands for the mean over sites"
    # They are drawn and printed, where these begin a formula or a style
    for key, values in (("distribution", [facts.distribution]), ("class-names", facts.class_names)):
        if any(mark in value for value in values for mark in "$\\"):
            yield f"its '{key}' have a '$' or a '\\', which plots take for a formula"
    if not facts.fingerprints.keys() <= set(SPLITS):
        yield f"its 'fingerprints' are not of {', '.join(SPLITS)}"
    elif not all(map(_DIGEST.fullmatch, facts.fingerprints.values())):
        yield "a fingerprint is no SHA-256"


def _shape_faults(facts: SiteFacts) -> Iterator[str]:
    """Yield what is wrong with the measures of the data."""
    shape = facts.input_shape
    lengths = all(0 < length <= _LENGTH for length in shape[:3])
    if len(shape) not in _DIMENSIONS or not lengths or math.prod(shape) > _NUMBERS:
        yield f"an input's shape is {one_line(shape, 60)}, which none can have"
    if not 2 <= facts.classes <= _CLASSES:
        yield f"it has {one_line(facts.classes, 30)} classes, not 2 to {_CLASSES}"
    if facts.features and shape != (len(facts.features),):
        yield f"it has {len(facts.features)} features and inputs of {one_line(shape, 60)}"
    if facts.class_names and len(facts.class_names) != facts.classes:
        yield f"it names {len(facts.class_names)} of {one_line(facts.classes, 30)} classes"


def _count_faults(facts: SiteFacts) -> Iterator[str]:
    """Yield what is wrong with counts of samples; a site that tells sums alone says none."""
    if not facts.label_counts.keys() <= set(SPLITS):
        yield f"its 'label-counts' are not of {', '.join(SPLITS)}"
    if any(count > _MOST for counts in facts.label_counts.values() for count in counts):
        yield f"a class has more than {_MOST} samples"
    if not 0 <= facts.dropped <= _MOST:
        yield f"{one_line(facts.dropped, 30)} samples are left out"
    if not 1 <= facts.floor <= _MOST:
        yield f"its 'floor' is {one_line(facts.floor, 30)}, less than 1 or more than it can be"


def sums_fault(facts: SiteFacts, sums: Sums) -> str | None:
    """Say why a table's sums cannot be those of its training rows, if they cannot."""
    rows = facts.sizes().get("train", 0)
    if (sums.count != np.floor(sums.count)).any() or (sums.count > rows).any():
        return f"'sums-count' are not whole numbers of at most its {rows} training rows"
    if (abs(sums.total) > _SUM).any() or (sums.squares > _SUM**2).any():
        return f"'sums-total' are beyond {_SUM:g}"
    known = sums.count * sums.squares
    if (known * (1 + _ROUNDING) + _TINY < sums.total**2 * (1 - _ROUNDING)).any():
        return "'sums-squares' are too small for 'sums-total': no values have such sums"
    return None
