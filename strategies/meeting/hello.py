"""Ask nodes who they are, and read their hellos: valid facts, or the reason for a refusal.

A hello is read before the server knows who sent it. So nothing in a hello may stop a run: at most
its own node is left out. A table's sums are compared with the training rows that the same hello
reports. Counts must be whole and at most the number of those rows, and sums of squares must satisfy
the Cauchy-Schwarz inequality, up to rounding.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import CONFIG
from fedsilo.core.one_line import one_line, site_reason
from fedsilo.core.site_facts import SiteFacts
from fedsilo.core.versions import installed_software, own_versions
from fedsilo.strategies.meeting.checks import find_hello_fault
from fedsilo.strategies.wire.messaging import send_and_receive
from fedsilo.strategies.wire.records import record_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class NodeAnswer(Generic[T]):
    """The answer of one node to a hello or a survey."""

    node: int  # the node's id
    content: T  # its hello or its answer to a survey, read and checked
    traffic: tuple[int, int]  # the bytes of asking it: down to the node, and up from it


_TIMEOUT = 600.0  # seconds: at its first start a site may have to decode its data
_BYTES = 2**22  # the largest hello or survey; names and counts of thousands of classes fit in it
_NAMED = ("fedsilo", "revision", "flower")  # keys of a hello's 'software'
_LONGEST_SOFTWARE = 2000  # characters


def read_hello(content: RecordDict, needs_counts: bool = True) -> SiteFacts:
    """Read and check a node's hello, in which a site describes itself and its data.

    The content is untrusted. ``find_hello_fault`` checks its values.

    Args:
        content: the content of the node's message.
        needs_counts: whether the hello must have ``label-counts``, the number of samples of each
            class. At trust 'sums' they are not required.

    Raises:
        SiteError: the hello cannot be read, or a value in it is impossible. The error is one line.
    """
    with reading("its hello", content):
        facts = SiteFacts.from_config(content.config_records[CONFIG])
        if needs_counts and not facts.label_counts:
            raise ValueError("it has no 'label-counts'")
    fault = find_hello_fault(facts)
    if fault:
        raise SiteError(site_reason(fault))
    return facts


def ask_nodes(
    grid: Grid,
    nodes: Collection[int],
    kind: str,
    read: Callable[[RecordDict], T],
    away_timeout: float = 300.0,
) -> tuple[list[NodeAnswer[T]], list[str]]:
    """Send all nodes the same question, and read their answers.

    The question is either a hello, which asks a site to describe itself, or a survey of its data.
    All nodes are asked at once. The function gives up a node that is disconnected for
    ``away_timeout`` seconds, and every node after 10 minutes. For a node without a usable answer it
    raises no error.

    Args:
        grid: connects the server with the nodes.
        nodes: the ids of the nodes to ask.
        kind: the type of the messages: "query.hello" or "query.survey".
        read: reads an answer. It raises a SiteError if the answer is unusable.
        away_timeout: seconds that a node may be disconnected.

    Returns:
        The usable answers, sorted by node, and one line with the reason for each other node.
    """
    asks = ConfigRecord({kind.removeprefix("query."): True, **own_versions()})
    content = RecordDict({CONFIG: asks})
    messages = [Message(content, node, kind) for node in nodes]
    replies = dict(send_and_receive(grid, messages, _TIMEOUT, away_timeout))
    answers: list[NodeAnswer[T]] = []
    refused: list[str] = []
    for node in sorted(nodes):
        reply = replies.get(node)
        if reply is None:
            refused.append(f"node {node}: no answer")
        elif reply.has_error():
            refused.append(site_reason(reply.error.reason or "an error"))
        else:
            try:
                checked = read(reply.content)
            except SiteError as error:
                refused.append(f"node {node}: {error}")
            else:
                traffic = record_bytes(content), record_bytes(reply.content)
                answers.append(NodeAnswer(node, checked, traffic))
    return answers, refused


@contextmanager
def reading(what: str, content: RecordDict) -> Iterator[None]:
    """Open a context that turns any ``Exception`` in its block into a SiteError of one line.

    The block reads untrusted data, whose size is checked before the block runs.

    Args:
        what: the name of the data in errors, such as "its hello".
        content: the data.

    Raises:
        SiteError: the data are larger than 4 MiB, or the block failed.
    """
    try:
        size = record_bytes(content)
        if size > _BYTES:
            raise ValueError(f"it has {size} bytes, more than {_BYTES}")
        yield
    except Exception as error:  # untrusted data can make a reader fail in any way
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise SiteError(f"{what} cannot be read ({reason}); {_name_software(content)}") from None


def _name_software(content: RecordDict) -> str:
    """Name the software versions of the server and of the site, to end an error message.

    The site's versions come from ``software`` in its untrusted message. If they are missing or
    unreadable, as in the answer to a survey, the text says that the site does not say what it runs.
    It always ends with the advice to install the same release at both if they differ.
    """
    theirs: object = None
    with suppress(Exception):  # untrusted data can make a reader fail in any way
        theirs = json.loads(str(content.config_records[CONFIG]["software"])[:_LONGEST_SOFTWARE])
    site = "the site does not say what it runs"
    if isinstance(theirs, dict) and theirs.keys() & set(_NAMED):
        site = f"the site runs {_list_versions(theirs)}"
    server = _list_versions(installed_software())
    return f"the server runs {server}; {site}: install the same release at both if they differ"


def _list_versions(software: Mapping[str, object]) -> str:
    """List the versions of fedsilo and Flower and the git revision, each cut to 12 characters."""
    known = [f"{name} {one_line(software[name], 12)}" for name in _NAMED if name in software]
    return ", ".join(known)
