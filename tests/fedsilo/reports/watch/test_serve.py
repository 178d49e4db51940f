"""The page of a watched run: on the loopback, escaped, and the same in a real browser."""

import http.client
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.reports.watch import serve
from fedsilo.reports.watch.serve import WatchServer, run_curves, watch_page
from fedsilo.reports.watch.view import Look, look_at, look_at_run
from fedsilo.server_app.records.progress import FILE, SiteProgress
from tests.fedsilo.reports.watch.test_view import written
from tests.support.browser import PHONE, browser, picture, rendered

NASTY = "<script>alert(1)</script>&\"'"
Served = Callable[[Look], WatchServer]


@pytest.fixture
def served() -> Iterator[Served]:
    """Return a function that serves what is seen, on a free port."""
    servers: list[WatchServer] = []

    def serve(look: Look) -> WatchServer:
        servers.append(WatchServer(0, look))
        Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def _page(server: WatchServer) -> str:
    with urllib.request.urlopen(server.address, timeout=10) as answer:
        assert answer.headers["Refresh"] == "2"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        return str(answer.read().decode())


def test_the_page_says_what_the_line_says_and_follows_the_run(
    tmp_path: Path, served: Served
) -> None:
    server = served(partial(look_at_run, written(tmp_path / "trial")))
    assert "train: 1 of 3 answered, away: south" in _page(server)
    written(tmp_path / "trial", round=3, answered=["north", "south"], away=[])
    assert "train: 2 of 3 answered" in _page(server)
    assert server.address.startswith("http://127.0.0.1:")


def test_nothing_that_a_run_says_becomes_html(tmp_path: Path, served: Served) -> None:
    sites = {NASTY: SiteProgress()}
    run = written(tmp_path / "trial", title=NASTY, phase=NASTY, asked=[NASTY], sites=sites)
    text = _page(served(partial(look_at_run, run)))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text), "nothing is fetched"


def test_a_run_that_is_gone_is_told_and_may_come_back(tmp_path: Path, served: Served) -> None:
    server = served(partial(look_at_run, written(tmp_path / "trial")))
    (tmp_path / "trial" / FILE).unlink()
    with pytest.raises(urllib.error.HTTPError) as refused:
        _page(server)
    assert refused.value.code == 503
    assert "has no progress.json" in refused.value.read().decode()
    written(tmp_path / "trial")
    assert "1 of 3 answered" in _page(server)


@pytest.mark.parametrize(
    ("path", "host", "code"),
    [("/", None, 200), ("/", "evil.example:80", 403), ("/../etc/passwd", None, 404)],
)
def test_it_answers_one_path_under_its_own_names(
    tmp_path: Path, served: Served, path: str, host: str | None, code: int
) -> None:
    server = served(partial(look_at_run, written(tmp_path / "trial")))
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    assert connection.getresponse().status == code
    connection.close()


def test_a_port_in_use_is_one_line(tmp_path: Path, served: Served) -> None:
    look = partial(look_at_run, written(tmp_path / "trial"))
    port = served(look).server_address[1]
    with pytest.raises(SettingError, match=f"port {port} is in use: choose another --port"):
        WatchServer(port, look)
    with pytest.raises(SettingError, match="from 0 to 65535"):
        WatchServer(70000, look)


def test_a_browser_shows_it_looks_again_and_runs_no_script(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_RELOAD", 1)
    looks: list[float] = []
    run = written(tmp_path / "trial", title=NASTY)

    def look() -> object:
        looks.append(time.monotonic())
        return look_at_run(run)

    server = served(look)  # type: ignore[arg-type]  # it returns what look_at_run does
    document = rendered(server.address, tmp_path / "browser")
    assert "train: 1 of 3 answered, away: south" in document
    assert "<script" not in document
    shown = picture(server.address, tmp_path / "page.png", PHONE, tmp_path / "browser")
    assert len(shown) > 5000, "a blank page is smaller"
    looks.clear()
    command = [*browser(), f"--user-data-dir={tmp_path / 'open'}", "--remote-debugging-port=0"]
    opened = subprocess.Popen(
        [*command, server.address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        limit = time.monotonic() + 60
        while len(looks) < 3 and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        opened.terminate()
        opened.wait()
    assert len(looks) >= 3, "the page looks again by itself"


_TRAFFIC = """round,phase,site,bytes_down,bytes_up,seconds,steps,samples
1,hello,north,10,10,0.0,0,0
1,train,north,1000000,500000,1.0,2,8
1,train,south,1000000,500000,3.0,2,8
2,train,north,1000000,500000,2.0,2,8
"""
_METRICS = """round,site,split,metric,value
0,north,test,accuracy,0.4
0,south,test,accuracy,0.6
1,north,test,accuracy,0.7
1,south,test,accuracy,0.8
"""


def test_run_curves_are_means_over_hospitals_and_sums_over_a_round(tmp_path: Path) -> None:
    (tmp_path / "traffic.csv").write_text(_TRAFFIC)
    (tmp_path / "metrics.csv").write_text(_METRICS)
    accuracy, bytes_, slow = run_curves(tmp_path)
    assert accuracy.alt.endswith("Now: test 0.750.")
    assert bytes_.alt.endswith("Now: to the hospitals 1; from them 0.5.")
    assert slow.alt.endswith("south 3.00; north 1.50.")


def test_run_curves_before_the_first_round_or_within_a_write_are_none(tmp_path: Path) -> None:
    assert run_curves(tmp_path) == []
    (tmp_path / "traffic.csv").write_text(_TRAFFIC)
    (tmp_path / "metrics.csv").write_text(_METRICS + "1,north,te")
    assert run_curves(tmp_path) == []


def test_state_in_words_names_whom_the_run_waits_for(tmp_path: Path) -> None:
    assert look_at(written(tmp_path / "trial")).in_words() == (
        "The run is in round 2 of 3; 1 of 3 hospitals have answered; it waits for east, south; of "
        "these south is not connected; about 1:05 are left."
    )
    finished = written(tmp_path / "over", state="finished", finished_rounds=3)
    assert look_at(finished).in_words() == "The run is finished after 3 rounds."
    gone = look_at(written(tmp_path / "gone", process_started=1.0)).in_words()
    assert gone.startswith("The run is over: its process was killed")


def test_watch_page_of_a_run_has_its_curves(hearts: Path, tmp_path: Path) -> None:
    run = shutil.copytree(hearts / "fedavg-seed0", tmp_path / "run")
    html = watch_page(look_at_run(run))
    assert html.count("<svg") == 4
    assert "The slowest first" in html
