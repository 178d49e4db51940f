"""The number of samples that a site reports; with a cap on epsilon it is not exact.

A patient changes one count by one, so counts with Gaussian noise are private. The noise is drawn
once for the same data and the result is kept, because the mean of many draws would be the count. So
no run decides how large the noise is: the hospital does ('counts-noise'), and only the hospital
draws again.
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
        counts: by split and class.
        noise: the standard deviation of the noise, in patients; 0 if an older version did not note
            it.
        again: the same for another draw that the hospital has paid for and that the next run makes;
            0 for none.
    """

    counts: Counts
    noise: float = 0.0
    again: float = 0.0


# Older versions stored only counts, whose noise the run had decided
_Kept = dict[str, NoisyCounts | Counts]


def counts_noise(named: float, hospital: Ledger) -> float:
    """Return the standard deviation of the noise on counts, in patients.

    Args:
        named: the hospital's 'counts-noise'; 0 for noise that costs a quarter of its epsilon.
        hospital: its ledger of all runs, with cap and delta.
    """
    return named or counts_noise_for(hospital.cap, hospital.delta)


def noisy_counts(
    exact: Mapping[str, Sequence[int]], data: Mapping[str, str], named: float, hospital: Ledger
) -> Counts:
    """Return the reported counts by split and class; draw and pay for them the first time.

    Args:
        exact: the samples of each class, by split.
        data: values that identify the state of the data, such as fingerprints.
        named: the hospital's 'counts-noise', used for a first report.
        hospital: its ledger of all runs, which pays for a first report.

    Raises:
        EpsilonSpentError: the counts would exceed a cap on epsilon.
        CheckpointError: the stored counts are damaged, or cannot be written.
    """
    file, key = _file(hospital), json_digest(sorted(data.items()))
    with file.lock():
        known = _read(file)
        if key not in known:
            noise = counts_noise(named, hospital)
            hospital.spend({(noise, 1.0): 1})
            known[key] = NoisyCounts(_add_noise(exact, noise), noise)
            file.write({**known})
        elif known[key].again:  # this draw has been paid for
            noise = known[key].again
            known[key] = NoisyCounts(_add_noise(exact, noise), noise)
            file.write({**known})
    return known[key].counts


def kept_counts(hospital: Ledger) -> dict[str, NoisyCounts]:
    """Read all reported counts, by the digest of the data.

    Raises:
        CheckpointError: the file is damaged.
    """
    return _read(_file(hospital))


def draw_again(named: float, hospital: Ledger) -> float:
    """Pay for another draw of all stored counts; the next run that needs one makes it.

    Args:
        named: the hospital's 'counts-noise'.
        hospital: its ledger of all runs.

    Returns:
        The standard deviation of the new noise, in patients.

    Raises:
        EpsilonSpentError: it would exceed the cap on epsilon; the counts stay as they are.
        CheckpointError: the stored counts are damaged, or cannot be written.
    """
    file, noise = _file(hospital), counts_noise(named, hospital)
    with file.lock():
        known = _read(file)
        unpaid = [key for key, told in known.items() if not told.again]
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
    for key, told in file.read({}).items():
        if not isinstance(told, NoisyCounts):
            told = NoisyCounts(told)
        known[key] = told
    return known


def _add_noise(exact: Mapping[str, Sequence[int]], noise: float) -> Counts:
    """Return counts with noise, at least 0; the training split has at least 1 sample.

    All counts get noise, even those of an empty split, because its emptiness is a count too.
    Everything after the noise uses only noisy counts: a split that may well be empty is reported as
    empty, because it would have no metrics anyway.
    """
    sizes = [len(counts) for counts in exact.values()]
    flat = torch.tensor([*chain.from_iterable(exact.values())], dtype=torch.int64)
    release = Release(1.0, noise, 1, None)  # a patient belongs to one count
    drawn = release.with_noise({"": flat * UNITS})[""].round()
    told: Counts = {}
    for split, counts in zip(exact, torch.split(drawn, sizes), strict=True):
        least = _EMPTY * noise * math.sqrt(len(counts))
        if split != "train" and float(counts.sum()) <= least:
            told[split] = [0] * len(counts)
        else:
            told[split] = [max(0, int(count)) for count in counts.tolist()]
    if not sum(told["train"]):
        told["train"][0] = 1  # training needs at least one sample
    return told
