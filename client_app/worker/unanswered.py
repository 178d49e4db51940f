"""Messages that nobody will answer: a SuperNode must not wait for them for ever.

Flower's SuperNode takes a message, waits for the reply and only then for the next. Of a task whose
process was killed it makes an error reply a minute after its last sign of life, but not if that
process had not fetched the message yet, nor if it ended by saying that it had failed: then it waits
for ever and the hospital is lost to the server until it is started anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flwr.common.constant import Status
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR

UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)


def give_up_unanswered(state: Any) -> int:
    """Reply with an error to messages that no task will answer; return how many.

    Args:
        state: the SuperNode's, of Flower 1.39.0 (``InMemoryNodeState``).
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
            entry.is_retrieved = True  # by nobody, but only then it gets a reply
            state.record_message_processing_start(entry.message.metadata.message_id)
        runs = {entry.message.metadata.run_id for entry in left}
    if left:
        state._store_error_replies(runs, CLIENT_APP_CRASHED_ERROR)
        logging.getLogger("flwr").error(
            "fedsilo: %d message(s) that no process answers any more are given up", len(left)
        )
    return len(left)


def watching(push: Callable[..., None], waits: Any) -> Callable[..., None]:
    """Return Flower's ``_push_messages`` with a look at what it waits for, at each of its waits.

    Args:
        push: Flower's function, which sleeps by ``waits`` until there is a reply.
        waits: has an attribute ``look``, called at each sleep.
    """

    def pushing(state: Any, *rest: Any, **named: Any) -> None:
        waits.look = lambda: give_up_unanswered(state)
        try:
            push(state, *rest, **named)
        finally:
            waits.look = None

    return pushing
