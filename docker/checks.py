"""What both entry points share: the check of the server's certificate, and the start of Flower."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsilo.server_app.doctor.findings import Refused
from fedsilo.server_app.doctor.wire import Silent, handshake


def refuse_untrusted(address: str, authority: Path) -> None:
    """Refuse a server whose certificate is not valid; Flower waits for one that does not answer."""
    try:
        handshake(address, authority)
    except Silent as silent:
        print(f"server {address} does not answer yet ({silent.why}): waiting", file=sys.stderr)


def start(name: str, command: Callable[[], Sequence[str]], show: bool) -> int:
    """Become the command, or print it if ``show``; 2 and a line on standard error if refused."""
    try:
        arguments = list(command())
    except Refused as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(shlex.join(arguments), flush=True)
    if not show:
        os.execvp(arguments[0], arguments)  # Flower itself is the container's process 1
    return 0
