import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from fedsilo.core.errors import SettingError
from fedsilo.models.privacy.accountant import epsilon, noise_for

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


def once(z: float, releases: int) -> dict[tuple[float, float], int]:
    return {(z, 1.0): releases}


@pytest.mark.parametrize(("z", "releases"), [(6.0, 100), (1.0, 1), (0.5, 4), (40.0, 3), (3.0, 100)])
def test_epsilon_of_all_patients_is_the_closed_form_and_above_the_exact_one(
    z: float, releases: int
) -> None:
    found = epsilon(once(z, releases), DELTA)
    assert found == pytest.approx(closed_form(z, releases), rel=0.01)
    assert exact(z, releases) <= found <= 1.25 * exact(z, releases)


def test_six_times_the_norm_over_a_hundred_rounds_is_epsilon_8() -> None:
    assert exact(6.0, 100) == pytest.approx(8.0, abs=0.05)
    assert 8.0 <= epsilon(once(6.0, 100), DELTA) <= 8.7


def test_a_variance_of_a_thousandth_hides_nothing() -> None:
    z = math.sqrt(0.001)
    assert exact(z, 1) == pytest.approx(634, rel=0.01)
    assert epsilon(once(z, 1), DELTA) == pytest.approx(634, rel=0.03)


def test_epsilon_of_sampled_and_whole_releases_agrees_with_the_library() -> None:
    releases = {(1.1, 0.1): 300, (5.0, 1.0): 3}
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.1)), 300)
    accountant.compose(GaussianDpEvent(5.0), 3)
    assert epsilon(releases, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=0.02)


def test_sampling_lowers_epsilon() -> None:
    assert epsilon({(1.1, 0.1): 300}, DELTA) < epsilon(once(1.1, 300), DELTA) / 5


def test_nothing_sent_is_nothing_spent_and_no_noise_is_everything() -> None:
    assert epsilon({}, DELTA) == epsilon(once(0.0, 0), DELTA) == 0
    assert epsilon(once(0.0, 1), DELTA) == math.inf
    more, less = epsilon(once(1.0, 2), DELTA), epsilon(once(1.0, 1), DELTA)
    assert more > less > epsilon(once(1.0, 1), 1e-3) > 0


@pytest.mark.parametrize(("budget", "steps", "rate"), [(1.0, 30, 1.0), (8.0, 200, 0.05)])
def test_noise_for_a_budget_is_enough_and_hardly_more(
    budget: float, steps: int, rate: float
) -> None:
    def made(noise: float) -> dict[tuple[float, float], int]:
        return {(noise, rate): steps, (20.3, 1.0): 2}

    noise = noise_for(budget, DELTA, made)
    assert 0.98 * budget <= epsilon(made(noise), DELTA) <= budget


def test_a_budget_below_what_is_spent_anyway_has_no_noise() -> None:
    with pytest.raises(SettingError, match=r"no noise brings the run's epsilon to 0\.01"):
        noise_for(0.01, DELTA, lambda noise: {(noise, 1.0): 1, (1.0, 1.0): 1})
