"""Measures how far a case is from the training samples of its model that are on this machine.

Novelty is computed where predictions are made, and no part of it is sent. A table's rows are
compared as the network gets them, images by the network's penultimate features. A case is unusual
if its score is above a limit, which is set by held-out samples. With 45 of them or more, at most 5
% of such samples are unusual, nine times in ten. A code, such as a cholesterol of 0 for "not
measured", must not make the values between it and the measured ones usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor

from fedsilo.models.measures.calibration import rows_needed
from fedsilo.models.measures.novelty import Booleans, Familiar, Floats, Novelty

SHARE = 0.05  # share of held-out samples that may count as unusual
# With this many held-out samples, the share holds nine times in ten, because 0.95^45 < 0.1
_SURE = 45
_FEW = 10  # a feature with at most this many different values is compared value by value
_CODED = 10  # fewest training samples that share a code
_APART = 0.5  # smallest distance between a code and all other values, in standard deviations
_TIMES = 5  # the same as a multiple of the median distance between two neighbouring values


@dataclass(frozen=True)
class Code:
    """A value, far from all other values, that many training samples share.

    An example is a cholesterol of 0, which may mean "not measured". Both attributes are in
    standardised units.

    Attributes:
        value: the code itself, which is the lowest or highest training value of its feature.
        nearest: the training value next to it.
    """

    value: float
    nearest: float

    def equal(self, values: Floats) -> Booleans:
        """Mark the values (k,) that equal the code up to rounding."""
        marks: Booleans = np.isclose(values, self.value, rtol=1e-5, atol=1e-5)
        return marks

    def gap(self, values: Floats) -> Floats:
        """Measure how far each value between the code and ``nearest`` is from ``nearest``.

        The code (``value``) is a number that many training samples share, such as 0 for "not
        measured". ``nearest`` is the training value next to it. No training value lies in the gap
        between the two, which is an open interval.

        Args:
            values: standardised values, of shape (k,).

        Returns:
            For each value in the gap, the distance to ``nearest``. For any other value, and for a
            value that equals the code except for rounding, 0.
        """
        low, high = sorted((self.value, self.nearest))
        between = (values > low) & (values < high) & ~self.equal(values)
        distances: Floats = np.where(between, np.abs(values - self.nearest), 0.0)
        return distances


def find_codes(values: Floats, missing: Booleans) -> dict[int, Code]:
    """Find codes in a table's training values.

    A code is a number that stands for something else, such as 0 for "not measured". It is the
    lowest or the highest value of a feature, and at least ten samples share it. Its distance to the
    next value must be above 0.5 standard deviations, and above five times the median distance
    between neighbouring different values.

    If both ends of a feature qualify, only the lowest value is a code. Features with at most ten
    different values are skipped.

    Args:
        values: (n, f), the standardised training rows.
        missing: bool (n, f), which values are imputed. These are ignored.

    Returns:
        Index of the feature -> its code.
    """
    codes: dict[int, Code] = {}
    for place in range(values.shape[1]):
        known = values[~missing[:, place], place]
        numbers, counts = np.unique(known, return_counts=True)
        if len(numbers) <= _FEW:
            continue
        # Distances between neighbouring values; numbers are sorted, so the ends are lowest and
        # highest
        steps = np.diff(numbers)
        apart = max(_APART, _TIMES * float(np.median(steps)))
        # An outlier is far from all other values, too, but ten patients do not share it
        if counts[0] >= _CODED and steps[0] > apart:
            codes[place] = Code(float(numbers[0]), float(numbers[1]))
        elif counts[-1] >= _CODED and steps[-1] > apart:
            codes[place] = Code(float(numbers[-1]), float(numbers[-2]))
    return codes


@dataclass(frozen=True)
class Reference:
    """The training samples of a model that are on this machine, with the limit and the codes."""

    sites: tuple[str, ...]  # sites whose samples are the reference
    known: Familiar
    limit: float | None  # the score beyond which a case is unusual; None: too few held-out samples
    held_out: int  # number of held-out samples that decided the limit
    split: str  # split of the held-out samples
    rows: Floats  # (n, f), a table's training rows as they were read, NaN where one is missing
    others: str  # a sentence on sites whose training data are unknown here, or empty
    codes: Mapping[int, Code] = field(default_factory=dict)  # place of a table's feature -> code

    def lines(self) -> list[str]:
        """Describe the training samples with which ``predict`` compares cases, in sentences.

        The first sentence states the number of samples, their sites, and the limit above which a
        case is unusual. If the training data of some sites of the model are unknown here, a second
        sentence says so.
        """
        sites = ", ".join(self.sites)
        basis = f"novelty rests on {self.known.rows} training samples of {sites}"
        lines = [f"{basis}; {self._limit_text()}"]
        if self.others:
            lines.append(self.others)
        return lines

    def _limit_text(self) -> str:
        """Explain in a phrase how the limit of novelty was set, or why there is none.

        The limit is the score above which a case counts as unusual. It is computed from held-out
        samples, and with too few of them there is no limit. With fewer than 45, it is their highest
        score, and the phrase gives the expected share of similar samples beyond it. With 45 or
        more, the phrase promises that, nine times in ten, at most 5 % of similar samples are beyond
        it.
        """
        if self.limit is None:
            return (
                f"no case counts as unusual by its score, since a limit takes "
                f"{rows_needed(1 - SHARE)} held-out samples and here are {self.held_out}"
            )
        if self.held_out < _SURE:
            return (
                f"its limit is the highest score of {self.held_out} {self.split} samples: on "
                f"average {1 / (self.held_out + 1):.1%} of such samples are beyond it"
            )
        return (
            f"its limit on {self.held_out} {self.split} samples: nine times in ten at most "
            f"{SHARE:.0%} of such samples are beyond it"
        )

    def novelty(self, inputs: Tensor, missing: Tensor | None = None) -> CaseNovelty:
        """Measure how unlike the training samples each case is.

        The result has scores for each value and for the case as a whole. For a table, it also marks
        codes, such as 0 for "not measured", and values in the gap between a code and the nearest
        training value. An imputed value is neither a code nor in a gap.

        Args:
            inputs: (k, f), rows as the network gets them, or features of images.
            missing: bool (k, f), which values are imputed. None means that none are.
        """
        values = inputs.numpy().astype(np.float64)
        lacking = np.zeros(values.shape, bool)
        if missing is not None:
            lacking = missing.numpy()
        # An imputed value is the mean, so it is not a code and not in a gap
        coded, gaps = np.zeros(values.shape, bool), np.zeros(values.shape)
        for place, code in self.codes.items():
            coded[:, place] = code.equal(values[:, place]) & ~lacking[:, place]
            gaps[:, place] = np.where(lacking[:, place], 0.0, code.gap(values[:, place]))
        return CaseNovelty(self, self.known.novelty(values, lacking), coded, gaps)

    def document(self) -> dict[str, Any]:
        """Describe the training samples and the limit for the JSON file next to the predictions.

        The result has no value of a sample. Its keys are:

        - ``sites`` and ``training samples``: the sites of the samples, and their number.
        - ``limit``: the novelty score above which a case is unusual, or None.
        - ``held-out samples`` and ``held-out split``: the samples that decided the limit.
        - ``share beyond it``: the share of such samples that may exceed the limit, 0.05.
        - ``not known``: a sentence on sites whose data are unknown here.
        """
        return {
            "sites": list(self.sites),
            "training samples": self.known.rows,
            "held-out samples": self.held_out,
            "held-out split": self.split,
            "limit": self.limit,
            "share beyond it": SHARE,
            "not known": self.others,
        }


@dataclass(frozen=True)
class CaseNovelty:
    """The novelty of k cases, measured against a reference.

    Attributes:
        reference: the training samples, the limit and the codes.
        novelty: the scores of the cases.
        coded: (k, f), whether a value is its feature's code.
        gaps: (k, f), the distance to measured training values if a value lies between these and
            its feature's code, such as a cholesterol of 6.1 between 0 and 85; otherwise 0.
    """

    reference: Reference
    novelty: Novelty
    coded: Booleans
    gaps: Floats

    def scores(self) -> Floats:
        """Return the novelty of each case (k,), scaled so that a case above 1 is unusual.

        The scores of the cases are divided by the limit. Without a limit, they are not divided, and
        a case above 1 is only doubtful. A value between a code and the nearest training value may
        have a wrong unit. A case with such values therefore gets at least 1 plus the largest
        distance of these values to the training values.
        """
        scores: Floats = self.novelty.score / (self.reference.limit or 1.0)
        gaps = self.gaps.max(axis=1, initial=0.0)
        # Whatever the limit, a value in a gap is suspicious: mmol/L instead of mg/dL puts it there
        return np.where(gaps > 0, np.maximum(scores, 1.0 + gaps), scores)

    def unusual(self) -> Booleans:
        """Mark the cases beyond the limit or with a value in a gap, bool (k,)."""
        unusual: Booleans = self.gaps.max(axis=1, initial=0.0) > 0
        if self.reference.limit is not None:
            unusual |= self.novelty.score > self.reference.limit
        return unusual

    def columns(self, features: Sequence[str]) -> list[tuple[str, ...]]:
        """List for each case the table's columns with a value unlike all training values.

        A column is listed if the score of its value is above the limit of novelty, which is 1 if
        none is set. It is also listed if the value lies between a code, such as 0 for "not
        measured", and the nearest training value. ``features`` has the names of the table's
        features.
        """
        count = len(features)
        beyond = self.novelty.values[:, :count] > (self.reference.limit or 1.0)
        return _column_names(beyond | (self.gaps[:, :count] > 0), features)

    def reasons(self, features: Sequence[str]) -> list[str]:
        """Explain for each case why it is unusual; the string is empty if it is not."""
        return self._explain(self.unusual(), features)

    def doubts(self, features: Sequence[str]) -> list[str]:
        """Explain for each case why it is doubtful.

        A case that is unusual is never doubtful. Any other case is doubtful if one of its values is
        a code, such as 0 for "not measured". If the reference has no limit of novelty, a case with
        a novelty score above 1 is doubtful too. For a case that is not doubtful, the string is
        empty.
        """
        unusual = self.unusual()
        beyond = np.zeros(len(unusual), bool)
        if self.reference.limit is None:
            beyond = (self.novelty.score > 1) & ~unusual
        doubts = self._explain(beyond, features)
        codes = _column_names(self.coded[:, : len(features)], features)
        for place, columns in enumerate(codes):
            if columns and not unusual[place]:
                said = f"may mean 'not measured', far from all other values: {', '.join(columns)}"
                doubts[place] = "; ".join(filter(None, (said, doubts[place])))
        return doubts

    def _explain(self, marked: Booleans, features: Sequence[str]) -> list[str]:
        """Explain the scores of the cases that ``marked`` (k,) selects, in one string per case.

        The string joins up to three reasons with semicolons:

        - some columns have a value unlike all training values (``columns`` lists them).
        - the whole case is unlike any training sample.
        - the case lacks values that training samples rarely lack.

        For a case that is not selected, the string is empty.
        """
        limit = self.reference.limit or 1.0
        texts = []
        for place, columns in enumerate(self.columns(features)):
            parts = []
            if columns:
                parts.append(f"beyond the training values: {', '.join(columns)}")
            if self.novelty.distance[place] > limit:
                parts.append("unlike any training sample")
            if self.novelty.missing[place] > limit:
                parts.append("lacks unusual values")
            if not marked[place]:
                parts = []
            texts.append("; ".join(parts))
        return texts


def _column_names(marks: Booleans, features: Sequence[str]) -> list[tuple[str, ...]]:
    """List for each row of ``marks`` (k, f) the columns of the features that are True.

    A categorical column has several features ``column=level``, but is listed only once.
    """
    names = [name.partition("=")[0] for name in features]
    # A column of levels has several features, but is named once
    return [tuple(dict.fromkeys(compress(names, row))) for row in marks]
