"""Tests of 'fedsilo audit': an auditor's questions, answered from a hospital's log."""

import csv
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

import fedsilo
from fedsilo.cli.main import main
from fedsilo.client_app.site.audit_log import append_line
from fedsilo.client_app.site.log_chain import Link
from fedsilo.core.errors import DataError, SettingError
from fedsilo.reports.audit import Audit, parse_moment


def entry(day: int, run: str = "trial", **changes: Any) -> dict[str, Any]:
    line = {
        "time": f"2026-03-{day:02d}T15:44:20.789Z",
        "site": "north",
        "run": run,
        "kind": "train",
        "round": day,
        "phase": "train",
        "outcome": "answered",
        "why": "",
        "records": {"arrays/head.*": 4, "arrays/encoder.*": 45, "metrics/seconds": 1},
        "bytes-in": 10,
        "bytes-out": 1000 + day,
    }
    return line | changes


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    for day in (1, 2, 3):
        append_line(path, entry(day))
    append_line(path, entry(3, "=other", outcome="refused", records={}, **{"bytes-out": 0}))
    return path


def test_what_left_on_a_day(log: Path) -> None:
    found = fedsilo.audit([log], since="2026-03-03", until="2026-03-03")
    assert [line["bytes-out"] for line in found.chosen] == [1003, 0]
    assert (found.count, list(found.breaks)) == (4, [])
    found = fedsilo.audit([log], since="2026-03-03", run="trial")
    assert [line["bytes-out"] for line in found.chosen] == [1003]
    assert found.last is not None
    assert found.document()["last-check"] == json.loads(log.read_text().splitlines()[-1])["check"]


def test_a_removed_line_ends_the_command_with_1(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["breaks"] == []
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(SystemExit) as end:
        main(["audit", str(log), "--json"])
    assert end.value.code == 1
    assert json.loads(capsys.readouterr().out)["breaks"] == ["line 2 is missing"]


def test_logs_that_were_moved_away_are_read_before_the_one_in_use(log: Path) -> None:
    old = log.with_name("old.jsonl")
    log.rename(old)
    append_line(log, entry(4))
    assert fedsilo.audit([log]).first == 5
    both = fedsilo.audit([old, log])
    assert (both.first, both.count, list(both.breaks)) == (1, 5, [])


def test_the_csv_has_no_cell_that_a_spreadsheet_computes(log: Path, tmp_path: Path) -> None:
    assert main(["audit", str(log), "--csv", str(tmp_path / "a.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [row["run"] for row in rows] == ["trial", "trial", "trial", "'=other"]
    assert rows[0]["records"] == "49 arrays, 1 metrics"


def test_a_log_of_an_earlier_version_is_shown_and_said_to_be_unchecked(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text(json.dumps(entry(1)) + "\n")
    append_line(path, entry(2))
    found = fedsilo.audit(path)
    assert (found.unchained, found.first, list(found.breaks)) == (1, 1, [])


def test_moments() -> None:
    assert parse_moment("2026-03-03", "--since", False) == datetime(2026, 3, 3, tzinfo=UTC)
    assert parse_moment("2026-03-03", "--until", True).hour == 23
    assert parse_moment("2026-03-03T14:00", "--until", True) == datetime(2026, 3, 3, 14, tzinfo=UTC)
    with pytest.raises(SettingError, match="--since"):
        parse_moment("yesterday", "--since", False)


def test_a_line_with_a_made_up_time_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    append_line(path, entry(1, time="now"))
    with pytest.raises(DataError, match="line 1"):
        fedsilo.audit(path)


def _audit(**changes: Any) -> Audit:
    usual: dict[str, Any] = {"chosen": [], "count": 3, "torn": 0, "unchained": 0, "first": 1}
    usual |= {"last": Link(3, "ab" * 32), "has_head": True, "breaks": ()}
    return Audit(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["none chosen", "lines 1 to 3 are whole"]),
        ({"torn": 1}, ["1 line torn"]),
        ({"unchained": 2}, ["2 lines of an earlier version"]),
        ({"first": 2}, ["begins with line 2", "lines 2 to 3"]),
        ({"has_head": False}, [".head"]),
        ({"last": None, "first": None}, ["none chosen"]),
        ({"breaks": ["line 2 is altered"]}, ["CHAIN BROKEN: line 2 is altered"]),
    ],
)
def test_what_a_chain_lacks_is_said_and_only_a_whole_one_has_a_check_value(
    changes: dict[str, Any], told: list[str]
) -> None:
    said = " ".join(map(str, _audit(**changes).lines()))
    assert all(text in said for text in told)
    assert ("abababababababab" in said) is not ({"last", "breaks"} & changes.keys() != set())


def test_a_phase_is_named_beside_its_kind_of_message_if_it_differs() -> None:
    (table, *_) = _audit(chosen=[entry(1, phase="fit"), entry(2, phase="")]).lines()
    assert isinstance(table, Table)
    assert list(table.columns[3].cells) == ["train, phase fit", "train"]


@pytest.mark.parametrize(
    ("text", "hour"), [("2026-03-03T14:00", 14), ("2026-03-03T14:00+02:00", 12)]
)
def test_a_time_without_a_zone_is_utc(text: str, hour: int) -> None:
    moment = parse_moment(text, "--since", end_of_day=False)
    assert moment.astimezone(UTC).hour == hour
