import statistics
from pathlib import Path

import pytest

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.told_counts import FILE, told_counts
from fedsilo.models.contract.errors import CheckpointError, EpsilonSpentError

EXACT = {"train": [60, 40], "val": [0, 0], "test": [20, 10]}
DATA = {"train": "a" * 64}


def cap(folder: Path, most: float = 100.0) -> Ledger:
    return Ledger(folder / LEDGER, most, 1e-5, of_all_runs=True)


def test_counts_are_drawn_once_for_the_same_data_and_paid_once(tmp_path: Path) -> None:
    first = told_counts(EXACT, DATA, 3.0, cap(tmp_path))
    assert first != EXACT
    assert all(told_counts(EXACT, DATA, 3.0, cap(tmp_path)) == first for _ in range(5))
    assert cap(tmp_path).releases() == {(3.0, 1.0): 1}


def test_other_data_cost_again(tmp_path: Path) -> None:
    told_counts(EXACT, DATA, 3.0, cap(tmp_path))
    told_counts(EXACT, {"train": "b" * 64}, 3.0, cap(tmp_path))
    assert cap(tmp_path).releases() == {(3.0, 1.0): 2}


def test_the_noise_is_the_multiplier_in_patients(tmp_path: Path) -> None:
    told = [told_counts(EXACT, {"train": str(n)}, 4.0, cap(tmp_path, 1e4)) for n in range(300)]
    first = [counts["train"][0] for counts in told]
    assert statistics.pstdev(first) == pytest.approx(4.0, rel=0.2)
    assert statistics.fmean(first) == pytest.approx(60, abs=1)


def test_no_count_is_below_zero_and_a_split_keeps_a_sample(tmp_path: Path) -> None:
    few = {"train": [1, 0], "val": [0, 0], "test": [1, 1]}
    for number in range(50):
        told = told_counts(few, {"train": str(number)}, 5.0, cap(tmp_path, 1e4))
        assert min(told["train"]) >= 0
        assert sum(told["train"]) >= 1
        assert told["val"] == [0, 0], "how a data set is cut is no secret"


def test_counts_beyond_the_cap_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(EpsilonSpentError, match="epsilon is spent"):
        told_counts(EXACT, DATA, 0.1, cap(tmp_path, 1.0))
    assert not (tmp_path / FILE).exists()


def test_damaged_counts_stop_the_site(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(CheckpointError, match=r"told-counts\.json is damaged"):
        told_counts(EXACT, DATA, 3.0, cap(tmp_path))
