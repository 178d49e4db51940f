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
        """Measure how far each value is from ``nearest``, the training value next to the code.

        Only values between the code and ``nearest`` count. Any other value has the distance 0.
        ``values`` (k,) are standardised.
        """
        low, high = sorted((self.value, self.nearest))
        between = (values > low) & (values < high) & ~self.equal(values)
        distances: Floats = np.where(between, np.abs(values - self.nearest), 0.0)
        return distances


def find_codes(values: Floats, missing: Booleans) -> dict[int, Code]:
    """Find codes in a table's training values: index of the feature -> its code.

    A code stands for something else, such as 0 for "not measured". It is the lowest or highest
    value of a feature, far from all others, and at least ten samples share it. ``values`` (n, f)
    are standardised. Values in ``missing`` are ignored.
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

        The limit is the score above which a case is unusual. It comes from held-out samples, and
        too few of them give no limit.
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

        The result has scores for each value and for the whole case. It also marks codes, such as 0
        for "not measured". ``inputs`` (k, f) are rows as the network gets them, or features of
        images. ``missing`` marks imputed values, and None means that none are.
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
        """Describe the training samples and the limit of novelty for the predictions' JSON file.

        The result has no value of a sample. A limit of None means that there is none. ``share
        beyond it`` is the share of held-out samples that may exceed the limit. ``not known``
        describes the sites whose data are unknown here.
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

        Without a limit of novelty, a case above 1 is only doubtful. A case gets more than 1 if a
        value lies between a code and the nearest training value, because its unit may be wrong.
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

        A column is listed if its value's score is above the limit of novelty, or above 1 without a
        limit. A value between a code, such as 0 for "not measured", and the nearest training value
        is listed too.
        """
        count = len(features)
        beyond = self.novelty.values[:, :count] > (self.reference.limit or 1.0)
        return _column_names(beyond | (self.gaps[:, :count] > 0), features)

    def reasons(self, features: Sequence[str]) -> list[str]:
        """Explain for each case why it is unusual; the string is empty if it is not."""
        return self._explain(self.unusual(), features)

    def doubts(self, features: Sequence[str]) -> list[str]:
        """Explain for each case why it is doubtful, with "" for a case that is not.

        A case that is not unusual is doubtful if one of its values is a code, such as 0 for "not
        measured". Without a limit of novelty, a score above 1 is doubtful too.
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

        Reasons are values unlike all training values, a case unlike any sample, and missing values
        that samples rarely lack. For a case that is not selected, the string is empty.
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
