"""The pages of ``fedsilo watch --port``: what they show, and what nobody gets from them."""

import os
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fedsilo.reports.watch.live_curves import draw_pictures
from fedsilo.reports.watch.live_page import split_sections
from fedsilo.reports.watch.run_folder import look_for
from fedsilo.reports.watch.view import View, look_at
from fedsilo.reports.watch.web.app import WatchPages, make_app
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.progress import FILE, SiteProgress
from fedsilo.server_app.records.run_directory import config_document
from tests.fedsilo.reports.watch.made_runs import add_rows, measured_run
from tests.fedsilo.reports.watch.test_view import written

NASTY = "<script>alert(1)</script>&\"'"
HALF = [(0.25, 0.75), (0.5, 0.75)]  # north and south in two rounds: means 0.5 and 0.625
Open = Callable[[Path], TestClient]


def client_of(folder: Path) -> TestClient:
    """Return a client of the pages of a folder, under a name of the loopback."""
    app = make_app(WatchPages(look_for(folder)), {"localhost"}, lambda: False)
    return TestClient(app, base_url="http://localhost:8020")


def states(html: str) -> list[str]:
    """Return the states on the page of all runs, from its first row to its last."""
    return re.findall(r'class="badge (\w+)"', html)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a run of each kind."""
    measured_run(tmp_path / "live", HALF)
    measured_run(tmp_path / "done" / "first", [*HALF, (1.0, 0.5)], seed=4, state="finished")
    measured_run(tmp_path / "killed", HALF, process_started=1.0)
    measured_run(tmp_path / "failed", [(0.0, 0.0)], state="failed", why=f"site {NASTY}")
    for name, text in (("older", '{"version": 7}'), ("damaged", '{"vers'), ("empty", "")):
        (measured_run(tmp_path / name, HALF) / FILE).write_text(text)
    (measured_run(tmp_path / "no-progress", HALF) / FILE).unlink()
    return tmp_path


def test_list_has_a_line_for_every_run_however_damaged(folder: Path) -> None:
    client = client_of(folder)
    assert "test accuracy" not in client.get("/").text, "the first page does not wait for metrics"
    html = client.get("/").text
    assert sorted(states(html)) == [
        *("failed", "finished", "interrupted", "running"),
        *["unreadable"] * 4,
    ]
    assert html.count("test accuracy 0.625") == 2
    assert html.count("test accuracy 0.750") == 1
    linked = re.findall(r'href="(/run\?[^"]*)"', html)
    assert len(linked) == 4
    for address in linked:
        assert client.get(unescape(address)).status_code == 200


def test_an_empty_folder_is_watched_until_it_has_runs(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    assert states(client.get("/").text) == []
    measured_run(tmp_path / "new", HALF)
    assert states(client.get("/").text) == ["running"]


def test_a_folder_that_was_deleted_is_told_and_may_come_back(folder: Path) -> None:
    client = client_of(folder)
    shutil.rmtree(folder)
    assert client.get("/").status_code == 503
    assert client.get("/run", params={"name": "live"}).status_code == 404
    assert client.get("/metrics").status_code == 503
    measured_run(folder / "live", HALF)
    assert client.get("/").status_code == 200
    assert client.get("/run", params={"name": "live"}).status_code == 200


def test_page_of_a_run_has_its_curves_and_the_state_of_its_sites(folder: Path) -> None:
    sections = split_sections(client_of(folder).get("/run", params={"name": "live"}).text)
    assert sections["learning-curves"].count("<svg") == 3  # accuracy, bytes, seconds
    assert "Test accuracy" in sections["learning-curves"]
    assert "asked to train" in sections["sites"]
    assert re.search(r"mean</th>\s*<td[^>]*>0.625", sections["sites"])
    assert "/report" not in sections["reports"], "the run has not ended"


def test_damaged_tables_leave_the_rest_of_the_page(folder: Path) -> None:
    client = client_of(folder)
    (folder / "live" / "metrics.csv").write_text("round,site\n1,no")
    (folder / "live" / "failures.jsonl").write_text("{")
    page = client.get("/run", params={"name": "live"})
    assert page.status_code == 200
    assert "<svg" not in page.text
    assert "metrics.csv" in split_sections(page.text)["learning-curves"]
    assert client.get("/").status_code == 200
    add_rows(folder / "live", HALF)
    assert "<svg" in client.get("/run", params={"name": "live"}).text


def test_two_runs_are_compared_site_by_site(folder: Path) -> None:
    client = client_of(folder)
    both = client.get("/compare", params={"a": "live", "b": "done/first"})
    sections = split_sections(both.text)
    rows = re.findall(r'<th scope="row">(\w+)</th>\s*((?:<td.*</td>\s*)+)', sections["sites"])
    cells = {site: re.findall(r">([^<]+)</td>", text) for site, text in rows}
    assert cells["north"] == ["0.500", "1.000", "+0.500"]
    assert cells["south"] == ["0.750", "0.500", "-0.250"]
    assert cells["mean"] == ["0.625", "0.750", "+0.125"]
    assert "seed" in sections["settings"]
    assert "<svg" in sections["learning-curves"]
    assert client.get("/compare", params={"a": "live"}).status_code == 404
    (folder / "live" / "config.toml").write_text("format = 99\n")
    assert client.get("/compare", params={"a": "live", "b": "done/first"}).status_code == 200


def test_runs_without_the_same_measurements_are_compared_by_their_facts(folder: Path) -> None:
    client = client_of(folder)

    def compare(one: str, other: str) -> dict[str, str]:
        answer = client.get("/compare", params={"a": one, "b": other})
        assert answer.status_code == 200
        return split_sections(answer.text)

    again = compare("live", "live")
    assert "live again" in again["learning-curves"]
    (folder / "killed" / "metrics.csv").unlink()
    without = compare("live", "killed")
    assert "interrupted" in "".join(without.values())
    for sections in (without, compare("killed", "live")):
        assert "<svg" not in sections["learning-curves"]
        assert '<th scope="row">north' not in sections["sites"]
    # The other run has measured validation samples only, and another method's settings
    rows = "round,site,split,metric,value\n0,north,val,accuracy,0.5\n"
    (folder / "live" / "metrics.csv").write_text(rows)
    other = resolve({"method": "fedprox", "dataset": "digits", "seed": 3})
    (folder / "live" / "config.toml").write_text(config_document(other, {}))
    sections = compare("live", "done/first")
    assert "<svg" not in sections["learning-curves"]
    assert "fedprox.proximal-mu" in sections["settings"]


def test_only_pictures_and_reports_of_a_listed_run_are_served(folder: Path) -> None:
    client, run = client_of(folder), folder / "live"
    secret = folder.parent / "secret.png"
    secret.write_bytes(b"secret")
    (run / "curves.png").write_bytes(b"picture")
    (run / "linked.png").symlink_to(secret)
    os.mkfifo(run / "pipe.png")
    (run / "page.html").write_text("<script>alert(1)</script>")

    def get(name: str, file: str) -> int:
        return client.get("/file", params={"name": name, "file": file}).status_code

    assert get("live", "curves.png") == 200
    assert get("live", "metrics.csv") == 404, "it has metrics that no page shows"
    for file in ("linked.png", "pipe.png", "../../secret.png", str(secret), "", "."):
        assert get("live", file) == 404
    for name in ("..", ".", "", str(folder / "live"), "../" + folder.name, "live/../live"):
        assert get(name, "curves.png") == 404
    assert client.get("/..%2f..%2fsecret.png").status_code == 404
    page = client.get("/file", params={"name": "live", "file": "page.html"})
    assert page.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
    (folder / "away").symlink_to(folder.parent)
    assert get("away", "secret.png") == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:9", 200), ("evil.example:80", 403), ("", 403)],
)
def test_only_its_own_names_are_answered(folder: Path, host: str, status: int) -> None:
    client = client_of(folder)
    for path in ("/", "/metrics", "/live.js", "/file", "/events"):
        if status == 403 or path in ("/", "/live.js"):
            assert client.get(path, headers={"Host": host}).status_code == status


def test_any_address_but_no_name_is_answered_where_all_addresses_are_served(folder: Path) -> None:
    app = make_app(WatchPages(look_for(folder)), None, lambda: False)
    client = TestClient(app)
    for host, status in (("10.0.0.7:80", 200), ("[fd00::1]:80", 200), ("evil.example", 403)):
        assert client.get("/live.js", headers={"Host": host}).status_code == status


def test_pages_are_only_read_and_load_nothing_else(folder: Path) -> None:
    client = client_of(folder)
    assert client.post("/").status_code == 405
    for path in ("/", "/compare?a=failed&b=failed", "/nowhere"):
        page = client.get(path)
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "http" not in policy
        assert page.headers["Cache-Control"] == "no-store"
        assert re.findall(r"<script[^>]*>", page.text) == ['<script src="/live.js" defer>']
        assert not re.search(r'(?:src|href|action)="(?![/#]|data:)', page.text)


def test_nothing_that_a_site_says_becomes_html(tmp_path: Path) -> None:
    said = {
        "title": NASTY,
        "phase": NASTY,
        "asked": [NASTY],
        "failed": {NASTY: NASTY},
        "sites": {NASTY: SiteProgress()},
    }
    run = measured_run(tmp_path / "sent", HALF, method=NASTY, dataset=NASTY, **said)
    entry = '{"round": 1, "phase": "train", "site": "<script>", "code": "site", "cause": "<img>"}'
    (run / "failures.jsonl").write_text(entry + "\n")
    measured_run(tmp_path / "<script>", HALF, state="failed", why=NASTY)
    client = client_of(tmp_path)
    for path in ("/", "/", "/run?name=sent", "/compare?a=sent&b=sent", "/run?name=<script>"):
        page = client.get(path)
        assert page.status_code == 200
        assert page.text.count("<script") == 1, "live.js"
        assert "<img>" not in page.text
        assert "&lt;" in page.text
    answers = [{"site": NASTY, "round": "1", "bytes_down": "1", "bytes_up": "1", "seconds": "1"}]
    rows = [{"site": NASTY, "round": "1", "split": "test", "metric": "loss", "value": "1"}]
    for picture in draw_pictures(rows, answers):
        assert "<script" not in picture.svg


def test_metrics_of_a_folder_are_those_of_its_running_runs(folder: Path) -> None:
    measured_run(folder / "second", HALF, seed=9)
    text = client_of(folder).get("/metrics").text
    assert text.count("# TYPE fedsilo_run_rounds gauge") == 1
    assert re.findall(r'fedsilo_run_rounds{run="(\w+)"}', text) == ["second", "live"]


def test_a_single_run_and_a_deployment_have_pages_of_their_own(tmp_path: Path) -> None:
    run = written(tmp_path / "trial")
    client = client_of(run)
    assert "1 of 3 hospitals have answered" in client.get("/").text
    assert "All runs" not in client.get("/").text
    (run / FILE).unlink()
    assert client.get("/").status_code == 503
    run = measured_run(tmp_path / "runs" / "newest", HALF)
    seen = View("it", look_at(run), (("server", True), ("north", False)), folder=run.parent)
    app = make_app(WatchPages(lambda: seen), {"localhost"}, lambda: False)
    sections = split_sections(TestClient(app, base_url="http://localhost").get("/").text)
    assert "down" in sections["deployment"]
    assert "north" in sections["sites"]
