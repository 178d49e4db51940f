"""Starts Flower for both entry points, or prints one line for a fault."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from health import fault_file

from fedsilo.core.errors import FedsiloError, describe_system_error

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds between two attempts to start


def start(
    name: str, command: Callable[[], Sequence[str]], *, show: bool, keep_trying: bool = False
) -> int:
    """Become the process of a command, or only print the command.

    Args:
        name: ``hospital`` or ``server``, with which the line of a fault begins.
        command: makes the words of the command, or raises a FedsiloError or an OSError.
        show: whether to print the command and not to run it.
        keep_trying: whether to stay after a fault and try again, after 5 seconds at first and every
            minute later. Until a start succeeds the container is unhealthy (``health.py``).

    Returns:
        2 after a fault, whose line is on standard error, else 0. A command that starts does not
        return.
    """
    said, pause = "", _FIRST_PAUSE
    while True:
        arguments, fault = _make(command)
        if not fault:
            break
        # A fault that stays is printed once, so that the log keeps what came before
        if fault != said:
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
        if not keep_trying or show:
            return 2
        said = fault
        # On a full disk the log still has the line, and no health server serves
        with suppress(OSError):
            fault_file().write_text(f"{name}: {fault}\n", encoding="utf-8")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    fault_file().unlink(missing_ok=True)
    print(shlex.join(arguments), flush=True)
    if not show:
        # Flower itself becomes the container's process 1, so that it gets the engine's signals
        os.execvp(arguments[0], arguments)
    return 0


def _make(command: Callable[[], Sequence[str]]) -> tuple[list[str], str]:
    """Return the words of a command and an empty text, or no words and the fault."""
    try:
        return list(command()), ""
    except FedsiloError as error:
        return [], str(error)
    # The system's own errors, such as a full volume, need our words
    except OSError as error:
        return [], describe_system_error(error)
