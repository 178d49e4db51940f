import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.site.limits import Limits
from fedsilo.client_app.site.run_book import RunBook, RunRecord
from fedsilo.core.errors import CheckpointError, RefusedError
from fedsilo.core.messages import Instruction
from tests.support.errors import refuses


def asked(round_: int, step: int = 0, name: str = "run") -> Instruction:
    return Instruction(round_, "train", step, name)


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(-1, 20)), max_size=60))
def test_no_sequence_of_messages_gets_more_than_the_quotas(asks: list[tuple[int, int]]) -> None:
    limits, record = Limits(max_messages=20, max_repeats=2), RunRecord(0.0)
    answered: list[tuple[int, int]] = []
    for round_, step in asks:
        try:
            record.refuse(asked(round_, step), 10, limits)
        except RefusedError:
            continue
        record.enter(asked(round_, step))
        answered.append((round_, step))
    assert len(answered) <= 20
    assert all(1 <= round_ <= 11 and step >= 0 for round_, step in answered)
    furthest = 0
    for round_, _ in answered:
        assert round_ >= furthest - 1
        furthest = max(furthest, round_)
    # A phase is forgotten only when it can no longer be asked for
    assert all(answered.count(one) <= 2 for one in answered)


def test_a_round_may_have_a_step_for_each_of_many_sites(tmp_path: Path) -> None:
    seconds = RunBook(tmp_path).enter(asked(1, 99), 10, Limits(max_seconds=7.0))  # cyclic's of 100
    assert seconds == 7.0


def test_a_resumed_run_may_ask_for_its_last_round_again(tmp_path: Path) -> None:
    book = RunBook(tmp_path)
    for round_ in (1, 2, 3, 3, 2):
        book.enter(asked(round_), 5, Limits())
    with refuses(RefusedError, 1, 3):
        book.enter(asked(1), 5, Limits())


def test_seconds_of_a_run_add_up(tmp_path: Path) -> None:
    book, limits = RunBook(tmp_path), Limits(max_seconds=10.0)
    assert book.enter(asked(1), 5, limits) == 10.0
    book.add_seconds("run", 7.5)
    assert RunBook(tmp_path).enter(asked(2), 5, limits) == 2.5
    book.add_seconds("run", 7.5)
    with refuses(RefusedError, "max-seconds"):
        book.enter(asked(3), 5, limits)


def test_a_day_has_so_many_new_runs_and_another_day_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, limits = RunBook(tmp_path), Limits(max_runs_per_day=1)
    book.enter(asked(1, name="a"), 5, limits)
    book.enter(asked(2, name="a"), 5, limits)
    with refuses(RefusedError, "max-runs-per-day"):
        book.enter(asked(1, name="b"), 5, limits)
    later = time.time() + 86401
    monkeypatch.setattr(time, "time", lambda: later)
    book.enter(asked(1, name="b"), 5, limits)


def test_nothing_of_a_refused_message_is_entered(tmp_path: Path) -> None:
    book = RunBook(tmp_path)
    book.enter(asked(3), 5, Limits())
    before = book.file.path.read_bytes()
    with pytest.raises(RefusedError):
        book.enter(asked(1), 5, Limits())
    assert book.file.path.read_bytes() == before


@given(st.binary(max_size=200))
def test_a_damaged_book_stops_the_site(damage: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        book = RunBook(Path(folder))
        book.file.path.write_bytes(damage)
        try:
            known = json.loads(damage)
        except ValueError:
            known = None
        if known == {}:
            return
        with refuses(CheckpointError, "runs.json"):
            book.enter(asked(1), 5, Limits())


@pytest.mark.parametrize(
    "content",
    [
        {"a": {"began": 1.0, "messages": -1}},
        {"a": {"began": 1.0, "seconds": "x"}},
        {"a": {"began": 1.0, "asked": {"x": 1}}},
        {"a": {"messages": 1}},
        {"a": {"began": 1.0, "what": 1}},
    ],
)
def test_a_book_of_another_form_stops_the_site(tmp_path: Path, content: object) -> None:
    book = RunBook(tmp_path)
    book.file.path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is damaged"):
        book.enter(asked(1), 5, Limits())


def test_the_book_is_its_owners_alone(tmp_path: Path) -> None:
    book = RunBook(tmp_path / "own")
    book.count_hello(Limits())
    assert book.file.path.stat().st_mode & 0o777 == 0o600
