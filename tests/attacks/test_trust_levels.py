"""What each level of trust gives away, by attacks that work where the server is trusted."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.attackers import ATTACKS, FEATURES, attacked, planes
from tests.support.hospital import Hospital

FEW = {"planes, FedAvg": 6, "class means, FedProto": 2}


def nearest(hospital: Hospital, candidates: list[np.ndarray]) -> np.ndarray:
    """Return how far (rms, in sd) each row is from the candidate that is nearest to it."""
    found = np.stack([c for c in candidates if np.isfinite(c).all()])
    rows = hospital.rows()
    squares = (rows**2).sum(1)[:, None] - 2 * rows @ found.T + (found**2).sum(1)[None]
    return np.sqrt(np.maximum(squares.min(axis=1), 0) / FEATURES)


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_a_trusted_server_that_breaks_the_trust_reads_rows(attack: str, tmp_path: Path) -> None:
    site = attacked(attack, 0.0, tmp_path, FEW[attack])
    assert site.answered == site.messages, "nothing of it is refused"
    assert site.hospital.recovered(site.candidates) >= 15


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_where_nobody_is_trusted_no_row_is_nearer_than_a_guess(attack: str, tmp_path: Path) -> None:
    site = attacked(attack, 8.0, tmp_path, FEW[attack])
    assert site.answered == site.messages, "the budget allows it, and it does not help"
    assert site.hospital.recovered(site.candidates) == 0
    # Who knows nothing but that features are standardised guesses as often
    draws = np.random.default_rng(1).normal(size=(len(site.candidates), FEATURES))
    guessed = np.median(nearest(site.hospital, list(draws)))
    assert np.median(nearest(site.hospital, site.candidates)) >= 0.95 * guessed


def test_two_hundred_messages_beyond_the_budget_are_all_refused(tmp_path: Path) -> None:
    site = attacked("planes, FedAvg", 1.0, tmp_path, 6)
    arrays = planes(np.eye(FEATURES)[0], 0, 512)
    asked = [
        site.hospital.train(arrays, round=number % 90 + 1, run_name=f"again{number // 90}")
        for number in range(200)
    ]
    assert asked == [None] * 200
    assert "epsilon is spent: all runs have spent" in site.hospital.refusals[0]
