"""The server of the pages: its port, its end, and the pages in a real browser."""

import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.reports.watch.live_curves import draw_pictures
from fedsilo.reports.watch.run_folder import look_for
from fedsilo.reports.watch.view import look_at
from fedsilo.reports.watch.web.serve import WatchServer
from fedsilo.server_app.records.progress import SiteProgress
from tests.fedsilo.reports.watch.made_runs import measured_run
from tests.fedsilo.reports.watch.test_view import written
from tests.support.browser import chromium

NASTY = "<img src=/x onerror=window.hacked=1><script>window.hacked=1</script>"
_WIDTHS = (1200, 390)
_WIDER_THAN_THE_WINDOW = "document.documentElement.scrollWidth - window.innerWidth"
_NAMELESS = """[...document.querySelectorAll('select, img, svg, a')].filter(one =>
  !(one.labels?.length || one.alt || one.textContent.trim() || one.querySelector('img'))).length"""
Served = Callable[[Path], tuple[WatchServer, Thread]]


@pytest.fixture
def served() -> Iterator[Served]:
    """Return a function that serves a folder on a free port, and stop it at the end."""
    running: list[tuple[WatchServer, Thread]] = []

    def serve(folder: Path) -> tuple[WatchServer, Thread]:
        server = WatchServer(0, look_for(folder))
        thread = Thread(target=server.serve, daemon=True)
        thread.start()
        running.append((server, thread))
        return server, thread

    yield serve
    for server, thread in running:
        server.stop()
        thread.join(10)


def test_a_port_or_an_address_that_cannot_be_used_is_one_line(
    tmp_path: Path, served: Served
) -> None:
    look = look_for(tmp_path)
    server, _ = served(tmp_path)
    port = int(server.address.rstrip("/").rpartition(":")[2])
    assert server.address == f"http://127.0.0.1:{port}/"
    assert server.is_local
    with pytest.raises(SettingError, match=f"port {port} is in use"):
        WatchServer(port, look)
    for port in (-1, 70000):
        with pytest.raises(SettingError, match="from 0 to 65535"):
            WatchServer(port, look)
    for host in ("192.0.2.1", "no such name", ""):
        with pytest.raises(SettingError, match="--address"):
            WatchServer(0, look, host)


def test_it_ends_although_a_page_is_open(tmp_path: Path, served: Served) -> None:
    server, thread = served(tmp_path)
    with urllib.request.urlopen(f"{server.address}events?page=/", timeout=20) as stream:
        assert stream.readline().startswith(b"retry")
        server.stop()
        assert stream.read() is not None
    thread.join(10)
    assert not thread.is_alive()


def test_pages_in_a_browser_follow_a_run_and_run_no_foreign_script(
    tmp_path: Path, served: Served
) -> None:
    sites = {"north": SiteProgress(), NASTY: SiteProgress()}
    seen: dict[str, Any] = {"sites": sites, "asked": [NASTY], "failed": {NASTY: NASTY}}
    run = measured_run(tmp_path / "live", [(0.5, 0.5)], **seen)
    measured_run(tmp_path / "other", [(0.5, 0.75)], seed=5, title=NASTY)
    server, _ = served(tmp_path)
    with chromium() as browser:
        context = browser.new_context()
        asked: list[str] = []
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        for width in _WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for path in ("", "compare?a=live&b=other"):
                page.goto(f"{server.address}{path}")
                page.wait_for_selector("#connection:has-text('Live')")
                assert page.evaluate(_WIDER_THAN_THE_WINDOW) <= 0
                assert page.evaluate(_NAMELESS) == 0
        page.goto(f"{server.address}run?name=live")
        page.wait_for_selector("#connection:has-text('Live')")
        shutil.rmtree(run)
        measured_run(run, [(0.5, 0.5), (0.75, 1.0)], state="finished", **seen)
        page.wait_for_selector("#now .badge.finished")
        page.wait_for_selector("#sites td:has-text('0.875')")
        assert page.evaluate("window.hacked") is None
        server.stop()
        page.wait_for_selector("#connection.lost")
    assert all(url.startswith(server.address) for url in asked)


_ANSWERS = [("north", 1, 1.0), ("south", 1, 3.0), ("north", 2, 2.0)]
_VALUES = [("north", 0, 0.4), ("south", 0, 0.6), ("north", 1, 0.7), ("south", 1, 0.8)]


def test_curves_are_means_over_hospitals_and_sums_over_a_round() -> None:
    answers, rows = [], []
    for site, number, seconds in _ANSWERS:
        answer = {"site": site, "round": str(number), "seconds": str(seconds)}
        answers.append(answer | {"bytes_down": "1000000", "bytes_up": "500000"})
    for site, number, value in _VALUES:
        row = {"round": str(number), "site": site, "split": "test", "metric": "accuracy"}
        rows.append(row | {"value": str(value)})
    accuracy, bytes_, slow = draw_pictures(rows, answers)
    assert accuracy.alt.endswith("now: test 0.750.")
    assert bytes_.alt.endswith("now: to the hospitals 1; from them 0.5.")
    assert slow.alt.endswith("south 3.00; north 1.50.")
    assert draw_pictures([], []) == []


def test_state_in_words_names_whom_the_run_waits_for(tmp_path: Path) -> None:
    assert look_at(written(tmp_path / "trial")).in_words() == (
        "The run is in round 2 of 3; 1 of 3 hospitals have answered; it waits for east, south; of "
        "these south is not connected; about 1:05 are left."
    )
    finished = written(tmp_path / "over", state="finished", finished_rounds=3)
    assert look_at(finished).in_words() == "The run is finished after 3 rounds."
    gone = look_at(written(tmp_path / "gone", process_started=1.0)).in_words()
    assert gone.startswith("The run is over: its process was killed")
