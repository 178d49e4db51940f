"""The privacy accountant: (epsilon, delta) of Gaussian releases, with or without sampling.

Releases compose by Rényi differential privacy (Mironov 2017; Poisson sampling: Mironov, Talwar and
Zhang 2019), converted to (epsilon, delta) by Canonne, Kamath and Steinke 2020. Two neighbouring
data sets differ in one patient, who is added or removed.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from fedsilo.core.errors import SettingError

SPENT = "epsilon is spent"  # starts a site's refusal; the server recognises it by these words
# (noise multiplier z, sampling rate q) -> number of releases; q = 1 means no sampling
Releases = Mapping[tuple[float, float], int]
# Rényi orders. With too few orders the bound is valid but loose. Without sampling they range from
# just above 1, for almost no noise, to the large orders that tiny epsilons need. With sampling each
# order is costly, and near 1 the series does not converge, so only whole orders from 2 are used
_FINE = tuple(1 + 2 ** (step / 32) for step in range(-208, 449))
_WHOLE = (*range(2, 65), *range(68, 129, 4), 160, 192, 256, 384, 512, 1024)
# The library's rounding may bring a tiny divergence below 0. A server could then ask for so many
# of these releases that epsilon already spent would be taken back
_LEAST = 2.0**-46
_MOST_NOISE = 2.0**20
_PRECISION = 1e-3  # relative precision of the noise for a budget
_OF_COUNTS = 0.25  # share of a hospital's epsilon that its counts cost by default
_LEAST_COUNTS, _MOST_COUNTS = 0.5, 1e4  # bounds of the default noise on counts, in patients


def epsilon(releases: Releases, delta: float) -> float:
    """Compute an upper bound of epsilon at ``delta`` for all ``releases`` together.

    Kinds of release with the number 0 are ignored. Epsilon is 0 without releases, and infinite if a
    release is made without noise. A sampling rate below 1 means Poisson sampling.

    Args:
        releases: (noise multiplier, sampling rate) -> number of Gaussian releases of that kind.
        delta: the delta of (epsilon, delta), above 0 and below 1.
    """
    made = []
    for kind, count in sorted(releases.items()):
        if count:
            made.append((kind, count))
    if not made:
        return 0.0
    return _epsilon(tuple(made), delta)


@lru_cache(maxsize=4096)
def _epsilon(releases: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    """Compute an upper bound of epsilon by Rényi differential privacy, and cache the result.

    At each of many orders, the Rényi divergences of all releases are added up. dp_accounting
    converts the sums to the smallest epsilon. If a kind has noise 0, the result is infinite.

    Args:
        releases: ((noise multiplier, sampling rate), number) for each kind, at least one. The
            caller sorts the kinds, so that runs with equal releases share a cached result.
        delta: the delta of (epsilon, delta).
    """
    orders: tuple[float, ...] = _FINE
    for (noise, rate), _ in releases:
        if not noise:
            return math.inf
        if rate < 1:
            orders = _WHOLE
    # Imported late: it takes a second, and only private runs need it
    from dp_accounting.rdp import compute_epsilon

    # Rényi divergences of one order add up over releases (Mironov 2017, proposition 1)
    divergences = [0.0] * len(orders)
    for (noise, rate), count in releases:
        for place, divergence in enumerate(_rdp(noise, rate, orders)):
            divergences[place] += count * divergence
    return float(compute_epsilon(orders, divergences, delta)[0])


@lru_cache(maxsize=256)
def _rdp(noise: float, rate: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Compute the Rényi divergence of one Gaussian release at each of the ``orders``.

    Without sampling the divergence is order / (2 ``noise``²). With Poisson sampling, the package
    dp_accounting computes it, and it is at least 2^-46.

    Args:
        noise: the noise multiplier, above 0.
        rate: the rate of Poisson sampling. 1 or more means no sampling.
        orders: the Rényi orders.
    """
    if rate >= 1:
        return tuple(order / (2 * noise**2) for order in orders)
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders))
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)))
    # dp_accounting does not give the divergences a public name
    return tuple(max(float(divergence), _LEAST) for divergence in accountant._rdp)


def noise_for(budget: float, delta: float, releases: Callable[[float], Releases]) -> float:
    """Find a noise multiplier, at most 0.1 % above the smallest, that keeps a run within a budget.

    Args:
        budget: the largest allowed epsilon.
        delta: the delta of (epsilon, delta).
        releases: a function from a noise multiplier to the run's releases. More noise must not
            raise epsilon.

    Raises:
        SettingError: even a multiplier of 2^20 is not enough. Releases that do not depend on the
            multiplier then exceed the budget.
    """
    # Doubling finds an upper end; bisection then keeps ``high`` within the budget
    low, high = 0.0, 1.0
    while epsilon(releases(high), delta) > budget:
        if high >= _MOST_NOISE:
            raise SettingError(
                f"no noise brings the run's epsilon to {budget:g}: 'privacy.statistics-noise' is "
                "spent whatever the steps' noise is; raise it, or the budget"
            )
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if epsilon(releases(middle), delta) > budget:
            low = middle
        else:
            high = middle
    return high


def counts_noise_for(budget: float, delta: float) -> float:
    """Choose the standard deviation of the noise on a hospital's numbers of patients.

    With this noise, releasing the numbers once costs a quarter of ``budget``, so that most of the
    budget is left for training. The result is limited to 0.5 to 10,000.

    Args:
        budget: the hospital's largest epsilon over all runs.
        delta: the delta of (epsilon, delta).

    Raises:
        SettingError: no noise is enough for a quarter of the budget.
    """
    # Releases add up by 1 / noise², so a quarter of epsilon is only a sixteenth of the sum
    usual = noise_for(_OF_COUNTS * budget, delta, lambda noise: {(noise, 1.0): 1})
    return min(max(usual, _LEAST_COUNTS), _MOST_COUNTS)
