"""Give up messages that nobody will answer, so that a SuperNode does not wait for ever.

Flower's SuperNode takes a message, waits for its reply, and only then takes the next. If the
process of a task is killed, it makes an error reply a minute after the last sign of life. It does
not if that process had not fetched the message yet, or had reported that it failed: then it waits
for ever, and the hospital is lost to the server until it is restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flwr.common.constant import Status
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR

UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)


def give_up_unanswered(state: Any) -> int:
    """Reply with an error to messages that no task will answer, and return how many there were.

    ``state`` is the SuperNode's ``InMemoryNodeState``, of Flower 1.39.0.
    """
    if state.get_tasks(statuses=UNFINISHED):
        return 0
    with state.lock_msg_store:
        messages = [entry.message for entry in state.msg_store.values()]
        replied = {message.metadata.reply_to_message_id for message in messages} - {""}
        left = [
            entry
            for entry in state.msg_store.values()
            if not entry.message.metadata.reply_to_message_id
            and entry.message.metadata.message_id not in replied
        ]
        for entry in left:
            entry.is_retrieved = True  # by nobody, but otherwise it cannot get a reply
            state.record_message_processing_start(entry.message.metadata.message_id)
        runs = {entry.message.metadata.run_id for entry in left}
    if left:
        state._store_error_replies(runs, CLIENT_APP_CRASHED_ERROR)
        logging.getLogger("flwr").error(
            "fedsilo: gave up %d message(s) that no process answers any more", len(left)
        )
    return len(left)


def watching(push: Callable[..., None], waits: Any) -> Callable[..., None]:
    """Return Flower's ``_push_messages``, which now and then gives up messages while it waits.

    ``push`` is Flower's function, which sleeps with ``waits`` until there is a reply; each sleep
    may call the attribute ``look`` of ``waits``.
    """

    def pushing(state: Any, *rest: Any, **named: Any) -> None:
        waits.look = lambda: give_up_unanswered(state)
        try:
            push(state, *rest, **named)
        finally:
            waits.look = None

    return pushing
