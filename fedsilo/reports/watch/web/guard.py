"""Refuses requests that another web page could send, and limits what a page may load."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
# Matplotlib's drawings have style attributes; the only script is live.js
_OWN_PAGE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# A file in a run directory may come from somebody else, so it gets this policy
FOREIGN_PAGE = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Wraps the application: checks the host name of each request, and adds headers to replies.

    A request is answered only if its host name is known. Otherwise a foreign web page could read
    these pages, if its name were made to resolve to this machine (DNS rebinding).

    Args:
        app: the application.
        names: the host names that are known; None for any IP address, which a name cannot imitate,
            and for the names of the loopback.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] | None) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one HTTP request, and pass it on to the application or refuse it.

        The reply is 403 for an unknown host name, and 405 for a method other than GET and HEAD.
        Otherwise the application replies, and headers that limit what the page may load are added.
        Connections that are not HTTP are ignored.
        """
        if scope["type"] != "http":
            return
        refusal = self._refuse(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # Only a default, because a file of a run has the stricter FOREIGN_PAGE already
                headers.setdefault("Content-Security-Policy", _OWN_PAGE)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> PlainTextResponse | None:
        """Return the reply that refuses a request, or None if the request may be answered.

        A request whose header ``Host`` has an unknown name gets status 403. If ``names`` is None,
        "localhost" and every IP address are known. Otherwise, only ``names`` are known. A request
        with any other method than GET or HEAD gets status 405.
        """
        host = host_name(Headers(scope=scope).get("host", ""))
        if not self._is_known(host):
            return PlainTextResponse("unknown host name\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("these pages are only read\n", 405)
        return None

    def _is_known(self, host: str) -> bool:
        if self.names is not None:
            return host in self.names
        return host in LOOPBACK_NAMES or is_address(host)


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case, without the port and without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_address(host: str) -> bool:
    """Tell whether a host name, without brackets and port, is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
