"""Ask nodes who they are, and read their hellos: valid facts, or the reason for a refusal.

A hello is read before the server knows who sent it. So nothing in a hello may stop a run: whatever
it holds, only its own node is left out. A table's sums are compared with the training rows that the
same hello reports. Counts are whole and at most those rows, and squares must satisfy the
Cauchy-Schwarz inequality, up to rounding.
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

_TIMEOUT = 600.0  # seconds: at its first start a site may have to decode its data
_BYTES = 2**22  # the largest hello or survey; names and counts of thousands of classes fit in it
_SOFTWARE = 10  # the most entries of 'software'
_TEXT = 200  # the longest name, in characters
_CLASSES = 10_000
_MOST = 10**9  # the most samples of one class
_LENGTH, _NUMBERS = 2**20, 2**28  # the longest dimension of an input, and the most numbers in one
_DIMENSIONS = (1, 3)  # one for a row; three for channels, height and width
_SUM = 1e18  # a larger sum is refused, so that its square stays finite
# The relative error of sums over rows; and the size below which squares vanish
_ROUNDING, _TINY = 1e-9, 1e-300
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_hello(content: RecordDict, counted: bool = True) -> SiteFacts:
    """Read and check a node's hello.

    Args:
        content: the hello.
        counted: whether the hello must have label counts; at trust 'sums' it has none.

    Raises:
        SiteError: the hello cannot be read, or a value in it is impossible; one line.
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
    """Ask nodes for a hello or a survey.

    Args:
        grid: connects the server with the nodes.
        nodes: the ids of the nodes to ask.
        kind: the type of the messages.
        read: reads an answer; raises a SiteError if the answer is unusable.
        away_timeout: seconds until a disconnected node is given up.

    Returns:
        For each node that answered its id, its answer, and the bytes sent and received. Then, for
        each other node, a line that says why it has no usable answer.
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
    """Turn any failure of the block into a SiteError, because it reads untrusted data.

    Args:
        what: the name of the data in errors, such as "its hello".
        content: the data; at most 4 MiB.

    Raises:
        SiteError: the data are larger, or cannot be read; one line.
    """
    try:
        if (size := record_bytes(content)) > _BYTES:
            raise ValueError(f"it has {size} bytes, more than {_BYTES}")
        yield
    except Exception as error:  # untrusted data can make a reader fail in any way
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise SiteError(
            f"{what} cannot be read ({reason}): server and site run different versions of fedsilo"
        ) from None


def _faults(facts: SiteFacts) -> Iterator[str]:
    """Yield the faults of facts that have the right types, the worst first."""
    if wrong := site_name_fault(facts.site):
        yield f"{one_line(wrong, 200)}: choose another 'site' in its node config"
    said = f"site {facts.site} says that"
    for each in (*_name_faults(facts), *_shape_faults(facts), *_count_faults(facts)):
        yield f"{said} {each}"
    if facts.sums is not None and (fault := sums_fault(facts, facts.sums)):
        yield f"{said} {fault}"


def _name_faults(facts: SiteFacts) -> Iterator[str]:
    """Yield faults of texts and digests."""
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
    if facts.distribution == "all":  # tables have a row of that name for the mean over all sites
        yield "its 'distribution' is 'all', which stands for the mean over sites"
    # Plots print these names, and matplotlib reads such marks as formulas or styles
    for key, values in (("distribution", [facts.distribution]), ("class-names", facts.class_names)):
        if any(mark in value for value in values for mark in "$\\"):
            yield f"its '{key}' have a '$' or a '\\', which plots take for a formula"
    if not facts.fingerprints.keys() <= set(SPLITS):
        yield f"its 'fingerprints' are not of {', '.join(SPLITS)}"
    elif not all(map(_DIGEST.fullmatch, facts.fingerprints.values())):
        yield "a fingerprint is no SHA-256"


def _shape_faults(facts: SiteFacts) -> Iterator[str]:
    """Yield faults of the input shape, classes and features."""
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
    """Yield faults of counts of samples; a site at trust 'sums' reports no counts."""
    if not facts.label_counts.keys() <= set(SPLITS):
        yield f"its 'label-counts' are not of {', '.join(SPLITS)}"
    if any(count > _MOST for counts in facts.label_counts.values() for count in counts):
        yield f"a class has more than {_MOST} samples"
    if not 0 <= facts.dropped <= _MOST:
        yield f"{one_line(facts.dropped, 30)} samples are left out"
    if not 1 <= facts.floor <= _MOST:
        yield f"its 'floor' is {one_line(facts.floor, 30)}, less than 1 or more than it can be"


def sums_fault(facts: SiteFacts, sums: Sums) -> str | None:
    """Explain why a table's sums cannot belong to its training rows, or return None."""
    rows = facts.sizes().get("train", 0)
    if (sums.count != np.floor(sums.count)).any() or (sums.count > rows).any():
        return f"'sums-count' are not whole numbers of at most its {rows} training rows"
    if (abs(sums.total) > _SUM).any() or (sums.squares > _SUM**2).any():
        return f"'sums-total' are beyond {_SUM:g}"
    # Cauchy-Schwarz: n times the sum of squares is at least the square of the sum of n values
    known = sums.count * sums.squares
    if (known * (1 + _ROUNDING) + _TINY < sums.total**2 * (1 - _ROUNDING)).any():
        return "'sums-squares' are too small for 'sums-total': no values have such sums"
    return None
