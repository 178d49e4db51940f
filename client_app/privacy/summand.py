"""What a site adds to a secure sum, before it is masked: whole numbers, weighted by its samples.

A site that could not answer adds 0 to everything and 1 to the number of those that could not. So
the server learns how many sites failed, but not which: a failure that it could see would be an
answer of this site alone, such as whether one of its patients makes a loss overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.secure_sum import Quantisation, Words, weigh_site
from fedsilo.models.privacy.summed_metrics import split_of
from fedsilo.strategies.wire.secure_keys import COUNTS, MEASURED, METRICS


@dataclass(frozen=True)
class Summand:
    """What a site has to add."""

    common: CommonSettings  # the run's settings
    # Samples by split; what it counts for in the mean are those of ``train``
    counts: Mapping[str, int] = field(default_factory=dict)
    failed: bool = False  # it could not answer: it adds nothing but that

    def numbers(
        self,
        way: Quantisation,
        updates: Mapping[str, Tensor],
        portions: Mapping[str, float | None],
    ) -> dict[str, Words]:
        """Make the whole numbers that are summed, of the same names and shapes in every case.

        Args:
            way: how numbers become whole.
            updates: of what was received, clipped, by name.
            portions: measurements, each from 0 to 1, by name; None where there is no value.
        """
        own = weigh_site(way, self._samples("train"))
        counts = [min(self._samples("train"), way.samples), int(self.failed)]
        numbers = {COUNTS: np.array(counts, np.uint32)}
        if portions:
            behind = [self._behind(name, portions[name], way) for name in sorted(portions)]
            values = np.array([portions[name] or 0.0 for name in sorted(portions)])
            numbers[MEASURED] = np.array(behind, np.uint32)
            weights = np.array([weigh_site(way, samples) for samples in behind])
            numbers[METRICS] = replace(way, limit=1.0).quantise(values * weights)
        for name, update in updates.items():
            wide = update.detach().cpu().double().numpy()
            numbers[name] = way.quantise(own * wide)
        return numbers

    def _behind(self, name: str, portion: float | None, way: Quantisation) -> int:
        """Count the samples behind a measurement; 0 where there is no value."""
        if portion is None:
            return 0
        return min(self._samples(split_of(name) or "train"), way.samples)

    def _samples(self, split: str) -> int:
        return 0 if self.failed else self.counts.get(split, 0)
