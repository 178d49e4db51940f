"""What both entry points check before Flower starts, by ``fedsilo doctor``; one clear line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsilo.server_app.doctor.findings import Refused
from fedsilo.server_app.doctor.secrets import (
    OPENSSH_KEY,
    certificate,
    data_folder,
    matching_key,
    secret,
    site_file,
    writable_folder,
)
from fedsilo.server_app.doctor.wire import Silent
from fedsilo.server_app.doctor.wire import handshake as answering_handshake

__all__ = [
    "OPENSSH_KEY",
    "Refused",
    "certificate",
    "data_folder",
    "handshake",
    "matching_key",
    "secret",
    "site_file",
    "start",
    "writable_folder",
]


def handshake(address: str, authority: Path) -> None:
    """Refuse a server whose certificate does not hold: Flower itself would try again for ever.

    A server that does not answer yet is Flower's to wait for.

    Args:
        address: of the Fleet API, host:port.
        authority: the certificate that must have signed the server's.

    Raises:
        Refused: it ended, it is another host's or another authority's, or no TLS is spoken there.
    """
    try:
        answering_handshake(address, authority)
    except Silent as silent:
        print(f"server {address} does not answer yet ({silent.why}): waiting", file=sys.stderr)


def start(name: str, command: Callable[[], Sequence[str]], show: bool) -> int:
    """Become the command, or print it if ``show``; 2 and a line if it is refused."""
    try:
        arguments = list(command())
    except Refused as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(" ".join(_quoted(argument) for argument in arguments), flush=True)
    if not show:
        os.execvp(arguments[0], arguments)  # Flower itself is the container's process 1
    return 0


def _quoted(argument: str) -> str:
    return f"'{argument}'" if " " in argument or '"' in argument else argument
