"""Where nobody is trusted: what one patient changes, whatever a server sets, sends and asks.

Two hospitals differ in one patient. Before the noise everything that leaves differs by at most the
bound that is charged, and everything else, refusals included, is the same bytes. ``make fuzz`` runs
as many cases as TRIALS says; FUZZ_FIRST is the seed.
"""

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from fedsilo.client_app import session
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.privacy.release import UNITS, Release
from fedsilo.server_app.config.settings import resolve
from tests.support.crafted import METHODS_HERE, Case, cases, honest_arrays
from tests.support.hospital import Hospital
from tests.support.neighbours import Patient, Question, asked, differences
from tests.support.private_run import CHECKED, UEFL

OPEN = {"minimum-clip-norm": 0.0, "maximum-clip-norm": 1e300, "minimum-noise": 0.0}
CASES = int(os.environ.get("FUZZ_TRIALS", "20"))
SAID: Counter[str] = Counter()


@cache
def whole() -> Silo:
    return load_silo("cleveland", resolve({"dataset": "heart-synthetic"}).common)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    print(f"\nneighbours: {dict(SAID)}")


def moved(case: Case) -> list[str]:
    """Return in what two hospitals that differ in the case's patient differ too much."""

    def make(home: Path) -> Hospital:
        node = {"trust": "nobody", "max-epsilon": 1e6, "allow-folds": True, "counts-noise": 1.0}
        limits = OPEN if case.open_limits else {}
        run = CHECKED | {"method": case.method} | (UEFL if case.method == "uefl" else {})
        return Hospital(home, run, "cleveland", {**node, **limits}, case.run)

    with tempfile.TemporaryDirectory() as folder:
        one = asked(make, Path(folder) / "with", whole(), case.patient, case.questions)
        other = asked(make, Path(folder) / "without", whole(), case.patient, case.questions, one)
    SAID["cases"] += 1
    SAID["answers"] += sum(isinstance(answer, dict) for answer in one.answers)
    SAID["refusals"] += sum(isinstance(answer, str) for answer in one.answers)
    SAID["releases"] += len(one.sums)
    return differences(one, other)


@pytest.mark.skipif(
    not "neighbours".startswith(os.environ.get("FUZZ_KIND", "")), reason="FUZZ_KIND is another"
)
@seed(int(os.environ.get("FUZZ_FIRST", "0")))
@settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a case is long as it is; one more for each try would take hours
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_one_patient_moves_what_leaves_by_no_more_than_is_charged(case: Case) -> None:
    assert moved(case) == []


def a_case(split: str) -> Case:
    """Return a run of honest weights in which a far patient differs."""
    patient = Patient(split, 5, [3e3] * 13, 1)
    asks = [Question("query.hello"), Question("train", honest_arrays("fedavg"), {"evaluate": True})]
    run = {
        "network.width": 4,
        "train.batch-size": 2**20,
        "train.local-steps": 2,
        "network.dropout": 0.0,
        "train.mc-passes": 0,
    }
    return Case("fedavg", run, False, patient, asks)


@pytest.mark.parametrize("split", ["train", "test", "val"])
def test_a_far_patient_of_an_honest_run_is_hidden(split: str) -> None:
    assert moved(a_case(split)) == []


def test_a_gate_that_does_not_clip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_parts(self: Release, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: (a.double() * UNITS / self.bound).long() for n, a in rows.items()}

    monkeypatch.setattr(Release, "parts", whole_parts)
    assert any("moves by" in fault for fault in moved(a_case("train")))


def test_a_count_that_is_exact_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "reported_counts", lambda site: site.silo.label_counts())
    assert any(fault.startswith("answer 0") for fault in moved(a_case("train")))


def test_every_method_that_may_be_private_is_among_them() -> None:
    assert {"fedavg", "fedproto", "feddistill", "picsr", "scaffold", "uefl"} <= set(METHODS_HERE)
