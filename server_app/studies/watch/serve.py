"""Serve the page of a run on the loopback: no other machine sees it, and it loads nothing."""

import errno
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedsilo.models.contract.errors import FedsiloError, SettingError
from fedsilo.server_app.records.progress import bytes_text, clock
from fedsilo.server_app.studies.report.page import (
    Block,
    Facts,
    Pictures,
    Section,
    Table,
    Text,
    page,
)
from fedsilo.server_app.studies.watch.curves import run_curves
from fedsilo.server_app.studies.watch.view import SITE_COLUMNS, Look, View
from fedsilo.server_app.studies.watch.watched import (
    Watched,
    epsilon_text,
    phase_text,
    traffic_text,
)

_FOOT = "This page reloads every two seconds. It only reads files; closing it changes nothing."


def watch_page(view: View) -> str:
    """Return the page."""
    run: list[Block] = [Text(["There has been no run yet."])]
    if view.run:
        run = [Text([view.run.in_words()]), Pictures(run_curves(view.run.folder)), _facts(view.run)]
    sections = [Section("Run", run)]
    if rows := view.site_rows():
        note = "Bytes and seconds of this run so far, as the server counts them."
        sections.append(Section("Sites", [Table("Sites of the run", SITE_COLUMNS, rows, note)]))
    if view.members:
        pairs = [(member, "running" if runs else "down") for member, runs in view.members]
        sections.append(Section("Deployment", [Facts(pairs)]))
    return page(view.title, sections, subtitle=view.line(), foot=_FOOT)


def _facts(run: Watched) -> Facts:
    here, left = run.progress, run.seconds_left
    pairs = [
        ("state", run.state()),
        ("round", f"{here.round} of {here.rounds}, {here.finished_rounds} finished"),
        ("phase", phase_text(here) if here.phase and not run.over else "-"),
        ("left out so far", str(here.left_out)),
        ("bytes", traffic_text(here)),
        ("differential privacy", epsilon_text(here) or "none"),
        ("memory of the server", bytes_text(here.server_memory_bytes)),
        ("time", clock(run.seconds)),
        ("time left", "-" if left is None else f"about {clock(left)}"),
    ]
    return Facts(pairs)


HOST = "127.0.0.1"
_RELOAD = 2  # seconds
_NAMES = ("127.0.0.1", "localhost", "[::1]")


class WatchServer(ThreadingHTTPServer):
    """A server of the page, which calls ``look`` for each request; port 0 is any free one.

    Raises:
        SettingError: the port is in use or not allowed.
    """

    daemon_threads = True

    def __init__(self, port: int, look: Look) -> None:
        self.look = look
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            hint = "in use" if in_use else f"not available ({error.strerror})"
            raise SettingError(f"port {port} is {hint}: choose another --port, or 0") from None
        except OverflowError:
            raise SettingError(f"--port is {port}; it must be from 0 to 65535") from None

    @property
    def address(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "fedsilo", ""

    def do_GET(self) -> None:
        """Answer with the page, or with the reason why there is none."""
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES:
            # A web page of another name that resolves to this address must not read this one
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer()

    def _answer(self) -> None:
        status, csp = HTTPStatus.OK, "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        try:
            text = watch_page(self.server.look())
        except FedsiloError as error:  # a run may be removed and appear again
            status = HTTPStatus.SERVICE_UNAVAILABLE
            text = page("Nothing to watch", [Section("Why", [Text([str(error)])])])
        body = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Refresh", str(_RELOAD)),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", csp),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page that reloads every two seconds would fill the terminal."""
