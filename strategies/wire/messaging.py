"""Send messages, and yield replies one by one as they arrive, so that progress can be shown."""

import importlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds; one query costs the server 15 ms of CPU time
_LATE_BY = 0.05  # a reply is noticed late by at most this share of its waiting time
_RETRY = 0.05  # seconds until Flower asks again for an object that is still being uploaded
_OBJECTS = "flwr.supercore.inflatable.inflatable_utils"
# Messages per query, because all their replies are in memory before the first is decoded
_AT_ONCE = 8
_NOT_TAKEN = Error(
    ErrorCode.NODE_UNAVAILABLE,
    "the server does not accept messages for it: it was revoked, or has a new key since the run "
    "began",
)


def send_and_receive(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    away_timeout: float = 300.0,
    away: Callable[[Collection[int]], None] = lambda nodes: None,
) -> Iterator[tuple[int, Message]]:
    """Send ``messages`` and yield (node, reply) as each reply arrives.

    The iterator ends when all nodes have replied, or at the timeout. Nothing is yielded for a node
    that has not replied by then. If Flower rejects a message, or if a node is disconnected for
    ``away_timeout``, the yielded reply is a Message with an error.

    Args:
        grid: Flower's grid, or a grid of the same interface in this process.
        messages: at most one message per node.
        timeout: seconds to wait for all replies.
        away_timeout: seconds that a node may be disconnected before it counts as lost.
        away: called with the disconnected nodes that have not replied, whenever the set of these
            nodes changes.
    """
    # Flower gives no id for a message that it rejects, and sends its own error replies (node
    # unavailable, message expired) from node 1. So only the message's id tells whose reply it is.
    rejected: list[tuple[int, Message]] = []
    waiting: dict[str, int] = {}  # the nodes that still owe a reply, by the message's id
    for key, message in zip(grid.push_messages(messages), messages, strict=True):
        node = message.metadata.dst_node_id
        if key:
            waiting[key] = node
        else:
            rejected.append((node, Message(_NOT_TAKEN, reply_to=message)))
    yield from rejected
    # The disconnected nodes that still owe a reply, with the time of disconnection
    away_since: dict[int, float] = {}
    began = time.monotonic()
    while waiting and time.monotonic() < began + timeout:
        # Only nodes that still owe a reply matter; others may come and go
        gone = set(waiting.values()) - set(grid.get_node_ids())
        if gone != away_since.keys():
            now = time.monotonic()
            away_since = {node: away_since.get(node, now) for node in gone}
            away(sorted(gone))
        # If Flower is asked for the reply of a disconnected node, it answers with an error and
        # drops the later reply, so a connection lost for a minute would cost a round. Such a node
        # is asked for again once it is back, or once it counts as lost
        ready = []
        for key, node in waiting.items():
            if time.monotonic() - away_since.get(node, -math.inf) >= away_timeout:
                ready.append(key)
        pulled: list[Message] = []
        # Flower's grid fetches everything that it is asked for at once, so it is asked for little
        while ready and not pulled:
            pulled = list(grid.pull_messages(set(ready[:_AT_ONCE])))
            ready = ready[_AT_ONCE:]
        for reply in pulled:
            yield waiting.pop(reply.metadata.reply_to_message_id), reply
        if not pulled:
            waited = _LATE_BY * (time.monotonic() - began)
            time.sleep(min(max(waited, _SHORTEST_PAUSE), _LONGEST_PAUSE))


def retry_soon() -> bool:
    """Let Flower ask for a missing part of a message again after 50 ms, and not after a second.

    Flower divides a message into parts, its objects. A message becomes visible while parts are
    still being uploaded. Flower then waits a second before it asks for a missing part again, and
    doubles each further wait up to ten seconds. This function shortens the first wait in this
    process.

    Returns:
        True if the first wait was shortened. False for an unknown version of Flower, whose waits
        stay.
    """
    try:
        module = importlib.import_module(_OBJECTS)
        asking = (module.pull_objects, module.pull_and_inflate_object_from_tree)
        waits = [function.__kwdefaults__ or {} for function in asking]
    except (ImportError, AttributeError):
        return False
    # Both functions or neither, so that a partly known version of Flower keeps its own waits
    if not all("initial_backoff" in wait for wait in waits):
        return False
    # No setting changes the first wait, so Flower's default arguments are replaced
    for wait in waits:
        wait["initial_backoff"] = _RETRY
    return True
