"""Where a site's noise comes from: the seed in a simulation, the operating system at a real site.

A server knows the run's seed; noise keyed on it could be taken off again.
"""

from __future__ import annotations

import torch

from fedsilo.client_app.site.request import Request
from fedsilo.models.contract.seeding import generator


def noise_source(request: Request, seed: int, *key: int | str) -> torch.Generator | None:
    """Return the generator of noise: in simulation one keyed on ``key``.

    None, at a real site, stands for the operating system (see
    ``fedsilo.models.privacy.gaussian_noise``).
    """
    return generator(seed, *key) if request.simulated else None
