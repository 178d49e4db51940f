"""The web application of ``fedsilo watch --port``: its pages, files, reports and events.

Requests only read. A page is rendered on one thread at a time, so watching never takes more than
one core from a run on the same machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from threading import Lock
from urllib.parse import parse_qsl, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from fedsilo.core.errors import FedsiloError, RunDirectoryError, SettingError
from fedsilo.pages.page import template_text
from fedsilo.reports.watch.list_page import list_page
from fedsilo.reports.watch.live_page import render_live
from fedsilo.reports.watch.run_folder import MEDIA_TYPES, RunFolder, merge_metrics
from fedsilo.reports.watch.run_page import run_page
from fedsilo.reports.watch.side_by_side import side_by_side_page
from fedsilo.reports.watch.view import Look, look_at_run
from fedsilo.reports.watch.web.daemon_thread import on_daemon_thread
from fedsilo.reports.watch.web.events import follow_page
from fedsilo.reports.watch.web.guard import FOREIGN_PAGE, Guard

Query = Mapping[str, str]


@dataclass(frozen=True)
class Rendered:
    """A page as HTML, with its HTTP status."""

    html: str
    status: int = 200


class WatchPages:
    """Renders the pages of a run, a folder of runs, a deployment or a hospital.

    Args:
        look: reads the state that the first page shows.

    Raises:
        FedsiloError: there is nothing to watch now.
    """

    def __init__(self, look: Look) -> None:
        self.look = look
        self._drawing = Lock()
        view = look()
        self.lists_runs = view.runs is not None
        # A single run has no list; a deployment's runs have one behind its first page
        self.has_list = self.lists_runs or bool(view.members)
        self.runs = None
        folder = view.folder
        if folder is None and view.run is not None:
            folder = view.run.folder
        if folder is not None:
            self.runs = RunFolder(folder)

    def render(self, path: str, query: Query) -> Rendered:
        """Render the page at an address, or a notice that says why it cannot be shown.

        Args:
            path: ``/``, ``/runs``, ``/run``, ``/compare`` or ``/report``.
            query: the parameters of the address. ``/run`` takes the ``name`` of a run. ``/compare``
                takes the names ``a`` and ``b`` of two runs. ``/report`` takes ``reader``
                ("research", "clinic" or "dpo"), the ``name`` of a run, and optionally ``other``,
                the name of a second run.

        Returns:
            The page with status 200, or a notice. A notice has status 503 for ``/`` and ``/runs``,
            and 404 for any other address.
        """
        pages: Mapping[str, Callable[[Query], str]] = {
            "/": self._first_page,
            "/runs": self._list_page,
            "/run": self._run_page,
            "/compare": self._two_runs_page,
            "/report": self._report_page,
        }
        status = 404
        if path in ("/", "/runs"):
            status = 503
        build = pages.get(path)
        if build is None:
            return self._notice(f"There is no page {path}.", status)
        try:
            # Drawing changes matplotlib's settings, so another thread must not draw meanwhile
            with self._drawing:
                return Rendered(build(query))
        except (FedsiloError, OSError) as error:
            return self._notice(str(error), status)

    def _notice(self, why: str, status: int) -> Rendered:
        """Render a page that says why there is nothing else to show."""
        title, data = "Nothing to watch", {"why": why}
        return Rendered(render_live("notice.html", title, data, has_list=self.has_list), status)

    def metrics(self) -> Response:
        """Return the metrics as plain text in Prometheus's format.

        For a folder of runs, they are the metrics of all running runs. Otherwise they are those of
        the shown run, of the deployment's members, and of the hospital's node. If there are none of
        these, the text is empty. If the metrics cannot be read, the response has status 503, and a
        comment with the error.
        """
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        try:
            text = self._metrics_text()
        except (FedsiloError, OSError) as error:
            return Response(f"# {error}\n", 503, media_type=media_type)
        return Response(text, media_type=media_type)

    def _metrics_text(self) -> str:
        if self.lists_runs:
            return merge_metrics(self._folder())
        return self.look().metrics_text()

    def file(self, query: Query) -> Response:
        """Return a picture or a report of a run as a response.

        A header forbids scripts in the file, unless it is a PDF. If the run or the file does not
        exist or cannot be read, the response has status 404 and the error as plain text.

        Args:
            query: the parameters of the address: ``name``, the run, and ``file``, the file's name.
        """
        name, file = query.get("name", ""), query.get("file", "")
        try:
            content = self._folder().read_file(name, file)
        except (FedsiloError, OSError) as error:
            return Response(f"{error}\n", 404, media_type="text/plain; charset=utf-8")
        # The run may come from somebody else, so a page or a drawing in it must not run scripts
        headers = {"Content-Security-Policy": FOREIGN_PAGE}
        suffix = PurePath(file).suffix
        if suffix == ".pdf":  # a browser's own viewer does not work in a sandbox
            headers = {}
        return Response(content, headers=headers, media_type=MEDIA_TYPES[suffix])

    def _folder(self) -> RunFolder:
        """Return the folder with the runs that the pages show.

        Raises:
            RunDirectoryError: the pages show a hospital's node, which has no runs of its own.
        """
        if self.runs is None:
            raise RunDirectoryError("a hospital's node has no run directories: ask the server")
        return self.runs

    def _first_page(self, query: Query) -> str:
        if self.lists_runs:
            return self._list_page(query)
        return run_page(self.look(), self.runs, has_list=self.has_list)

    def _list_page(self, query: Query) -> str:
        return list_page(self._folder())

    def _run_page(self, query: Query) -> str:
        folder = self._folder()
        path = folder.find(query.get("name", ""))
        return run_page(look_at_run(path), folder, has_list=self.has_list)

    def _two_runs_page(self, query: Query) -> str:
        names = [query.get("a", ""), query.get("b", "")]
        return side_by_side_page(self._folder(), names)

    def _report_page(self, query: Query) -> str:
        # Reports bring PyTorch and Flower, which the other pages do not need
        from fedsilo.reports.report import READERS, report

        folder, reader = self._folder(), query.get("reader", "")
        if reader not in READERS:
            raise SettingError(f"no report is for this reader: choose one of {', '.join(READERS)}")
        names = [query[key] for key in ("name", "other") if key in query]
        return report([folder.find(name) for name in names], reader)


def make_app(
    pages: WatchPages, names: Collection[str] | None, is_over: Callable[[], bool]
) -> Starlette:
    """Build the web application, which answers requests for pages, files, metrics and events.

    Pages are rendered on a daemon thread, so a slow page does not delay other requests. An open
    page gets its changed sections as a stream of events.

    Args:
        pages: renders the pages.
        names: the host names under which the pages may be requested. None allows "localhost" and
            any IP address.
        is_over: tells whether the server is ending. Open streams of events then end too.
    """

    async def page(request: Request) -> Response:
        rendered = await on_daemon_thread(pages.render, request.url.path, request.query_params)
        return HTMLResponse(rendered.html, rendered.status)

    async def file(request: Request) -> Response:
        return await on_daemon_thread(pages.file, request.query_params)

    async def metrics(request: Request) -> Response:
        return await on_daemon_thread(pages.metrics)

    async def script(request: Request) -> Response:
        return Response(template_text("live.js"), media_type="text/javascript; charset=utf-8")

    async def events(request: Request) -> Response:
        asked = urlsplit(request.query_params.get("page", "/"))
        query = dict(parse_qsl(asked.query))

        async def render() -> str:
            return (await on_daemon_thread(pages.render, asked.path, query)).html

        stream: AsyncIterator[str] = follow_page(render, is_over)
        return StreamingResponse(stream, media_type="text/event-stream")

    routes = [
        Route("/live.js", script),
        Route("/events", events),
        Route("/file", file),
        Route("/metrics", metrics),
        Route("/{any:path}", page),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, names=names)])
