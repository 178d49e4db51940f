from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from fedsilo.models.privacy.accountant import epsilon, epsilon_of_a_change

DELTA = 1e-5


def closed_form(z: float, releases: int) -> float:
    """Return the bound of Gaussians: Rényi divergence a T / (2 z²), the least over all orders."""

    def bound(order: float) -> float:
        rest = math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)
        return order * releases / (2 * z * z) + rest

    return float(minimize_scalar(bound, bounds=(1.0001, 1e5), method="bounded").fun)


def exact(z: float, releases: int) -> float:
    """Return Balle and Wang's epsilon (2018): T Gaussians are one of mu = sqrt(T) / z."""
    mu = math.sqrt(releases) / z

    def excess(eps: float) -> float:
        far = math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
        return float(norm.cdf(mu / 2 - eps / mu) - far - DELTA)

    return float(brentq(excess, 0, mu * mu + 20 * mu))


@pytest.mark.parametrize(("z", "releases"), [(6.0, 100), (1.0, 1), (0.5, 4), (40.0, 3), (3.0, 100)])
def test_the_accountant_agrees_with_its_closed_form_and_is_above_the_exact_one(
    z: float, releases: int
) -> None:
    found = epsilon(z, releases, DELTA)
    assert found == pytest.approx(closed_form(z, releases), rel=0.01)
    assert exact(z, releases) <= found <= 1.25 * exact(z, releases)


def test_six_times_the_norm_over_a_hundred_rounds_is_epsilon_8() -> None:
    assert exact(6.0, 100) == pytest.approx(8.0, abs=0.05)
    assert 8.0 <= epsilon(6.0, 100, DELTA) <= 8.7
    assert epsilon_of_a_change(12.0, 100, DELTA) == epsilon(6.0, 100, DELTA)


def test_a_variance_of_a_thousandth_hides_nothing() -> None:
    z = math.sqrt(0.001)
    assert exact(z, 1) == pytest.approx(634, rel=0.01)
    assert exact(z, 100) == pytest.approx(51_000, rel=0.01)
    assert epsilon(z, 1, DELTA) == pytest.approx(634, rel=0.03)
    assert epsilon(z, 100, DELTA) == pytest.approx(51_000, rel=0.03)


def test_the_table_of_the_docs_is_what_the_accountant_says() -> None:
    text = (Path(__file__).parents[3] / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| (.* / .*) \|$", text, re.MULTILINE)
    assert [float(z) for z, _ in rows] == [0.5, 1, 2, 4, 6, 12]
    for z, cells in rows:
        pairs = [
            f"{epsilon(float(z), n, DELTA):.3g} / {epsilon_of_a_change(float(z), n, DELTA):.3g}"
            for n in (1, 10, 30, 100)
        ]
        assert cells.split(" | ") == pairs


def test_nothing_sent_is_nothing_spent_and_no_noise_is_everything() -> None:
    assert epsilon(1.0, 0, DELTA) == epsilon(0.0, 0, DELTA) == 0
    assert epsilon(0.0, 1, DELTA) == math.inf
    assert epsilon(1.0, 2, DELTA) > epsilon(1.0, 1, DELTA) > epsilon(1.0, 1, 1e-3) > 0
