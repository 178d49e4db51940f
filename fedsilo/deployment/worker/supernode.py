"""Flower's SuperNode, changed to poll often while there are messages.

Flower waits 3 s for a message and 0.5 s for a reply, and no setting changes that. The waits are
replaced in the one version whose code was read; with other versions the waits stay, and a line on
standard error says so.

The same code gives up messages that nobody will answer. Flower's SuperNode takes a message, waits
for its reply, and only then takes the next. If the process of a task is killed, the SuperNode makes
an error reply a minute after the last sign of life. But if that process had not fetched the message
yet, or had reported a failure, the SuperNode would wait for ever, and the server would lose the
hospital until a restart.
"""

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from flwr.common.constant import Status
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR

from fedsilo.core.processes import end_with
from fedsilo.strategies.wire.messaging import retry_soon

READ = "1.39.0"  # the Flower version whose code was read
_WAITS = "flwr.supernode.start_client_internal"
_IDLE = 3.0  # Flower's wait for a message, in seconds
UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)
_LOOK = 1.0  # seconds between checks for messages that nobody answers
_SHORT, _LONG = 0.05, 0.5  # seconds between two polls, soon after an arrival and otherwise
_QUICK_FOR = 10.0  # seconds of short intervals after an arrival


@dataclass
class PollInterval:
    """The seconds between two polls.

    The interval is ``short`` for ten seconds after an arrival, and ``long`` at any other time.
    """

    short: float = _SHORT
    long: float = _LONG
    clock: Callable[[], float] = time.monotonic
    _arrived: float = field(default=float("-inf"), init=False)

    def note_arrival(self) -> None:
        """Record that a message has arrived now, because more may follow soon."""
        self._arrived = self.clock()

    def seconds(self) -> float:
        """Return the seconds to wait before the next poll."""
        if self.clock() - self._arrived < _QUICK_FOR:
            return self.short
        return self.long


class ShortWaits:
    """A replacement for the module ``time`` in the SuperNode's loop that sleeps less.

    The loop sleeps 3 s when it waits for a message, and less when it waits for a reply, which means
    that a message has arrived. Polling for a message calls the server, as all hospitals do, so at
    least a quarter of a second passes between polls. Polling for a reply stays within this process.
    """

    def __init__(self) -> None:
        self.interval = PollInterval(short=_LONG / 2, long=2 * _LONG)
        self.look: Callable[[], object] | None = None
        self._looked = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep in place of ``time.sleep`` in Flower's loop, but usually for less than ``seconds``.

        The requested time reveals the purpose of the wait:

        - From 3 seconds on, the loop waits for a message. The sleep takes at most 0.25 seconds if a
          message arrived in the last ten seconds, and otherwise at most 1 second.
        - Below 3 seconds, the loop waits for the reply to a message that has arrived. The
          arrival is noted, and the sleep takes 0.05 seconds. Before it, the callback ``look`` is
          called, if it is set and was not called in the last second.
        """
        if seconds < _IDLE:
            self.interval.note_arrival()
            self._look_sometimes()
            time.sleep(_SHORT)
        else:
            time.sleep(min(seconds, self.interval.seconds()))

    def _look_sometimes(self) -> None:
        if self.look and time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            self.look()

    def __getattr__(self, name: str) -> object:
        """Return any other attribute of the module ``time``."""
        return getattr(time, name)


def shorten_waits(version: str, module: ModuleType) -> str | None:
    """Shorten the waits in Flower's message loop, and let the loop give up unanswerable messages.

    For this, the names ``time`` and ``_push_messages`` in ``module`` are replaced. Nothing is
    replaced if the version of Flower or the content of the module is unknown.

    Args:
        version: the installed version of Flower.
        module: Flower's module with the loop.

    Returns:
        None if the names were replaced, otherwise a sentence that explains the reason.
    """
    known = getattr(module, "time", None) is time and hasattr(module, "_push_messages")
    if version != READ or not known:
        return (
            f"fedsilo knows the waits of Flower {READ}, but this is {version}: the SuperNode keeps "
            "Flower's own, a message takes up to 3 s longer"
        )
    waits = ShortWaits()
    module.time = waits  # type: ignore[attr-defined]  # the name that its functions look up
    module._push_messages = give_up_while_waiting(module._push_messages, waits)  # type: ignore[attr-defined]
    return None


def give_up_unanswered(state: Any) -> int:
    """Give an error reply to all messages that no task will answer, and return their number.

    Such messages remain when the process that was to answer them is killed. If any task is
    unfinished, nothing is done and the number is 0, because that task may still answer. A number
    above 0 is logged as an error.

    Args:
        state: the SuperNode's ``InMemoryNodeState`` of Flower 1.39.0.
    """
    # A running task may still answer, so only an idle node gives messages up
    if state.get_tasks(statuses=UNFINISHED):
        return 0
    with state.lock_msg_store:
        # The store holds messages and replies alike; only a reply names the message it answers
        entries = list(state.msg_store.values())
        answered = {entry.message.metadata.reply_to_message_id for entry in entries}
        runs = set()
        given_up = 0
        for entry in entries:
            facts = entry.message.metadata
            if facts.reply_to_message_id or facts.message_id in answered:
                continue
            entry.is_retrieved = True  # nobody retrieved it, but otherwise it cannot get a reply
            state.record_message_processing_start(facts.message_id)
            runs.add(facts.run_id)
            given_up += 1
    # After the lock is released, because Flower's function takes it itself
    if runs:
        state._store_error_replies(runs, CLIENT_APP_CRASHED_ERROR)
        logging.getLogger("flwr").error(
            "fedsilo: gave up %d message(s) that no process answers any more", given_up
        )
    return given_up


def give_up_while_waiting(push: Callable[..., None], waits: Any) -> Callable[..., None]:
    """Wrap Flower's ``_push_messages``, so that it does not wait for ever for a reply.

    The function waits until a process has answered a message. If this process is killed, no reply
    comes. While the wrapper runs, ``waits.look`` is therefore a function that calls
    ``give_up_unanswered``, which gives an error reply to such messages. ``waits.sleep`` calls
    ``waits.look`` about once a second. After the call ``waits.look`` is None.

    Args:
        push: Flower's function, which sleeps by ``waits.sleep`` until a reply is ready. Its first
            argument is the SuperNode's state.
        waits: the replacement for the module ``time``.

    Returns:
        A function with the arguments of ``push``.
    """

    def pushing(state: Any, *rest: Any, **named: Any) -> None:
        waits.look = lambda: give_up_unanswered(state)
        try:
            push(state, *rest, **named)
        finally:
            waits.look = None

    return pushing


def main() -> None:
    """Run ``flower-supernode`` with this process's arguments, but shorten Flower's waits.

    The function does not return. The process ends with code 1 when the SuperNode loses the
    server, or when the parent process ends. If the version of Flower is unknown, its waits are
    not shortened, and a line on stderr says so.
    """
    from flwr.supercore.version import package_version
    from flwr.supernode.cli.flower_supernode import flower_supernode

    # A parent that is killed cannot end this process, so this process watches the parent
    end_with(os.getppid())
    retry_soon()
    why = shorten_waits(package_version, importlib.import_module(_WAITS))
    if why:
        print(f"fedsilo: {why}", file=sys.stderr)
    # Returns after an error of the server, but its Runtime API's thread keeps running
    flower_supernode()
    os.write(2, b"fedsilo: the SuperNode lost the server and ends: start it again\n")
    os._exit(1)


if __name__ == "__main__":
    main()
