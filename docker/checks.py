"""Starts Flower for both entry points, or prints one line for a fault."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence

from fedsilo.core.errors import FedsiloError, describe_system_error


def start(name: str, command: Callable[[], Sequence[str]], show: bool) -> int:
    """Become the process of a command, or only print the command.

    Args:
        name: ``hospital`` or ``server``, with which the line of a fault begins.
        command: makes the words of the command, or raises a FedsiloError or an OSError.
        show: whether to print the command and not to run it.

    Returns:
        2 after a fault, whose line is on standard error, else 0. A command that starts does not
        return.
    """
    try:
        arguments = list(command())
    except (FedsiloError, OSError) as error:
        said = str(error)
        # The system's own errors, such as a full volume, need our words
        if isinstance(error, OSError):
            said = describe_system_error(error)
        print(f"{name}: {said}", file=sys.stderr)
        return 2
    print(shlex.join(arguments), flush=True)
    if not show:
        # Flower itself becomes the container's process 1, so that it gets the engine's signals
        os.execvp(arguments[0], arguments)
    return 0
