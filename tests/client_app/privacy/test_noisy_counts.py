import json
import statistics
from pathlib import Path

import pytest

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.noisy_counts import (
    FILE,
    NoisyCounts,
    draw_again,
    kept_counts,
    noisy_counts,
)
from fedsilo.core.errors import CheckpointError, EpsilonSpentError
from tests.support.errors import refuses

EXACT = {"train": [60, 40], "val": [0, 0], "test": [20, 10]}
DATA = {"train": "a" * 64}


def cap(folder: Path, most: float = 100.0) -> Ledger:
    return Ledger(folder / LEDGER, most, 1e-5, of_all_runs=True)


def test_counts_are_drawn_once_for_the_same_data_and_paid_once(tmp_path: Path) -> None:
    first = noisy_counts(EXACT, DATA, 3.0, cap(tmp_path))
    assert first != EXACT
    assert all(noisy_counts(EXACT, DATA, 3.0, cap(tmp_path)) == first for _ in range(5))
    assert cap(tmp_path).releases() == {(3.0, 1.0): 1}


def test_other_data_cost_again(tmp_path: Path) -> None:
    noisy_counts(EXACT, DATA, 3.0, cap(tmp_path))
    noisy_counts(EXACT, {"train": "b" * 64}, 3.0, cap(tmp_path))
    assert cap(tmp_path).releases() == {(3.0, 1.0): 2}


def test_the_noise_is_the_multiplier_in_patients(tmp_path: Path) -> None:
    told = [noisy_counts(EXACT, {"train": str(n)}, 4.0, cap(tmp_path, 1e4)) for n in range(300)]
    first = [counts["train"][0] for counts in told]
    assert statistics.pstdev(first) == pytest.approx(4.0, rel=0.2)
    assert statistics.fmean(first) == pytest.approx(60, abs=1)


def test_no_count_is_below_zero_and_a_split_keeps_a_sample(tmp_path: Path) -> None:
    few = {"train": [1, 0], "val": [0, 0], "test": [1, 1]}
    for number in range(50):
        told = noisy_counts(few, {"train": str(number)}, 5.0, cap(tmp_path, 1e4))
        assert min(told["train"]) >= 0
        assert sum(told["train"]) >= 1


def test_counts_beyond_the_cap_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(EpsilonSpentError, match="epsilon is spent"):
        noisy_counts(EXACT, DATA, 0.1, cap(tmp_path, 1.0))
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("size", [0, 1])
def test_a_split_of_no_or_one_patient_is_told_to_be_empty(tmp_path: Path, size: int) -> None:
    """By an exact 0 anybody would know that there is none."""
    exact = {"train": [60, 40], "val": [size, 0], "test": [20, 10]}
    told = [noisy_counts(exact, {"n": str(n)}, 4.0, cap(tmp_path, 1e4)) for n in range(40)]
    assert sum(counts["val"] == [0, 0] for counts in told) >= 34


def test_by_default_counts_cost_a_quarter_of_the_cap(tmp_path: Path) -> None:
    for most in (1.0, 8.0):
        hospital = cap(tmp_path / str(most), most)
        noisy_counts(EXACT, DATA, 0.0, hospital)
        assert 0.24 * most <= hospital.epsilon() <= 0.25 * most


def test_counts_of_an_older_version_are_kept_as_they_are(tmp_path: Path) -> None:
    noisy_counts(EXACT, DATA, 3.0, cap(tmp_path))
    (key,) = json.loads((tmp_path / FILE).read_text())
    older = {"train": [7, 3], "val": [0, 0], "test": [9, 1]}
    (tmp_path / FILE).write_text(json.dumps({key: older}))
    assert noisy_counts(EXACT, DATA, 3.0, cap(tmp_path)) == older
    noisy_counts(EXACT, {"train": "b" * 64}, 3.0, cap(tmp_path))
    assert kept_counts(cap(tmp_path))[key] == NoisyCounts(older)


def test_a_hospital_draws_bad_counts_again_and_pays_at_once(tmp_path: Path) -> None:
    bad = noisy_counts(EXACT, DATA, 1000.0, cap(tmp_path))
    assert draw_again(3.0, cap(tmp_path)) == 3.0
    assert draw_again(3.0, cap(tmp_path)) == 3.0, "paid for once"
    assert cap(tmp_path).releases() == {(1000.0, 1.0): 1, (3.0, 1.0): 1}
    new = noisy_counts(EXACT, DATA, 7.0, cap(tmp_path))
    assert new != bad
    assert sum(new["train"]) == pytest.approx(100, abs=30)
    assert noisy_counts(EXACT, DATA, 7.0, cap(tmp_path)) == new
    assert cap(tmp_path).releases() == {(1000.0, 1.0): 1, (3.0, 1.0): 1}


def test_a_draw_beyond_the_cap_leaves_the_counts_as_they_are(tmp_path: Path) -> None:
    first = noisy_counts(EXACT, DATA, 4.0, cap(tmp_path, 1.5))
    with pytest.raises(EpsilonSpentError):
        draw_again(0.5, cap(tmp_path, 1.5))
    assert noisy_counts(EXACT, DATA, 4.0, cap(tmp_path, 1.5)) == first


def test_damaged_counts_stop_the_site(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[1]")
    with refuses(CheckpointError, "told-counts.json"):
        noisy_counts(EXACT, DATA, 3.0, cap(tmp_path))
