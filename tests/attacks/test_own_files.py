"""A clock that was wrong, files put back, pipes for files, odd messages: the hospital goes on."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.round_secrets import SECRETS, read_secrets
from fedsilo.client_app.privacy.unmasked_sums import SUMS, UnmaskedSums
from fedsilo.client_app.site.limits import Limits
from fedsilo.client_app.site.own_file import secret_seed
from fedsilo.client_app.site.run_book import RunBook
from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import CONFIG, HELLO, TRAIN, Instruction
from tests.support.hospital import Hospital

MakeHospital = Callable[..., Hospital]
DAY = 86400.0
RULES = 'methods: ["*"]\ndatasets: ["*"]\nrecords: ["*"]\ntrust: server\n'
PRIVATE: dict[str, Any] = {
    "trust": "nobody",
    "standardise": "declared",
    "sample_clip_norm": 1.0,
    "noise_multiplier": 4.0,
    "dropout": 0.0,
    "batch_size": 64,
    "local_steps": 2,
}


def _first(name: str) -> Instruction:
    return Instruction(1, "train", 0, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the hospital's clock to so many days from now."""
    real = time.time

    def set_to(days: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + days * DAY)

    return set_to


@pytest.fixture
def alarm() -> Iterator[None]:
    """End a test that waits for a pipe."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the hospital waits for a pipe for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_clock_that_was_400_days_ahead_shuts_no_server_out(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    book, limits = RunBook(tmp_path), Limits(max_runs_per_day=2)
    clock(400)
    for name in ("a", "b"):
        book.enter(_first(name), 5, limits)
    for _ in range(16):
        book.count_hello(limits)
    clock(0)
    book.count_hello(limits)
    for name in ("c", "d"):
        book.enter(_first(name), 5, limits)


def test_a_thousand_old_entries_do_not_push_out_the_run_that_asks(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    book, limits = RunBook(tmp_path), Limits(max_runs_per_day=10**6, max_repeats=1)
    clock(400)
    book.enter(_first("old-0"), 5, limits)
    known = json.loads(book.file.path.read_text())
    book.file.path.write_text(json.dumps({f"old-{n}": known["old-0"] for n in range(1000)}))
    clock(0)
    book.enter(_first("new"), 5, limits)
    book.add_seconds("new", 1.0)
    assert json.loads(book.file.path.read_text())["new"]["seconds"] == 1.0
    book.add_seconds("old-0", 1.0)  # forgotten meanwhile, which is no fault
    assert len(json.loads(book.file.path.read_text())) == 1000


def test_the_run_that_was_used_last_is_kept(tmp_path: Path) -> None:
    book, limits = RunBook(tmp_path), Limits(max_runs_per_day=10**6)
    book.enter(_first("long"), 5, limits)
    known = json.loads(book.file.path.read_text())
    many = {f"run-{n}": known["long"] for n in range(999)}
    book.file.path.write_text(json.dumps(known | many))
    book.enter(Instruction(2, "train", 0, "long"), 5, limits)
    book.enter(_first("other"), 5, limits)
    assert "long" in json.loads(book.file.path.read_text())


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: dict[str, Callable[[Path], object]] = {
    "runs.json": lambda folder: RunBook(folder).count_hello(Limits()),
    ".runs.lock": lambda folder: RunBook(folder).count_hello(Limits()),
    ".runs.json.part": lambda folder: RunBook(folder).count_hello(Limits()),
    "seed": secret_seed,
    LEDGER: lambda folder: Ledger(folder / LEDGER, 1.0, 1e-5, of_all_runs=True).releases(),
    SECRETS: lambda folder: read_secrets(folder, 1),
    SUMS: lambda folder: UnmaskedSums(folder, 1).refuse_missing_sites([]),
    "round-000001-00.safetensors": lambda folder: load_state(
        folder / "round-000001-00.safetensors"
    ),
}


@pytest.mark.parametrize("make", [_pipe, _socket, _link])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("alarm")
def test_a_pipe_socket_or_link_in_place_of_an_own_file_is_refused_at_once(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"regular file|symbolic link"):
        READERS[name](tmp_path)


@pytest.mark.usefixtures("alarm")
def test_a_file_that_is_being_written_waits_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".own.part")
    reader = os.open(tmp_path / ".own.part", os.O_RDONLY | os.O_NONBLOCK)  # somebody reads along
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(tmp_path / "own", b"secret")
    os.close(reader)


@pytest.mark.parametrize("make", [_pipe, _socket, _link])
@pytest.mark.parametrize("place", ["site.yaml", "audit.jsonl"])
@pytest.mark.usefixtures("alarm")
def test_a_site_file_or_a_log_that_is_no_file_refuses_every_message(
    place: str, make: Callable[[Path], None], hospital: MakeHospital, tmp_path: Path
) -> None:
    rules = tmp_path / "site.yaml"
    rules.write_text(f"{RULES}audit-log: {tmp_path / 'audit.jsonl'}\n")
    (tmp_path / place).unlink(missing_ok=True)
    make(tmp_path / place)
    site = hospital(node={"site-file": str(rules)})
    assert site.send(HELLO) is None
    assert "cannot be" in site.refusals[-1]


@pytest.mark.parametrize("kind", ["query.default", "evaluate.default", "train.default", "query.x"])
def test_a_message_of_an_unknown_kind_is_refused_and_logged(
    kind: str, hospital: MakeHospital, tmp_path: Path
) -> None:
    (tmp_path / "site.yaml").write_text(RULES)
    site = hospital(node={"site-file": str(tmp_path / "site.yaml")})
    content = RecordDict({CONFIG: ConfigRecord({"round": 1})})
    reply = app(Message(content, 1001, kind, group_id="1"), site.context())
    assert reply.has_error()
    (line,) = _log(site)
    assert (line["kind"], line["outcome"], line["records"]) == (kind, "refused", {})
    assert line["why"] == str(reply.error.reason)
    assert "does not answer messages of kind" in line["why"]


def _log(site: Hospital) -> list[dict[str, Any]]:
    log = site.home / ".own" / site.site / "audit.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def spending(hospital: MakeHospital, tmp_path: Path) -> Hospital:
    """Return a hospital with a cap on epsilon, which answers one private run."""
    (tmp_path / "site.yaml").write_text(f"{RULES}max-epsilon: 50.0\n")
    return hospital(node={"site-file": str(tmp_path / "site.yaml"), "trust": "nobody"}, **PRIVATE)


def _train(site: Hospital, name: str) -> RecordDict | None:
    weights = {"head.1.weight": np.zeros((2, 13)), "head.1.bias": np.zeros(2)}
    return site.send(TRAIN, weights, run_name=name)


def test_an_older_copy_of_the_ledger_that_is_put_back_is_noticed(spending: Hospital) -> None:
    ledger = spending.home / ".own" / spending.site / LEDGER
    assert _train(spending, "a") is not None, spending.refusals
    older = ledger.with_name("older")
    shutil.copy(ledger, older)
    assert _train(spending, "b") is not None, spending.refusals
    newest = ledger.read_bytes()
    marks = [line["ledger"]["releases"] for line in _log(spending)]
    assert marks == sorted(marks)
    assert marks[-1] > marks[0]
    shutil.copy(older, ledger)
    for name in ("c", "d"):  # the line about the refusal must not make the old one good
        assert _train(spending, name) is None
        assert "privacy ledger has" in spending.refusals[-1]
        assert _log(spending)[-1]["ledger"]["releases"] == marks[-1]
    ledger.unlink()
    assert _train(spending, "e") is None
    assert "privacy ledger has 0 releases" in spending.refusals[-1]
    ledger.write_bytes(newest)
    assert _train(spending, "f") is not None, spending.refusals


def test_another_ledger_of_the_same_length_is_noticed(spending: Hospital) -> None:
    ledger = spending.home / ".own" / spending.site / LEDGER
    assert _train(spending, "a") is not None, spending.refusals
    content = json.loads(ledger.read_text())
    for release in content["releases"]:
        release[0] *= 1000.0
    ledger.write_text(json.dumps(content))
    assert _train(spending, "b") is None
    assert "is not the one of its audit log" in spending.refusals[-1]
