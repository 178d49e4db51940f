"""Serves the page of a run on this machine only; the page loads nothing else."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.errors import FedsiloError, RunDirectoryError, SettingError
from fedsilo.models.measures.intervals import Estimate
from fedsilo.pages.page import Picture, render_page, share
from fedsilo.pages.page_pictures import curves, estimates
from fedsilo.reports.watch.view import (
    SITE_COLUMNS,
    Look,
    View,
    Watched,
    epsilon_text,
    phase_text,
    traffic_text,
)
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.progress import bytes_text, clock
from fedsilo.server_app.records.shown import Row

_FOOT = "This page reloads every two seconds. It only reads files; closing it changes nothing."


def watch_page(view: View) -> str:
    """Build the HTML page of a run, or of a deployment and its newest run."""
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
        "hospital": None,
    }
    if view.hospital:
        data["hospital"] = view.hospital.facts()
    return render_page("watch.html", view.title, data, subtitle=view.line(), foot=_FOOT)


def _facts(run: Watched) -> list[tuple[str, str]]:
    """Return the state, round, costs and times of a run as pairs (name, text)."""
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
_RELOAD = 2  # seconds after which the browser reloads the page
_NAMES = ("127.0.0.1", "localhost", "[::1]")


class WatchServer(ThreadingHTTPServer):
    """An HTTP server of the page, which calls ``look`` for each request.

    Port 0 stands for any free port.

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
    """Answers a browser's requests for the page; nothing else can be requested."""

    server: WatchServer
    server_version, sys_version = "fedsilo", ""

    def do_GET(self) -> None:
        """Answer ``/`` with the page and ``/metrics`` with metrics, or with why there are none.

        The answer is 404 for any other path, and 403 for any path if the request's host name is not
        one of this machine's.
        """
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES:
            # A web page of another name that resolves to this address must not read this one
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer()
        elif self.path == "/metrics":
            self._answer_metrics()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer_metrics(self) -> None:
        """Answer with the metrics in Prometheus's text format; they are empty before a run."""
        status = HTTPStatus.OK
        try:
            text = self.server.look().metrics_text()
        except (FedsiloError, OSError) as error:
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, f"# {error}\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

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


_SLOWEST = 10  # largest number of sites in the picture
Lines = Mapping[str, Mapping[int, float]]


def run_curves(folder: Path) -> list[Picture]:
    """Draw the curves of a run so far.

    The list is empty before the first round has been written, and if a file cannot be read because
    it is just being written.
    """
    try:
        metrics, traffic = (folder / "metrics.csv").stat(), (folder / "traffic.csv").stat()
        # Nanoseconds, because two rounds may end within one second
        written = (metrics.st_mtime_ns, traffic.st_mtime_ns)
        return _draw_pictures(folder, written)
    except (OSError, RunDirectoryError):  # rows are being written: the next look has them
        return []


@lru_cache(maxsize=2)
def _draw_pictures(folder: Path, written: tuple[int, ...]) -> list[Picture]:
    """Draw the pictures of a run: accuracy, loss, bytes, and the slowest sites.

    The result is cached until the files change, because the page is loaded every two seconds.

    Args:
        folder: the run directory.
        written: the times when metrics and traffic were last written; a change makes a new picture.
    """
    run = FinishedRun(folder)
    metrics = run.metric_rows
    # A hello belongs to no round of training
    answers = [row for row in run.traffic_rows if row["phase"] != "hello"]
    accuracy = {
        "val": _mean_by_round(metrics, "val", "accuracy"),
        "test": _mean_by_round(metrics, "test", "accuracy"),
    }
    loss = {
        "training": _mean_by_round(metrics, "train", "trained-loss"),
        "val": _mean_by_round(metrics, "val", "loss"),
        "test": _mean_by_round(metrics, "test", "loss"),
    }
    bytes_ = {
        "to the hospitals": _megabytes_by_round(answers, "bytes_down"),
        "from them": _megabytes_by_round(answers, "bytes_up"),
    }
    pictures = [
        _curve("accuracy", accuracy, "accuracy, mean over hospitals", share),
        _curve("loss", loss, "loss in nats, mean over hospitals", share),
        _curve("bytes", bytes_, "MB in a round", "{:.3g}".format),
        _slowest(answers),
    ]
    return [picture for picture in pictures if picture]


def _mean_by_round(rows: list[Row], split: str, metric: str) -> dict[int, float]:
    """Return round -> mean of a metric over the sites that have it in the round."""
    chosen = [row for row in rows if row["split"] == split and row["metric"] == metric]
    means = {}
    for at, values in _group_values(chosen, "round", "value").items():
        means[int(at)] = sum(values) / len(values)
    return means


def _megabytes_by_round(answers: list[Row], column: str) -> dict[int, float]:
    """Return round -> sum of a column of bytes over all messages, in MB."""
    sums = {}
    for at, values in _group_values(answers, "round", column).items():
        sums[int(at)] = sum(values) / 1e6
    return sums


def _group_values(rows: list[Row], key: str, column: str) -> dict[str, list[float]]:
    """Group the numbers in ``column`` by the text in the column ``key``: text -> numbers."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(float(row[column]))
    return groups


def _curve(name: str, lines: Lines, label: str, text_of: Callable[[float], str]) -> Picture | None:
    """Draw over rounds the lines that have values; None if all are empty.

    ``text_of`` formats the last values for readers who cannot see the picture.
    """
    drawn, ends = {}, []
    for title, line in lines.items():
        if line:
            drawn[title] = line
            # max(line) is the last round
            ends.append(f"{title} {text_of(line[max(line)])}")
    if not drawn:
        return None
    svg = curves(f"watch-{name}", drawn, line_styles(list(drawn)), label)
    alt = f"{label} by round. Now: {'; '.join(ends)}."
    return Picture(svg, alt, f"{label[0].upper()}{label[1:]}.")


def _slowest(answers: list[Row]) -> Picture | None:
    """Draw the mean seconds per answer of the ten slowest sites, the slowest first.

    Sites that do not report seconds are left out. The result is None if all are left out.
    """
    # A site that does not report its seconds sends 0
    worked = [row for row in answers if float(row["seconds"])]
    means = {}
    for site, seconds in _group_values(worked, "site", "seconds").items():
        means[site] = sum(seconds) / len(seconds)
    slowest = sorted(means, key=lambda site: -means[site])[:_SLOWEST]
    if not slowest:
        return None
    label = "seconds of work for an answer, mean"
    without = ""
    if len(means) > len(slowest):
        without = f", without {len(means) - len(slowest)} quicker hospitals"
    caption = f"The slowest first{without}: {label}."
    drawn, texts = {}, []
    for site in slowest:
        drawn[site] = Estimate(means[site])
        texts.append(f"{site} {means[site]:.2f}")
    svg = estimates("watch-slow", {"seconds": drawn}, label)
    return Picture(svg, f"{caption} {'; '.join(texts)}.", caption)
