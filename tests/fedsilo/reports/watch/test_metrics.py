"""Metrics over HTTP: of a run, of a deployment's members and of a hospital's node."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fedsilo.api.running import watch
from fedsilo.cli.main import main
from fedsilo.client_app.privacy.ledger import Ledger
from fedsilo.core.errors import SettingError
from fedsilo.deployment.kit import AUTHORITY, KEY, KitError, make_kit, read_kit
from fedsilo.reports.watch.hospital import HospitalReader
from fedsilo.reports.watch.view import View, look_at, look_at_hospital
from fedsilo.reports.watch.web.app import WatchPages, make_app
from fedsilo.server_app.records.progress import SiteProgress
from tests.fedsilo.reports.watch.test_view import written

DASHBOARD = Path(__file__).resolve().parents[4] / "docs" / "examples" / "grafana.json"
_NAME = re.compile(r"\bfedsilo_[a-z_]+")


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """Return an opened kit with a cap on epsilon."""
    zipped = tmp_path / "north.zip"
    made = "2026-03-03T09:41:07+00:00"
    zipped.write_bytes(make_kit("north", "fl:9092", "7", made, {AUTHORITY: b"a", KEY: b"k"}))
    zipped.chmod(0o600)
    folder = tmp_path / "north"
    folder.mkdir()
    read_kit(zipped).write(folder)
    (folder / "site.yaml").write_text(
        'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*"]\ntrust: nobody\nmax-epsilon: 3.0\n'
    )
    (folder / "state" / ".own" / "north").mkdir(parents=True)
    return folder


def _log(folder: Path) -> Path:
    return folder / "state" / ".own" / "north" / "audit.jsonl"


def _line(outcome: str, sent: int) -> str:
    line = {"time": "2026-03-03T09:41:07.120Z", "outcome": outcome, "bytes-in": 5}
    return json.dumps(line | {"bytes-out": sent}) + "\n"


def _samples(view: View) -> dict[str, float]:
    found = {}
    for line in view.metrics_text().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_a_hospital_counts_its_own_messages(hospital: Path) -> None:
    reader = HospitalReader(hospital)
    before = _samples(look_at_hospital(reader))
    assert before['fedsilo_hospital_messages_total{site="north",outcome="answered"}'] == 0
    log = _log(hospital)
    log.write_text(_line("answered", 100) + _line("refused", 20) + "torn\n" + '{"time": ')
    after = _samples(look_at_hospital(reader))
    assert after['fedsilo_hospital_messages_total{site="north",outcome="answered"}'] == 1
    assert after['fedsilo_hospital_messages_total{site="north",outcome="refused"}'] == 1
    assert after['fedsilo_hospital_bytes_total{site="north",direction="out"}'] == 120
    with log.open("r+") as file:  # the half line is completed
        file.seek(len(log.read_text()) - len('{"time": '))
        file.write(_line("answered", 3))
    again = _samples(look_at_hospital(reader))
    assert again['fedsilo_hospital_bytes_total{site="north",direction="out"}'] == 123
    assert again == _samples(look_at_hospital(HospitalReader(hospital))), "as read at once"
    log.write_text(_line("answered", 7))  # a new log of the same name
    assert (
        _samples(look_at_hospital(reader))[
            'fedsilo_hospital_bytes_total{site="north",direction="out"}'
        ]
        == 7
    )


def test_a_hospitals_epsilon_is_that_of_its_ledger(hospital: Path) -> None:
    reader = HospitalReader(hospital)
    assert "fedsilo_hospital_epsilon" not in look_at_hospital(reader).metrics_text()
    ledger = Ledger(_log(hospital).with_name("privacy-ledger.json"), 0.0, 1e-5, of_all_runs=True)
    ledger.spend({(2.0, 0.1): 10})
    found = _samples(look_at_hospital(reader))
    assert found['fedsilo_hospital_epsilon{site="north"}'] == ledger.epsilon()
    assert found['fedsilo_hospital_max_epsilon{site="north"}'] == 3.0
    _log(hospital).write_text(_line("answered", 100))
    look_at_hospital(reader)
    _log(hospital).write_text("")  # a new log, beside the same ledger
    again = _samples(look_at_hospital(reader))
    assert again['fedsilo_hospital_epsilon{site="north"}'] == ledger.epsilon()


def test_a_folder_without_a_kit_is_refused(
    hospital: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KitError):
        watch(hospital=tmp_path / "none")
    with pytest.raises(SettingError):
        watch(hospital=hospital, deployment=tmp_path)
    assert main(["watch", "--hospital", str(hospital), "--once"]) == 0
    assert "north" in capsys.readouterr().out
    pages = WatchPages(watch(hospital=hospital))
    assert "answered" in pages.render("/", {}).html
    assert pages.render("/runs", {}).status == 503
    assert pages.render("/run", {"name": "north"}).status == 404
    (hospital / "site.yaml").unlink()
    with pytest.raises(KitError):
        watch(hospital=hospital)


@pytest.fixture
def served(tmp_path: Path) -> TestClient:
    """Return a client of the pages of a run and two members, of which one is down."""
    run = written(tmp_path, sites={"north": SiteProgress(seconds=1.0, epsilon=0.5)})

    def look() -> View:
        return View("run", look_at(run), (("server", True), ("north", False)))

    app = make_app(WatchPages(look), {"localhost"}, lambda: False)
    return TestClient(app, base_url="http://localhost")


def test_the_metrics_are_served_by_its_own_name(served: TestClient) -> None:
    answer = served.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'fedsilo_member_up{member="north"} 0' in answer.text
    assert "fedsilo_run_finished_rounds" in answer.text
    assert served.get("/metrics", headers={"Host": "evil.example.org:80"}).status_code == 403


def test_the_dashboard_asks_for_metrics_that_exist(served: TestClient, hospital: Path) -> None:
    _log(hospital).write_text(_line("answered", 1))
    ledger = Ledger(_log(hospital).with_name("privacy-ledger.json"), 0.0, 1e-5, of_all_runs=True)
    ledger.spend({(2.0, 0.1): 1})
    text = served.get("/metrics").text
    text += partial(look_at_hospital, HospitalReader(hospital))().metrics_text()
    exist = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    asked = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            asked |= set(_NAME.findall(target["expr"]))
    assert asked
    assert asked <= exist
