"""The driver finds what it is for: each kind of failure, planted, is told with its seed."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.methods import METHODS
from tests.fuzz import driver
from tests.fuzz.driver import Kind, Trial, run_campaign, seeds_of
from tests.fuzz.oracle import LONG, run_directory_faults, text_faults
from tests.fuzz.replies import kinds


def planted(run: Callable[[Trial], None]) -> Kind:
    return Kind("planted", lambda folder: run, 3)


def falls(one: Trial) -> None:
    if one.rng.random() < 2:
        raise KeyError("x")


def hangs(one: Trial) -> None:
    while True:
        time.sleep(0.01)


def works_on(one: Trial) -> None:
    while True:
        sum(range(1000))


def hungry(one: Trial) -> None:
    np.ones(40_000_000).sum()


def escapes(one: Trial) -> None:
    one.shown.append("site \x1b[2J")


def refuses(one: Trial) -> None:
    raise DataError("no such file")


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (falls, "traceback: KeyError: 'x' (tests/fuzz/test_driver.py"),
        (hangs, "hang: more than 0.2 s"),
        (works_on, "hang: more than 0.2 s"),
        (hungry, "memory: 3"),
        (escapes, "unprintable 0x1b"),
    ],
)
def test_a_planted_fault_is_found_with_its_seed(
    run: Callable[[Trial], None], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run in (hangs, works_on):
        monkeypatch.setattr(driver, "SECONDS", 0.2)
    failures = run_campaign(planted(run), [7], tmp_path).failures
    assert [(found.seed, told in found.what) for found in failures] == [(7, True)]
    assert "FUZZ_KIND=planted FUZZ_SEED=7" in str(failures[0])


def test_a_refusal_is_no_failure_and_is_counted(tmp_path: Path) -> None:
    campaign = run_campaign(planted(refuses), range(3), tmp_path)
    assert (campaign.refused, campaign.failures) == (3, [])


def test_a_seed_draws_the_same_numbers_each_time(tmp_path: Path) -> None:
    drawn: list[float] = []
    kind = planted(lambda one: drawn.append(one.rng.random()))
    run_campaign(kind, range(3), tmp_path / "a")
    run_campaign(kind, range(3), tmp_path / "b")
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_seeds_are_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KIND", "SEED", "FIRST", "TRIALS"):
        monkeypatch.delenv(f"FUZZ_{name}", raising=False)
    kind = planted(refuses)
    assert seeds_of(kind) == range(3)
    monkeypatch.setenv("FUZZ_TRIALS", "50")
    monkeypatch.setenv("FUZZ_FIRST", "100")
    assert seeds_of(kind) == range(100, 150)
    monkeypatch.setenv("FUZZ_SEED", "9")
    assert seeds_of(kind) == range(9, 10)
    monkeypatch.setenv("FUZZ_KIND", "reply")
    assert not seeds_of(kind)


def test_what_no_console_should_show_is_known() -> None:
    assert not list(text_faults("site north, round 1: no answer\nround 2"))
    for text in ("a\x07", "\u202e", "x\u2028", LONG * 301, "y" * 5000, "only fuzzed"):
        assert list(text_faults(text)), repr(text)
    assert not list(text_faults("[bold red]fuzzed[/]"))


def test_what_no_run_directory_should_hold_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"mean": float("nan")}))
    (tmp_path / "b.csv").write_text("site,value\n=1+1,2\n")
    (tmp_path / "c.csv").write_text("site,value\nnorth,inf\n")
    (tmp_path / "d e.txt").write_text("")
    (tmp_path / "e.json").write_text('{"loss": -0.5}')
    (tmp_path / "f.csv").write_text("site,value\nnorth,-0.5\n")
    faults = list(run_directory_faults(tmp_path))
    assert [fault.split(":")[0] for fault in faults] == [
        "a.json",
        "b.csv",
        "c.csv",
        "a file called 'd e.txt'",
    ]


def test_every_method_of_the_table_has_a_kind() -> None:
    assert {f"reply-{name}" for name in METHODS} <= {kind.name for kind in kinds()}
