import json
import os
import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.site.audit_log import (
    ANSWERED,
    FAILED,
    append_line,
    build_entry,
    check_log,
    group_names,
    names_in,
)
from fedsilo.client_app.site.log_chain import CHECK, NUMBER
from fedsilo.client_app.site.policy import matches
from fedsilo.core.errors import RefusedError
from fedsilo.core.messages import ARRAYS, CONFIG, HELLO, METRICS, TRAIN
from fedsilo.strategies.wire.records import record_bytes, to_record
from tests.support.errors import refuses

Node = Callable[..., Context]
Make = Callable[..., Message]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the log's lines without their places in the chain."""
    text = path.read_text()
    assert text.endswith("\n")
    return [unchained(json.loads(line)) for line in text.splitlines()]


def unchained(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in (NUMBER, CHECK)}


def answer_of(message: Message) -> Message:
    arrays: dict[str, Any] = {
        "head.1.bias": np.zeros(10),
        "head.1.weight": np.zeros((10, 4), np.float32),
    }
    metrics = MetricRecord({"seconds": 1.5, "incoming.val.loss": 2.0, "incoming.val.accuracy": 0.5})
    return Message(RecordDict({METRICS: metrics, ARRAYS: to_record(arrays)}), reply_to=message)


def test_an_entry_holds_names_counts_and_bytes_and_no_value(context: Node, message: Make) -> None:
    asked = message(TRAIN, {"w": np.zeros(3, np.float32)}, round=4)
    reply = answer_of(asked)
    found = build_entry("north", asked, context({"site": "north"}), reply, ANSWERED)
    when = datetime.fromisoformat(found.pop("time"))
    assert abs(datetime.now(when.tzinfo) - when).total_seconds() < 60
    assert found == {
        "site": "north",
        "run": "run",
        "run-id": 1,
        "kind": "train",
        "method": "fedavg",
        "dataset": "digits",
        "round": 4,
        "phase": "train",
        "outcome": "answered",
        "why": "",
        "records": {"arrays/head.*": 2, "metrics/incoming.*": 2, "metrics/seconds": 1},
        "bytes-in": record_bytes(asked.content),
        "bytes-out": record_bytes(reply.content),
    }


def test_the_entry_of_an_error_reply_says_why_and_counts_its_text(
    context: Node, message: Make
) -> None:
    asked = message(TRAIN)
    found = build_entry(
        "north", asked, context({}), Message(Error(2, "no möre"), reply_to=asked), FAILED
    )
    assert (found["outcome"], found["why"]) == ("failed", "no möre")
    assert (found["records"], found["bytes-out"]) == ({}, 8)


def test_a_hello_has_the_run_that_it_is_for_but_no_round(context: Node) -> None:
    asked, node = Message(RecordDict(), 1001, HELLO), context({})
    found = build_entry("north", asked, node, answer_of(asked), ANSWERED)
    assert (found["kind"], found["run"], found["round"], found["phase"]) == (HELLO, "", 0, "")
    node.run_config["run.name"] = "hearts"
    assert build_entry("north", asked, node, answer_of(asked), ANSWERED)["run"] == "hearts"


def test_what_a_server_names_cannot_flood_the_log(context: Node, message: Make) -> None:
    node = context({})
    node.run_config["method"] = "x" * 10_000
    asked = message(TRAIN, run_name="y" * 10_000, phase="z" * 10_000)
    asked.content.config_records[CONFIG]["round"] = "9" * 10_000
    reply = Message(Error(2, "w" * 10_000), reply_to=asked)
    assert len(json.dumps(build_entry("north", asked, node, reply, FAILED))) < 2500


def test_groups_end_at_the_first_mark_of_a_key() -> None:
    names = ["arrays/prototype/3", "arrays/prototype/4", "arrays/a.b/c", "arrays/a/b.c", "config/x"]
    assert group_names(names) == {
        "arrays/prototype/*": 2,
        "arrays/a.*": 1,
        "arrays/a/*": 1,
        "config/x": 1,
    }


KEYS = st.lists(st.text("ab./*\n", min_size=1, max_size=8), unique=True)


@given(KEYS)
def test_each_name_is_in_one_group_and_a_group_is_a_pattern_that_lets_it_leave(
    keys: list[str],
) -> None:
    names = names_in(RecordDict({CONFIG: ConfigRecord(dict.fromkeys(keys, 1))}))
    groups = group_names(names)
    assert sum(groups.values()) == len(names) == len(keys)
    assert all(matches(name, groups) for name in names)


def test_a_line_is_appended_and_the_log_is_its_owners_alone(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    append_line(log, {"n": 1, "why": "two\nlines"})
    append_line(log, {"n": 2})
    assert lines(log) == [{"n": 1, "why": "two\nlines"}, {"n": 2}]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_what_the_log_holds_already_stays_there(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    log.write_text('{"old": true}\n')
    check_log(log)
    append_line(log, {"n": 1})
    assert lines(log) == [{"old": True}, {"n": 1}]


def test_a_line_torn_by_a_power_cut_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    log.write_text('{"n": 1}\n{"n": 2, "wh')
    append_line(log, {"n": 3})
    whole, torn, after = log.read_text().splitlines()
    assert (whole, torn) == ('{"n": 1}', '{"n": 2, "wh')
    assert unchained(json.loads(after)) == {"n": 3}


def test_lines_of_many_writers_are_whole(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_line(log, {"n": n, "why": "x" * 2000}), range(40)))
    assert sorted(line["n"] for line in lines(log)) == list(range(40))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("missing/audit.jsonl", "No such file or directory"),
        ("", "Is a directory"),
        ("file/audit.jsonl", "Not a directory"),
    ],
)
def test_a_log_that_cannot_be_opened_is_a_refusal_that_does_not_tell_where_it_is(
    tmp_path: Path, place: str, why: str
) -> None:
    (tmp_path / "file").touch()
    for attempt in (check_log, lambda log: append_line(log, {"n": 1})):
        with pytest.raises(RefusedError, match=why) as caught:
            attempt(tmp_path / place)
        assert str(tmp_path) not in str(caught.value)


def _fill_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", _fill_disk)
    with pytest.raises(RefusedError, match=r"\(No space left on device\), but nothing leaves"):
        append_line(tmp_path / "audit.jsonl", {"n": 1})


def test_a_line_for_which_only_a_part_has_room_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    append_line(log, {"n": 1})
    before = log.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(RefusedError, match="only a part of the line"):
            append_line(log, {"n": 2, "why": "long enough"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.read_bytes() == before
    append_line(log, {"n": 3})
    assert lines(log) == [{"n": 1}, {"n": 3}]


def test_a_line_that_did_not_reach_the_disk_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    log = tmp_path / "audit.jsonl"
    monkeypatch.setattr(os, "fsync", fail)
    with refuses(RefusedError, "Input/output"):
        append_line(log, {"n": 1})
    assert log.read_bytes() == b""
