"""Which sites a round asks, where it does not ask all: drawn by seed and round, by nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.contract.errors import SettingError
from models.contract.seeding import derive_seed
from models.contract.settings import CommonSettings
from strategies.loop.robust import why_too_few


def drawn_sites(common: CommonSettings, sites: Sequence[str], round_: int) -> list[str]:
    """Return the sites that ``round_`` may ask, sorted: 'sites-per-round' of them, or all."""
    count = common.sites_per_round
    if not count or count >= len(sites):
        return sorted(sites)
    draw = np.random.default_rng(derive_seed(common.seed, "sites-per-round", round_))
    chosen = draw.choice(len(sites), count, replace=False)
    return sorted(sorted(sites)[place] for place in chosen)


def refuse_site_count(common: CommonSettings, sites: int) -> None:
    """Refuse settings that cannot be with so many sites.

    Raises:
        SettingError: 'sites-per-round' or 'aggregation' need more.
    """
    if common.sites_per_round > sites:
        raise SettingError(
            f"setting 'sites-per-round' is {common.sites_per_round}, more than there are sites "
            f"({sites}): lower it, or set it to 0 for all"
        )
    if reason := why_too_few(common, common.sites_per_round or sites):
        raise SettingError(reason)
