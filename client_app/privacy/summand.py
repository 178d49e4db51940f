"""A site's numbers for a secure sum before masking: whole, and weighted by its samples.

A site that could not answer adds 0 to everything and 1 to the number of failed sites. So the server
learns how many sites failed, but not which. A visible failure would be an answer of this site by
itself, for example whether one of its patients makes a loss overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import Quantisation, Words, weigh_site
from fedsilo.models.privacy.summed_metrics import split_of
from fedsilo.strategies.wire.secure_keys import COUNTS, MEASURED, METRICS


@dataclass(frozen=True)
class Summand:
    """The samples of a site, and whether it could answer."""

    common: CommonSettings  # the run's settings
    # Samples by split; those of ``train`` are its weight in the mean
    counts: Mapping[str, int] = field(default_factory=dict)
    failed: bool = False  # whether it could not answer; then it adds only this mark

    def numbers(
        self,
        way: Quantisation,
        updates: Mapping[str, Tensor],
        portions: Mapping[str, float | None],
    ) -> dict[str, Words]:
        """Build the whole numbers to sum; names and shapes are the same in every case.

        Args:
            way: the quantisation.
            updates: the updates to the received arrays, clipped, by name.
            portions: the metrics, each scaled to 0 to 1, by name; None for no value.

        Returns:
            uint32 arrays by name.
        """
        own = weigh_site(way, self._samples("train"))
        counts = [min(self._samples("train"), way.samples), int(self.failed)]
        numbers = {COUNTS: np.array(counts, np.uint32)}
        if portions:
            behind, weighted = [], []
            for name in sorted(portions):
                samples = self._behind(name, portions[name], way)
                behind.append(samples)
                weighted.append((portions[name] or 0.0) * weigh_site(way, samples))
            numbers[MEASURED] = np.array(behind, np.uint32)
            numbers[METRICS] = replace(way, limit=1.0).quantise(np.array(weighted))
        for name, update in updates.items():
            wide = update.detach().cpu().double().numpy()
            numbers[name] = way.quantise(own * wide)
        return numbers

    def _behind(self, name: str, portion: float | None, way: Quantisation) -> int:
        """Return the number of samples behind a metric; 0 if it has no value."""
        if portion is None:
            return 0
        return min(self._samples(split_of(name) or "train"), way.samples)

    def _samples(self, split: str) -> int:
        if self.failed:
            return 0
        return self.counts.get(split, 0)
