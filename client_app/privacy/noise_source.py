"""Where a site's noise comes from: the seed in a simulation, the operating system at a real site.

A server knows the run's seed; noise keyed on it could be subtracted again.
"""

import torch

from fedsilo.models.contract.seeding import generator


def noise_source(simulated: bool, seed: int, *key: int | str) -> torch.Generator | None:
    """Return the generator of a simulated site's noise, keyed on ``key``.

    At a real site it is None, which means the operating system (see
    ``fedsilo.models.privacy.gaussian_noise``).
    """
    return generator(seed, *key) if simulated else None
