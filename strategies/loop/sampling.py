"""Which sites a round asks, where it does not ask all: sampled by seed and round alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.secure_sum import needed_sites, quantisation
from fedsilo.strategies.loop.robust import why_too_few


def sampled_sites(common: CommonSettings, sites: Sequence[str], round_: int) -> list[str]:
    """Return the sites that ``round_`` may ask, sorted: 'sites-per-round' of them, or all."""
    count = common.sites_per_round
    if not count or count >= len(sites):
        return sorted(sites)
    rng = np.random.default_rng(derive_seed(common.seed, "sites-per-round", round_))
    chosen = rng.choice(len(sites), count, replace=False)
    return sorted(sorted(sites)[place] for place in chosen)


def refuse_site_count(common: CommonSettings, sites: int) -> None:
    """Refuse settings that do not fit the number of sites.

    Raises:
        SettingError: 'sites-per-round', 'aggregation' or 'secure-aggregation' need more, or its
            threshold or bits do not fit.
    """
    if common.sites_per_round > sites:
        raise SettingError(
            f"setting 'sites-per-round' is {common.sites_per_round}, more than there are sites "
            f"({sites}): lower it, or set it to 0 for all"
        )
    asked = common.sites_per_round or sites
    if reason := why_too_few(common, asked):
        raise SettingError(reason)
    if common.secure_aggregation != "none":
        quantisation(common, asked, needed_sites(common, asked))
