"""Where nobody is trusted: what every method makes, counted again by another library.

It composes privacy loss distributions (Sommer et al. 2019; Doroshenko et al. 2022), by other
numbers than the Renyi divergences of the hospital's own accountant.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from fedsilo.core.messages import EVALUATE, HELLO, TRAIN
from fedsilo.datasets.registry import load_silo
from fedsilo.models.privacy.accountant import epsilon
from fedsilo.models.privacy.release import UNITS
from fedsilo.server_app.config.settings import resolve
from tests.support.crafted import METHODS_HERE, honest_arrays
from tests.support.hospital import Hospital
from tests.support.neighbours import Patient, Question, asked
from tests.support.private_run import CHECKED, UEFL
from tests.support.same_sites import one_of_each_site

DELTA = 1e-5
PATIENT = Patient("train", 3, [0.5] * 13, 1)


@cache
def by_loss_distributions(releases: tuple[tuple[float, float, int], ...]) -> float:
    accountant = PLDAccountant()
    for noise, rate, count in releases:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), count)
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize("method", one_of_each_site(METHODS_HERE))
def test_a_hospital_counts_no_less_than_another_library(method: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "network.width": 4,
        "train.batch-size": 16,
        "network.dropout": 0.0,
        "train.mc-passes": 0,
    }
    run = CHECKED | {"method": method} | (UEFL if method == "uefl" else {})
    asks = [Question(HELLO)]
    for round_ in (1, 2):
        told = {"round": round_, "evaluate": True}
        if method == "picsr":
            told["notes"] = {"stage": "experts"}
        asks.append(Question(TRAIN, honest_arrays(method), told))
    asks.append(Question(EVALUATE, honest_arrays(method), {"round": 3}))
    node = {"trust": "nobody", "max-epsilon": 1e4, "counts-noise": 3.0}
    seen = asked(
        lambda home: Hospital(home, run, "cleveland", node, own),
        tmp_path,
        load_silo("cleveland", resolve({"dataset": "heart-synthetic"}).common),
        PATIENT,
        asks,
    )
    assert any(isinstance(answer, dict) for answer in seen.answers[1:]), seen.answers
    releases = json.loads(seen.ledgers[-1])["releases"]
    made = sum(count for _, _, count in releases)
    # Training may have been paid for by more steps than were made; nothing is made without
    assert len(seen.sums) <= made
    spent = epsilon({(noise, rate): count for noise, rate, count in releases}, DELTA)
    again = by_loss_distributions(tuple(map(tuple, releases)))
    assert 0.5 * spent <= again <= spent


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_rounded_noise_is_as_private_as_what_it_is_rounded_from(noise: float, rate: float) -> None:
    """The probabilities of whole numbers themselves, on a grid of few steps, one patient apart."""
    steps = 8
    deviation = math.ceil(noise * steps)
    edges = np.arange(-40 * deviation, 40 * deviation + steps) - 0.5
    without = np.diff(norm.cdf(edges / deviation))
    moved = np.diff(norm.cdf((edges - steps) / deviation))
    with_patient = (1 - rate) * without + rate * moved
    for eps in (0.1, 0.5, 1.0, 3.0):
        for one, other in ((with_patient, without), (without, with_patient)):
            rounded = np.maximum(one - math.exp(eps) * other, 0).sum()
            assert rounded <= _delta(deviation / steps, rate, eps) * (1 + 1e-6) + 1e-12


def _delta(noise: float, rate: float, eps: float) -> float:
    """Return the delta of the continuous mechanism at an epsilon, the larger of both directions."""
    grid = np.linspace(-40 * noise, 40 * noise + 1, 400_001)
    without = norm.pdf(grid / noise) / noise
    with_patient = (1 - rate) * without + rate * norm.pdf((grid - 1) / noise) / noise
    width = grid[1] - grid[0]
    pairs = ((with_patient, without), (without, with_patient))
    return max(
        float(np.maximum(one - math.exp(eps) * other, 0).sum() * width) for one, other in pairs
    )


def test_the_deviation_in_units_is_at_least_what_the_ledger_is_charged_for() -> None:
    for noise in (1e-6, 0.3, 1.1, 9.046875, 1e6):
        assert math.ceil(noise * UNITS) / UNITS >= noise


@pytest.mark.parametrize("rate", [8 / 199, 0.002, 0.0004, 8e-5, 1e-6])
def test_no_release_gives_epsilon_back(rate: float) -> None:
    """Of almost nothing the library's rounding made less than nothing: -5e-17 a step.

    A server that asked a large hospital for 2^63 steps had that charged before the first of them.
    """
    honest = {(1.0, 0.05): 1000}
    spent = epsilon(honest, 1e-5)
    for noise in (1.0, 1e3, 1e5, 3e5, 1e6):
        for count in (1, 2**63, 1000 * 2**63):
            assert epsilon({**honest, (noise, rate): count}, 1e-5) >= spent
