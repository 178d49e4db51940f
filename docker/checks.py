"""What both entry points share: one line for what is refused, and the start of Flower."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence

from fedsilo.core.errors import FedsiloError


def start(name: str, command: Callable[[], Sequence[str]], show: bool) -> int:
    """Become the command, or print it if ``show``; 2 and a line on standard error if refused."""
    try:
        arguments = list(command())
    except FedsiloError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(shlex.join(arguments), flush=True)
    if not show:
        os.execvp(arguments[0], arguments)  # Flower itself is the container's process 1
    return 0
