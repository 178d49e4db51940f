"""The accountant: (epsilon, delta) of a number of Gaussian mechanisms.

Messages compose by Rényi differential privacy (Mironov 2017), converted to (epsilon, delta) by
Canonne, Kamath and Steinke 2020. Privacy is not amplified by sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

SPENT = "epsilon is spent"  # starts a site's refusal; the server recognises it by these words
# From just above 1, for almost no noise, to what tiny epsilons need; the conversion to (epsilon,
# delta) takes none up to 1.01. With too few orders the bound is valid but loose
_ORDERS = [1 + 2 ** (step / 32) for step in range(-208, 449)]


@lru_cache(maxsize=4096)
def epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the epsilon of ``releases`` messages at ``delta``, an upper bound.

    It is 0 for no message and infinite without noise; the exact value is up to a tenth lower.
    """
    if not releases:
        return 0.0
    if not noise_multiplier:
        return math.inf
    # Imported late: it takes a second, and only private runs need it
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(_ORDERS)
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise_multiplier), releases))
    return float(accountant.get_epsilon(delta))


def combined_multiplier(releases: Mapping[float, int]) -> float:
    """Return the noise multiplier of one message that reveals as much as ``releases`` (z -> count).

    Gaussian mechanisms compose to one, whose 1/z² is the sum of theirs. Infinite for no message.
    """
    information = sum(count / z**2 for z, count in releases.items())
    return 1 / math.sqrt(information) if information else math.inf


def epsilon_of_a_change(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the epsilon of any change of a site's data: clipped vectors may be 2C apart."""
    return epsilon(noise_multiplier / 2, releases, delta)
