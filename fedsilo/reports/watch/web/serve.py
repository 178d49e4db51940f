"""Serves the pages of ``fedsilo watch --port``, by default on this machine only."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Collection

import uvicorn

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import quote_value
from fedsilo.reports.watch.view import Look
from fedsilo.reports.watch.web.app import WatchPages, make_app
from fedsilo.reports.watch.web.guard import LOOPBACK_NAMES, is_address

HOST = "127.0.0.1"
_LAST_PORT = 65535
_GRACE = 1  # seconds that an answer may take after Ctrl-C


class WatchServer:
    """An HTTP server of the pages.

    Attributes:
        address: the address of the first page.
        is_local: whether only this machine can reach it.

    Args:
        port: the port; 0 stands for any free port.
        look: reads the state.
        host: the address of this machine at which the pages are served.

    Raises:
        SettingError: the port is in use or not allowed, or ``host`` is not an address of this
            machine.
        FedsiloError: there is nothing to watch now.
    """

    def __init__(self, port: int, look: Look, host: str = HOST) -> None:
        pages = WatchPages(look)
        self._socket = _open_socket(host, port)
        bound, port = self._socket.getsockname()[:2]
        shown = f"[{bound}]" if ":" in bound else bound
        self.address = f"http://{shown}:{port}/"
        self.is_local = ipaddress.ip_address(bound).is_loopback
        names = _known_names(host, bound)
        # A function, because the server is made only below, from the application
        app = make_app(pages, names, lambda: self._server.should_exit)
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Answer requests until Ctrl-C or a call of ``stop``, and then close the socket.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C. All connections are already closed.
        """
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End ``serve``, from another thread."""
        self._server.should_exit = True


def _open_socket(host: str, port: int) -> socket.socket:
    """Open the socket on which the page server listens for requests.

    Port 0 stands for any free port. A port can be used again as soon as an earlier server on it has
    ended.

    Raises:
        SettingError: the port is out of range, in use or closed to this user, or ``host`` is not an
            address of this machine.
    """
    if not 0 <= port <= _LAST_PORT:
        raise SettingError(f"--port is {port}; it must be from 0 to {_LAST_PORT}")
    listening = None
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        # A port is free at once after a server has ended, although its connections linger
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        raise SettingError(_describe_fault(host, port, error)) from None
    return listening


def _describe_fault(host: str, port: int, error: OSError | UnicodeError) -> str:
    """Explain in one line why a server could not use an address, and suggest a remedy.

    If the port is in use, or if the user has no permission to open it, the text suggests another
    port. For every other error, the text says that the address is not one of this machine.
    """
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return f"port {port} is in use: choose another --port, or 0"
    if code == errno.EACCES:
        return f"port {port} is not available ({os.strerror(code)}): choose another --port, or 0"
    return (
        f"{quote_value(host)} is not an address of this machine: name one that it has, or leave "
        "--address out"
    )


def _known_names(host: str, bound: str) -> Collection[str] | None:
    """Choose the host names that a request may have in its header ``Host``.

    The server refuses other names, because another web page may send such requests (DNS rebinding).
    If ``host`` is an IP address and ``bound`` is not a loopback address, the result is None. Any IP
    address and "localhost" are then allowed. Otherwise the result has the loopback names, such as
    "localhost", ``bound``, and ``host`` in lower case.

    Args:
        host: the address or name that the user gave.
        bound: the IP address on which the socket listens.
    """
    if is_address(host) and not ipaddress.ip_address(bound).is_loopback:
        return None
    return {*LOOPBACK_NAMES, bound, host.lower()}
