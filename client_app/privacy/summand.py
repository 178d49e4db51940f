"""A site's numbers for a secret sum before masking: quantised, and weighted by its samples.

A site that could not answer adds 0 to everything, and 1 to the number of failed sites. So the
server learns how many sites failed, but not which. A visible failure would be this site's own
answer, for example whether one of its patients makes a loss overflow.
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
    """The weight of a site in a secret sum: its sample counts, and whether it could answer."""

    common: CommonSettings  # the run's settings
    # Samples by split; the number in ``train`` is the site's weight in the mean
    counts: Mapping[str, int] = field(default_factory=dict)
    failed: bool = False  # whether the site could not answer; if so, it adds only this mark

    def numbers(
        self,
        quantisation: Quantisation,
        updates: Mapping[str, Tensor],
        scaled_metrics: Mapping[str, float | None],
    ) -> dict[str, Words]:
        """Weight and quantise this site's numbers for a secret sum; return uint32 arrays by name.

        - Each update is multiplied by the site's weight, which is proportional to its training
          samples.
        - ``COUNTS`` has two numbers: the training samples, and a 1 if the site failed, otherwise 0.
        - If there are metrics, ``METRICS`` has their weighted values and ``MEASURED`` the samples
          behind each value. Both arrays are sorted by the metrics' names.

        A failed site returns the same names and shapes, and all numbers except that 1 stand for 0.

        Args:
            quantisation: maps numbers to integers. Its ``samples`` caps a site's weight and counts.
            updates: the trained minus the received arrays, clipped, by name.
            scaled_metrics: the metrics, each scaled to 0 to 1, by name; None for a metric without a
                value.
        """
        own = weigh_site(quantisation, self._samples("train"))
        # The server divides by the total of the first count; the second tells how many sites failed
        counts = [min(self._samples("train"), quantisation.samples), int(self.failed)]
        numbers = {COUNTS: np.array(counts, np.uint32)}
        if scaled_metrics:
            behind, weighted = [], []
            for name in sorted(scaled_metrics):
                samples = self._samples_behind(name, scaled_metrics[name], quantisation)
                behind.append(samples)
                weighted.append((scaled_metrics[name] or 0.0) * weigh_site(quantisation, samples))
            numbers[MEASURED] = np.array(behind, np.uint32)
            numbers[METRICS] = replace(quantisation, limit=1.0).quantise(np.array(weighted))
        for name, update in updates.items():
            wide = update.detach().cpu().double().numpy()
            numbers[name] = quantisation.quantise(own * wide)
        return numbers

    def _samples_behind(
        self, name: str, scaled_metric: float | None, quantisation: Quantisation
    ) -> int:
        """Return the number of samples behind a metric, which is its weight in the secret sum.

        This number is the size of the metric's split, but at most ``quantisation.samples``. It is 0
        if the metric has no value or the site failed.

        Args:
            name: the metric's name, which contains the split, as in "incoming.val.loss". If it
                contains no split, training samples are counted.
            scaled_metric: the metric, scaled to 0 to 1; None if it has no value.
            quantisation: its ``samples`` is the largest number that a site may count.
        """
        if scaled_metric is None:
            return 0
        return min(self._samples(split_of(name) or "train"), quantisation.samples)

    def _samples(self, split: str) -> int:
        if self.failed:
            return 0
        return self.counts.get(split, 0)
