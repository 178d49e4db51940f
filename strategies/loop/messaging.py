"""Sending messages and collecting replies one by one, so that progress can be shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.wire.bundles import Bundles, bundle, unbundle

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds
_LATE_BY = 0.05  # a reply is seen at most this share of its time too late
_AT_ONCE = 8  # messages asked for at once: as many replies are in memory before one is kept


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    arrived: Callable[[int, Message], None] = lambda node, reply: None,
    real: Container[int] = (),
    away_timeout: float = 300.0,
    away: Callable[[Collection[int]], None] = lambda nodes: None,
    keep: Callable[[RecordDict], RecordDict] = lambda content: content,
    most: Mapping[int, int] | None = None,
) -> dict[int, Message | None]:
    """Push ``messages`` and return the reply of each node, None where none came in time.

    Args:
        grid: Flower's grid, or the in-process one.
        messages: at most one message a node.
        timeout: seconds to wait for all replies.
        arrived: told of each reply as it comes, with its node.
        real: nodes that are processes of their own: their messages are bundled.
        away_timeout: seconds that a node may be disconnected before its reply is given up.
        away: told which of the awaited nodes are disconnected, whenever that has changed.
        keep: puts a reply's content where it lies until all have come.
        most: bytes that the numbers of a node's arrays may have; a larger bundle stays closed.
    """
    cache: Bundles = {}
    for message in messages:
        if message.metadata.dst_node_id in real:
            message.content = bundle(message.content, cache)
    nodes = [message.metadata.dst_node_id for message in messages]
    # Flower gives None for a message that it could not take, and sends its own error replies
    # (node unavailable, message expired) from node 1: only the message's id tells whose it is.
    pushed = list(grid.push_messages(messages))
    node_of = {key: node for key, node in zip(pushed, nodes, strict=True) if key is not None}
    replies: dict[int, Message | None] = dict.fromkeys(nodes)
    waiting, away_since, told = set(node_of), dict[int, float](), set[int]()
    began = time.monotonic()
    limit = began + timeout
    while waiting and time.monotonic() < limit:
        missing = _missing(grid, {node_of[key] for key in waiting}, away_since, away_timeout)
        if (gone := {node_of[key] for key in waiting} & away_since.keys()) != told:
            told = gone
            away(sorted(gone))
        ready = [key for key in pushed if key in waiting and node_of[key] not in missing]
        pulled = _some_of(grid, ready)
        for reply in pulled:
            waiting.discard(reply.metadata.reply_to_message_id)
            node = node_of[reply.metadata.reply_to_message_id]
            if reply.has_content():
                # What stays closed is refused where the reply is checked, which says why
                with suppress(SiteError):
                    reply.content = unbundle(reply.content, (most or {}).get(node))
                reply.content = keep(reply.content)
            replies[node] = reply
            arrived(node, reply)
        if not pulled:
            waited = _LATE_BY * (time.monotonic() - began)
            time.sleep(min(max(waited, _SHORTEST_PAUSE), _LONGEST_PAUSE))
    return replies


def _some_of(grid: Grid, ready: Sequence[str]) -> list[Message]:
    """Return some replies that have come to the messages ``ready``, none if none has.

    Flower's grid fetches all that it is asked for at once, and those of many sites are large.
    """
    for start in range(0, len(ready), _AT_ONCE):
        if pulled := list(grid.pull_messages(set(ready[start : start + _AT_ONCE]))):
            return pulled
    return []


def _missing(grid: Grid, nodes: set[int], away_since: dict[int, float], timeout: float) -> set[int]:
    """Return the nodes that are disconnected and may still come back, and note since when.

    Asked for the reply of a node that is disconnected, Flower answers with an error in its place
    and drops what comes later: a cut of a minute would cost a round.
    """
    now, connected = time.monotonic(), set(grid.get_node_ids())
    for node in nodes:
        if node in connected:
            away_since.pop(node, None)
        else:
            away_since.setdefault(node, now)
    return {node for node in nodes if node in away_since and now - away_since[node] < timeout}
