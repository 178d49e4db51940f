"""The sample counts that a site with a cap on epsilon reports: exact counts plus Gaussian noise.

A patient changes one count by one, so noisy counts are private. The noise is drawn once for the
same data and stored, because the mean of many draws would be the exact count. The hospital decides
how large the noise is ('counts-noise'), and only the hospital can have it drawn again; no run can.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from fedsilo.client_app.privacy.ledger import Ledger
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.models.privacy.accountant import counts_noise_for
from fedsilo.models.privacy.release import UNITS, Release

FILE = "told-counts.json"
Counts = dict[str, list[int]]
_EMPTY = 2.5  # a split is reported as empty below this many standard deviations of a sum of counts


@dataclass(frozen=True)
class NoisyCounts:
    """The noisy counts that were reported for one state of the data.

    Attributes:
        counts: the counts by split and class.
        noise: the standard deviation of their noise, in patients; 0 if an older version did not
            store it.
        again: the standard deviation of a new draw, which the hospital has paid for and the next
            run makes; 0 if no new draw is paid for.
    """

    counts: Counts
    noise: float = 0.0
    again: float = 0.0


# Older versions stored only counts, whose noise the run had decided
_Kept = dict[str, NoisyCounts | Counts]


def counts_noise(chosen_noise: float, hospital: Ledger) -> float:
    """Return the standard deviation of the noise on label counts, in patients.

    It is ``chosen_noise``, unless that is 0. In that case it is computed so that one report costs a
    quarter of the hospital's cap on epsilon. The computed value is at least 0.5 and at most 10,000.

    Args:
        chosen_noise: the hospital's 'counts-noise'.
        hospital: the hospital's ledger of all runs, with its cap and delta.

    Raises:
        SettingError: ``chosen_noise`` is 0, and no noise is enough for a quarter of the cap.
    """
    return chosen_noise or counts_noise_for(hospital.cap, hospital.delta)


def noisy_counts(
    exact: Mapping[str, Sequence[int]],
    data: Mapping[str, str],
    chosen_noise: float,
    hospital: Ledger,
) -> Counts:
    """Return the label counts that a site reports, by split and class, with stored noise.

    - For data that were never reported before, the ledger is charged. The noise is then drawn, and
      the noisy counts are stored.
    - For data that were reported before, the stored counts are returned. If the hospital has paid
      for a new draw (``draw_again``), new noise is drawn and stored first, without a further
      charge.

    Args:
        exact: the true number of samples of each class, by split.
        data: values that change with the data, such as fingerprints, by name.
        chosen_noise: the hospital's 'counts-noise', used for a first report (``counts_noise``).
        hospital: the hospital's ledger of all runs.

    Raises:
        EpsilonSpentError: a first report would exceed the cap on epsilon.
        SettingError: a first report needs noise, but ``counts_noise`` finds none for this cap.
        CheckpointError: the stored counts or the ledger are damaged, or cannot be written.
    """
    file, key = _file(hospital), json_digest(sorted(data.items()))
    with file.lock():
        known = _read(file)
        if key not in known:
            noise = counts_noise(chosen_noise, hospital)
            hospital.spend({(noise, 1.0): 1})
            known[key] = NoisyCounts(_add_noise(exact, noise), noise)
            file.write({**known})
        elif known[key].again:  # this draw has been paid for
            noise = known[key].again
            known[key] = NoisyCounts(_add_noise(exact, noise), noise)
            file.write({**known})
    return known[key].counts


def kept_counts(hospital: Ledger) -> dict[str, NoisyCounts]:
    """Read all stored noisy counts, by the digest of the data that they describe.

    The result may be empty.

    Raises:
        CheckpointError: the file of the counts is damaged.
    """
    return _read(_file(hospital))


def draw_again(chosen_noise: float, hospital: Ledger) -> float:
    """Charge the ledger for new noise on all stored counts, which the next run will draw.

    Each stored report of counts is charged once. A report whose new draw is already paid for but
    not yet made costs nothing, and keeps the standard deviation of the earlier payment. If no
    counts are stored, nothing is charged.

    Args:
        chosen_noise: the hospital's 'counts-noise' (``counts_noise``).
        hospital: the hospital's ledger of all runs.

    Returns:
        The standard deviation of the noise of the draws that are charged now, in patients.

    Raises:
        EpsilonSpentError: the draws would exceed the cap on epsilon. Nothing is charged or stored
            then.
        SettingError: ``chosen_noise`` is 0, and ``counts_noise`` finds no noise for this cap.
        CheckpointError: the stored counts or the ledger are damaged, or cannot be written.
    """
    file, noise = _file(hospital), counts_noise(chosen_noise, hospital)
    with file.lock():
        known = _read(file)
        unpaid = [key for key, reported in known.items() if not reported.again]
        if unpaid:
            hospital.spend({(noise, 1.0): len(unpaid)})
            for key in unpaid:
                known[key] = replace(known[key], again=noise)
            file.write({**known})
    return noise


def _file(hospital: Ledger) -> OwnFile[_Kept]:
    return OwnFile(
        hospital.path.with_name(FILE),
        _Kept,
        f"the hospital's own {FILE}",
        "bring it back; if it is removed the next run's counts cost epsilon again",
    )


def _read(file: OwnFile[_Kept]) -> dict[str, NoisyCounts]:
    known = {}
    for key, reported in file.read({}).items():
        if not isinstance(reported, NoisyCounts):
            reported = NoisyCounts(reported)
        known[key] = reported
    return known


def _add_noise(exact: Mapping[str, Sequence[int]], noise: float) -> Counts:
    """Return counts with Gaussian noise, rounded and at least 0, by split and class.

    The counts of an empty split get noise too, because its emptiness is information. Two further
    rules use only noisy counts:

    - All counts of a validation or test split become 0 if their total is at most 2.5 standard
      deviations of the total's noise.
    - If all counts of the training split are 0, its first class gets 1, because training needs a
      sample.

    Args:
        exact: the true number of samples of each class, by split.
        noise: the standard deviation of the noise, in patients.
    """
    sizes = [len(counts) for counts in exact.values()]
    flat = torch.tensor([*chain.from_iterable(exact.values())], dtype=torch.int64)
    release = Release(1.0, noise, 1, None)  # a patient belongs to one count
    # One release over all splits: a sample is in exactly one of their cells
    drawn = release.with_noise({"": flat * UNITS})[""].round()
    reported: Counts = {}
    for split, counts in zip(exact, torch.split(drawn, sizes), strict=True):
        # The sum of k counts has noise of k times the variance, so its deviation grows with the
        # root of k
        least = _EMPTY * noise * math.sqrt(len(counts))
        if split != "train" and float(counts.sum()) <= least:
            reported[split] = [0] * len(counts)
        else:
            reported[split] = [max(0, int(count)) for count in counts.tolist()]
    if not sum(reported["train"]):
        reported["train"][0] = 1  # training needs at least one sample
    return reported
