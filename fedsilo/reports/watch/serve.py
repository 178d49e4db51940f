"""Serve the page of a run on the loopback: no other machine sees it, and it loads nothing."""

import errno
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.pages.page import render_page
from fedsilo.reports.watch.curves import run_curves
from fedsilo.reports.watch.view import SITE_COLUMNS, Look, View
from fedsilo.reports.watch.watched import (
    Watched,
    epsilon_text,
    phase_text,
    traffic_text,
)
from fedsilo.server_app.records.progress import bytes_text, clock

_FOOT = "This page reloads every two seconds. It only reads files; closing it changes nothing."


def watch_page(view: View) -> str:
    """Build the page of a run or a deployment."""
    run = None
    if view.run:
        run = {
            "in_words": view.run.in_words(),
            "curves": run_curves(view.run.folder),
            "facts": _facts(view.run),
        }
    members = []
    for member, is_running in view.members:
        members.append((member, "running" if is_running else "down"))
    data = {
        "run": run,
        "site_columns": SITE_COLUMNS,
        "sites": view.site_rows(),
        "members": members,
    }
    return render_page("watch.html", view.title, data, subtitle=view.line(), foot=_FOOT)


def _facts(run: Watched) -> list[tuple[str, str]]:
    progress = run.progress
    phase = time_left = "-"
    if progress.phase and not run.over:
        phase = phase_text(progress)
    if run.seconds_left is not None:
        time_left = f"about {clock(run.seconds_left)}"
    return [
        ("state", run.state()),
        ("round", f"{progress.round} of {progress.rounds}, {progress.finished_rounds} finished"),
        ("phase", phase),
        ("left out so far", str(progress.left_out)),
        ("bytes", traffic_text(progress)),
        ("differential privacy", epsilon_text(progress) or "none"),
        ("memory of the server", bytes_text(progress.server_memory_bytes)),
        ("time", clock(run.seconds)),
        ("time left", time_left),
    ]


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
            hint = f"not available ({error.strerror})"
            if error.errno == errno.EADDRINUSE:
                hint = "in use"
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
            text = render_page("notice.html", "Nothing to watch", {"why": str(error)})
        body = text.encode()
        # The page reloads by a header, since it runs no script; the browser loads nothing else
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
