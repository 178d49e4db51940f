"""Tests of the audit log's chain: what is altered, removed or inserted is found."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.site.audit_log import append_line
from fedsilo.client_app.site.log_chain import (
    START,
    add_link,
    find_breaks,
    head_file,
    link_of,
    read_head,
)

LINES = 6


def chained(count: int = LINES) -> list[dict[str, Any]]:
    lines, last = [], START
    for number in range(count):
        line = add_link({"run": "trial", "bytes-out": number, "why": "ä"}, last)
        lines.append(line)
        last = link_of(line) or START
    return lines


def test_a_whole_chain_has_no_break() -> None:
    lines = chained()
    assert list(find_breaks(lines, link_of(lines[-1]))) == []
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_check_values_by_hand() -> None:
    """sha256 of '\\n{"number": 1}', then of that digest, a newline and '{"number": 2}'."""
    first = add_link({}, START)
    assert first["check"] == "706b670ecb02d40c9170ad455fa93ba3e78b3a34ba73f52a4475d2e3f5d30abd"
    second = add_link({}, link_of(first) or START)
    assert second["number"] == 2
    assert second["check"] != first["check"]


@given(st.integers(0, LINES - 1), st.data())
def test_any_one_change_is_found_and_placed(place: int, data: st.DataObject) -> None:
    lines = chained()
    head = link_of(lines[-1])
    kind = data.draw(st.sampled_from(["alter", "remove", "insert", "swap"]))
    if kind == "alter":
        lines[place] = {**lines[place], "bytes-out": 999}
    elif kind == "remove":
        del lines[place]
    elif kind == "insert":
        lines.insert(place + 1, {"run": "made up"})
    else:
        other = (place + 1) % LINES
        lines[place], lines[other] = lines[other], lines[place]
    breaks = list(find_breaks(lines, head))
    if (kind, place) == ("remove", 0):
        # A log that begins with line 2 continues another one, and the command says so
        assert (breaks, lines[0]["number"]) == ([], 2)
        return
    assert breaks
    if kind in ("alter", "remove"):
        assert any(str(place + 1) in text for text in breaks)


def test_a_log_that_begins_later_continues_another() -> None:
    lines = chained()
    assert list(find_breaks(lines[3:], link_of(lines[-1]))) == []


def test_lines_of_an_earlier_version_come_before_the_chain() -> None:
    lines = chained()
    assert list(find_breaks([{"run": "old"}, *lines], link_of(lines[-1]))) == []
    assert list(find_breaks([*lines, {"run": "old"}], link_of(lines[-1])))


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in log.read_text().splitlines()]


def test_lines_removed_at_the_end_leave_a_gap_that_later_lines_do_not_close(
    tmp_path: Path,
) -> None:
    log = tmp_path / "audit.jsonl"
    for number in range(4):
        append_line(log, {"n": number})
    kept = log.read_text().splitlines(keepends=True)[:2]
    log.write_text("".join(kept))
    assert list(find_breaks(read(log), read_head(log))) == ["lines 3 to 4 are missing"]
    append_line(log, {"n": 4})
    assert list(find_breaks(read(log), read_head(log))) == ["lines 3 to 4 are missing"]


def test_a_log_that_was_moved_away_is_continued_by_the_next(tmp_path: Path) -> None:
    log, old = tmp_path / "audit.jsonl", tmp_path / "2026.jsonl"
    append_line(log, {"n": 0})
    log.rename(old)
    append_line(log, {"n": 1})
    assert read(log)[0]["number"] == 2
    assert list(find_breaks(read(old) + read(log), read_head(log))) == []


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "[" * 100_000, '{"number": "1"}'], ids=range(5)
)
def test_a_damaged_head_is_as_none(tmp_path: Path, content: str) -> None:
    log = tmp_path / "audit.jsonl"
    append_line(log, {"n": 0})
    head_file(log).write_text(content)
    assert read_head(log) is None
    append_line(log, {"n": 1})
    assert [line["number"] for line in read(log)] == [1, 2]
    assert (head_file(log).stat().st_mode & 0o777) == 0o600
