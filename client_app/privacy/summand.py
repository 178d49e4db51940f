"""What a site adds to a secure sum, before it is masked: whole numbers, weighted by its samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedsilo.models.contract.errors import RefusedError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.secure_sum import Quantisation, Words, weight
from fedsilo.models.privacy.summed_metrics import counted, split_of
from fedsilo.strategies.wire.secure_keys import COUNTS, METRICS


@dataclass(frozen=True)
class Summand:
    """What a site has to add."""

    common: CommonSettings  # the run's settings
    # Samples by split; what it counts for in the mean are those of ``train``
    counts: Mapping[str, int] = field(default_factory=dict)
    measures: Sequence[str] = ()  # the splits of which its measurements may be summed

    def numbers(
        self,
        way: Quantisation,
        updates: Mapping[str, Tensor],
        splits: Sequence[str],
        portions: Mapping[str, float],
    ) -> dict[str, Words]:
        """Return what is summed: weighted updates, samples of ``train`` and each split, portions.

        Args:
            way: how numbers become whole.
            updates: of what was received, clipped, by name.
            splits: those that all sites measure.
            portions: measurements, each from 0 to 1, by name; of splits among ``splits``.

        Raises:
            RefusedError: a measurement is of another split: it would be the sum of few sites.
        """
        if odd := [name for name in portions if split_of(name) not in ("", *splits)]:
            raise RefusedError(f"'{odd[0]}' is of a split that not all sites measure")
        most = self.common.secure_samples
        counts = [min(self.counts[split], most) for split in counted(splits)]
        numbers = {COUNTS: np.array(counts, np.uint32)}
        if portions:
            weights = [self._weight(split_of(name) or "train") for name in sorted(portions)]
            values = np.array([portions[name] for name in sorted(portions)])
            numbers[METRICS] = replace(way, limit=1.0).quantised(values * weights)
        for name, update in updates.items():
            wide = update.detach().cpu().double().numpy()
            numbers[name] = way.quantised(self._weight("train") * wide)
        return numbers

    def _weight(self, split: str) -> float:
        return weight(self.common, self.counts[split])
