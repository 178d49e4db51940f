"""The accountant: (epsilon, delta) of Gaussian mechanisms on samples drawn at random.

Releases compose by Rényi differential privacy (Mironov 2017; Poisson sampling: Mironov, Talwar and
Zhang 2019), converted to (epsilon, delta) by Canonne, Kamath and Steinke 2020. Neighbours differ
in one patient, who is there or is not.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from fedsilo.models.contract.errors import SettingError

SPENT = "epsilon is spent"  # starts a site's refusal; the server recognises it by these words
# Noise multiplier z and sampling rate q -> how many releases; q = 1: every patient is in each
Releases = Mapping[tuple[float, float], int]
# Without sampling orders from just above 1, for almost no noise, to what tiny epsilons need. With
# too few orders the bound is valid but loose. Those of a sampled mechanism are costly, and near 1
# its series does not converge: whole ones from 2
_FINE = tuple(1 + 2 ** (step / 32) for step in range(-208, 449))
_WHOLE = (*range(2, 65), *range(68, 129, 4), 160, 192, 256, 384, 512, 1024)
# The library's rounding may bring a divergence of almost nothing below 0. So many releases as no
# computer can make, but a server can ask for, would then take back what others have spent
_LEAST = 2.0**-46
_MOST_NOISE = 2.0**20
_PRECISION = 1e-3  # relative, of the noise that a budget needs
_OF_COUNTS = 0.25  # share of a hospital's epsilon that its counts cost by default
_LEAST_COUNTS, _MOST_COUNTS = 0.5, 1e4  # noise of that default, in patients


def epsilon(releases: Releases, delta: float) -> float:
    """Return the epsilon of all ``releases`` together at ``delta``, an upper bound.

    It is 0 for none and infinite without noise.
    """
    made = tuple(sorted((kind, count) for kind, count in releases.items() if count))
    return _epsilon(made, delta) if made else 0.0


@lru_cache(maxsize=4096)
def _epsilon(releases: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    if any(not noise for (noise, _), _ in releases):
        return math.inf
    # Imported late: it takes a second, and only private runs need it
    from dp_accounting.rdp import compute_epsilon

    sampled = any(rate < 1 for (_, rate), _ in releases)
    orders = _WHOLE if sampled else _FINE
    parts = [[count * rdp for rdp in _rdp(*kind, orders)] for kind, count in releases]
    divergences = [sum(each) for each in zip(*parts, strict=True)]
    return float(compute_epsilon(orders, divergences, delta)[0])


@lru_cache(maxsize=256)
def _rdp(noise: float, rate: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Return the Rényi divergence of one release at each order."""
    if rate >= 1:
        return tuple(order / (2 * noise**2) for order in orders)
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders))
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)))
    # It has no public name for them
    return tuple(max(float(divergence), _LEAST) for divergence in accountant._rdp)


def noise_for(budget: float, delta: float, made: Callable[[float], Releases]) -> float:
    """Return the least noise multiplier with which what a run makes stays within a budget.

    It may be a thousandth more than is needed.

    Args:
        budget: epsilon.
        delta: at which it holds.
        made: returns the releases of a run with a noise multiplier; more noise, less epsilon.

    Raises:
        SettingError: no noise is enough.
    """
    low, high = 0.0, 1.0
    while epsilon(made(high), delta) > budget:
        if high >= _MOST_NOISE:
            raise SettingError(
                f"no noise brings the run's epsilon to {budget:g}: 'statistics-noise' is spent "
                "whatever the steps' noise is; raise it, or the budget"
            )
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon(made(middle), delta) > budget else (low, middle)
    return high


def counts_noise_for(budget: float, delta: float) -> float:
    """Return the deviation of the noise on counts that costs a quarter of a budget, in patients.

    Of what a Gaussian release adds, one over the square of its noise, a quarter of epsilon is a
    sixteenth: counts leave nearly all of the budget.
    """
    usual = noise_for(_OF_COUNTS * budget, delta, lambda noise: {(noise, 1.0): 1})
    return min(max(usual, _LEAST_COUNTS), _MOST_COUNTS)
