"""How many samples a site says it has: at a hospital with a cap on epsilon not exactly.

A patient changes one count by one, so counts with Gaussian noise are private. They are drawn once
for the same data and kept: drawn again and again, their mean would be the count.
"""

from collections.abc import Mapping, Sequence

import torch

from fedsilo.client_app.privacy.ledger import Ledger
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.models.privacy.gaussian_mechanism import with_noise

FILE = "told-counts.json"
Counts = dict[str, list[int]]


def told_counts(
    exact: Mapping[str, Sequence[int]], data: Mapping[str, str], noise: float, hospital: Ledger
) -> Counts:
    """Return counts by split and class as they are reported.

    Args:
        exact: samples of each class, by split.
        data: what says that the data are the same, such as their fingerprints.
        noise: the noise multiplier of counts that are reported for the first time.
        hospital: its ledger of all runs, which pays for them.

    Raises:
        EpsilonSpentError: they would bring epsilon above a cap.
        CheckpointError: what was reported is damaged, or cannot be kept.
    """
    file: OwnFile[dict[str, Counts]] = OwnFile(
        hospital.path.with_name(FILE),
        dict[str, Counts],
        f"the hospital's own {FILE}",
        "bring it back; if it is removed the next run's counts cost epsilon again",
    )
    key = json_digest(sorted(data.items()))
    with file.locked():
        known = file.read({})
        if key not in known:
            hospital.spend({(noise, 1.0): 1})
            known[key] = {split: _noisy(counts, noise) for split, counts in exact.items()}
            file.write(known)
    return known[key]


def _noisy(counts: Sequence[int], noise: float) -> list[int]:
    """Return counts with noise, none below 0 and their sum at least 1, which training needs."""
    if not sum(counts):
        return list(counts)  # that a split is empty is how the data set is cut
    drawn = with_noise(torch.tensor(counts, dtype=torch.float64), noise, None)
    reported = [int(count) for count in drawn.round().clamp(min=0).tolist()]
    return reported if sum(reported) else [1, *reported[1:]]
