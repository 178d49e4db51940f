"""What a run's progress says: read back as written, refused if it is another version's."""

import json
import re
import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import RunDirectoryError
from fedsilo.server_app.records.progress import (
    FILE,
    Progress,
    SiteProgress,
    mark_interrupted,
    metrics_text,
    read_progress,
)

_SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\S+)')
START = datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)


def made(**changes: Any) -> Progress:
    sites = {
        "north": SiteProgress(seconds=1.5, bytes_down=100, bytes_up=20, peak_memory_bytes=10**9),
        "south": SiteProgress(seconds=0.5, bytes_down=100, bytes_up=30, epsilon=1.25),
    }
    usual = {
        "run": "trial",
        "title": "FedAvg on table, seed 1",
        "method": "fedavg",
        "dataset": "table",
        "seed": 1,
        "host": "server",
        "pid": 1,
        "process_started": 5.5,
        "started": START,
        "updated": START + timedelta(seconds=10.125),
        "round": 2,
        "rounds": 3,
        "phase": "train",
        "phase_started": START + timedelta(seconds=9),
        "asked": ["north", "south"],
        "answered": ["north"],
        "away": ["south"],
        "sites": sites,
    }
    return Progress(**(usual | changes))


def test_mark_interrupted_changes_a_running_run_alone(tmp_path: Path) -> None:
    mark_interrupted(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for state, after in (("running", "interrupted"), ("failed", "failed")):
        (tmp_path / FILE).write_text(made(state=state, seconds_left=4.0).model_dump_json())
        mark_interrupted(tmp_path)
        progress = read_progress(tmp_path)
        assert progress
        assert progress.state == after
    assert 'state="interrupted"' in (tmp_path / "progress.prom").read_text()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(made().model_dump_json(indent=2))
    assert read_progress(tmp_path) == made()
    assert made().bytes() == {"down": 200, "up": 50}
    assert made().epsilon() == 1.25
    document = json.loads(made().model_dump_json(indent=2))
    assert datetime.fromisoformat(document["updated"]) == made().updated
    assert document["sites"]["south"]["bytes-up"] == 30


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is damaged"),
        ('{"version": 1', "is damaged"),
        ("\udcff", "is damaged"),
        ("[" * 10**5, "is damaged"),
        ("[]", "by another version"),
        ('{"version": 2}', "by another version of fedsilo, or was altered (at 'version')"),
        ('{"version": "' + "x" * 5000 + '"}', "by another version"),
        ('{"version": 1}', "(at 'run')"),
        (made().model_dump_json(indent=2).replace('"round": 2', '"round": "two"'), "at 'round'"),
        (
            made().model_dump_json(indent=2).replace('"seed": 1', '"seed": 1, "colour": 3'),
            "at 'colour'",
        ),
        (
            made().model_dump_json(indent=2).replace("2001-09-09T", "yesterday"),
            "(at 'started')",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / FILE).write_text(text, errors="surrogateescape")
    with pytest.raises(RunDirectoryError) as refused:
        read_progress(tmp_path)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_folder_that_the_system_refuses_to_look_into_is_an_error_of_the_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(RunDirectoryError):
        read_progress(tmp_path / ("long" * 100))


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_no_value_breaks_the_reader(value: Any) -> None:
    for key in ("sites", "phase", "started", "asked"):
        document = json.loads(made().model_dump_json(indent=2)) | {key: value}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / FILE).write_text(json.dumps(document))
            with suppress(RunDirectoryError):
                read_progress(Path(folder))


def test_each_metric_is_declared_once_and_each_line_is_a_sample() -> None:
    text = metrics_text(made(run='a"b\\c\nd'))
    samples = [_SAMPLE.fullmatch(line) for line in text.splitlines() if line[0] != "#"]
    assert all(samples)
    names = [found[1] for found in samples if found]
    declared = re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE)
    assert len(set(declared)) == len(declared)
    assert set(declared) == set(names)
    assert list(dict.fromkeys(names)) == declared, "the samples of a metric stand together"
    assert 'fedsilo_run_bytes_total{run="a\\"b\\\\c\\nd",direction="up"} 50' in text
    assert 'fedsilo_site_epsilon{run="a\\"b\\\\c\\nd",site="south"} 1.25' in text
    assert "nan" not in text.lower()
