"""How many samples a site says it has: at a hospital with a cap on epsilon not exactly.

A patient changes one count by one, so counts with Gaussian noise are private. They are drawn once
for the same data and kept: drawn again and again, their mean would be the count. So no run decides
how noisy they are: the hospital does ('counts-noise'), and it alone draws them again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedsilo.client_app.privacy.ledger import Ledger
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.models.privacy.accountant import counts_noise_for
from fedsilo.models.privacy.release import UNITS, Release

FILE = "told-counts.json"
Counts = dict[str, list[int]]
_EMPTY = 2.5  # deviations of a sum of counts below which a split is told to be empty


@dataclass(frozen=True)
class Told:
    """The counts of one state of the data, as they are told.

    Attributes:
        counts: by split and class.
        noise: its deviation in patients, or 0 where an older version has not noted it.
        again: the same of a further draw that the hospital has paid for and that the next run
            makes, or 0 for none.
    """

    counts: Counts
    noise: float = 0.0
    again: float = 0.0


# Older versions kept nothing but counts, whose noise a run had decided
_Kept = dict[str, Told | Counts]


def counts_noise(named: float, hospital: Ledger) -> float:
    """Return the deviation of the noise on counts, in patients.

    Args:
        named: the hospital's 'counts-noise', or 0 for what costs a quarter of its epsilon.
        hospital: its ledger of all runs, with cap and delta.
    """
    return named or counts_noise_for(hospital.cap, hospital.delta)


def told_counts(
    exact: Mapping[str, Sequence[int]], data: Mapping[str, str], named: float, hospital: Ledger
) -> Counts:
    """Return counts by split and class as they are reported.

    Args:
        exact: samples of each class, by split.
        data: what says that the data are the same, such as their fingerprints.
        named: the hospital's 'counts-noise', for counts that are reported for the first time.
        hospital: its ledger of all runs, which pays for them.

    Raises:
        EpsilonSpentError: they would bring epsilon above a cap.
        CheckpointError: what was reported is damaged, or cannot be kept.
    """
    file, key = _file(hospital), json_digest(sorted(data.items()))
    with file.locked():
        known = _read(file)
        if key not in known:
            noise = counts_noise(named, hospital)
            hospital.spend({(noise, 1.0): 1})
            known[key] = Told(_noisy(exact, noise), noise)
            file.write({**known})
        elif known[key].again:  # it has been paid for
            noise = known[key].again
            known[key] = Told(_noisy(exact, noise), noise)
            file.write({**known})
    return known[key].counts


def kept_counts(hospital: Ledger) -> dict[str, Told]:
    """Read all counts that have been told, by the digest of the data.

    Raises:
        CheckpointError: it is damaged.
    """
    return _read(_file(hospital))


def draw_again(named: float, hospital: Ledger) -> float:
    """Pay for another draw of all counts that are kept; the next run that needs one makes it.

    Args:
        named: the hospital's 'counts-noise'.
        hospital: its ledger of all runs.

    Returns:
        The deviation of the new draw's noise, in patients.

    Raises:
        EpsilonSpentError: it would bring epsilon above the cap; the counts stay as they are.
        CheckpointError: what was reported is damaged, or cannot be kept.
    """
    file, noise = _file(hospital), counts_noise(named, hospital)
    with file.locked():
        known = _read(file)
        unpaid = [key for key, told in known.items() if not told.again]
        if unpaid:
            hospital.spend({(noise, 1.0): len(unpaid)})
            known |= {key: Told(known[key].counts, known[key].noise, noise) for key in unpaid}
            file.write({**known})
    return noise


def _file(hospital: Ledger) -> OwnFile[_Kept]:
    return OwnFile(
        hospital.path.with_name(FILE),
        _Kept,
        f"the hospital's own {FILE}",
        "bring it back; if it is removed the next run's counts cost epsilon again",
    )


def _read(file: OwnFile[_Kept]) -> dict[str, Told]:
    kept = file.read({})
    return {key: told if isinstance(told, Told) else Told(told) for key, told in kept.items()}


def _noisy(exact: Mapping[str, Sequence[int]], noise: float) -> Counts:
    """Return counts with noise, none below 0 and of the training split at least 1.

    All counts get noise, those of a split without samples too: that it has none is a count. What
    follows the noise is of noisy counts alone: a split of so few that it may have none is told to
    be empty, as it would have no measurements anyway.
    """
    sizes = [len(counts) for counts in exact.values()]
    # A patient is one of one count
    release, flat = Release(1.0, noise, 1, None), [n for counts in exact.values() for n in counts]
    drawn = release.with_noise({"": torch.tensor(flat, dtype=torch.int64) * UNITS})[""].round()
    told = {}
    for split, counts in zip(exact, torch.split(drawn, sizes), strict=True):
        least = _EMPTY * noise * math.sqrt(len(counts))
        there = split == "train" or float(counts.sum()) > least
        told[split] = [max(0, int(n)) if there else 0 for n in counts.tolist()]
    if not sum(told["train"]):
        told["train"][0] = 1  # training needs one
    return told
