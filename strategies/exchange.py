"""Sending messages and collecting replies one by one, so that progress can be shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    arrived: Callable[[int, Message], None] = lambda node, reply: None,
) -> dict[int, Message | None]:
    """Push ``messages`` and return the reply of each node, None where none came in time.

    Args:
        grid: Flower's grid, or the in-process one.
        messages: at most one message a node.
        timeout: seconds to wait for all replies.
        arrived: told of each reply as it comes, with its node.
    """
    nodes = [message.metadata.dst_node_id for message in messages]
    # Flower gives None for a message that it could not take, and sends its own error replies
    # (node unavailable, message expired) from node 1: only the message's id tells whose it is.
    pushed = list(grid.push_messages(messages))
    asked = {key: node for key, node in zip(pushed, nodes, strict=True) if key is not None}
    replies: dict[int, Message | None] = dict.fromkeys(nodes)
    waiting = set(asked)
    limit = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while waiting and time.monotonic() < limit:
        came = list(grid.pull_messages(waiting))
        for reply in came:
            waiting.discard(reply.metadata.reply_to_message_id)
            node = asked[reply.metadata.reply_to_message_id]
            replies[node] = reply
            arrived(node, reply)
        if not came:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        else:
            pause = _FIRST_PAUSE
    return replies
