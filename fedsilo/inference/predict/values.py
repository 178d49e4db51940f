"""Formats the values of a table's cases for people, with usual values in training and marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsilo.client_app.summary.suppression import secret_of, suppress
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.tables.schema import Column, TableSchema
from fedsilo.models.measures.novelty import Floats

_FEW = 5  # different values of a number that are listed as such


@dataclass(frozen=True)
class Value:
    """One input of one case."""

    name: str
    text: str
    usual: str  # usual range in training, if enough patients support it
    mark: str  # imputed, or beyond the training values
    adds: float  # contribution to the probability of the prediction; 0 without an explanation
    share: float  # contribution relative to the input that matters most, from -1 to 1


@dataclass(frozen=True)
class ValueTexts:
    """Makes the values of cases."""

    schema: TableSchema
    training: Floats  # (n, f) rows as they were read, NaN where a value is missing; n may be 0
    standardisation: FeatureStatistics  # its means replace missing values
    floor: int  # fewest patients that a statement about training rows rests on

    def of(self, row: Floats, unusual: Sequence[str], adds: Mapping[str, float]) -> Iterator[Value]:
        """Yield the values of a row (f,), the inputs that matter most to the answer first."""
        # Not 0, by which a row without explanations could not be divided
        most = max([*map(abs, adds.values()), 1e-9])
        values = []
        for column in self.schema.columns:
            if column.kind == "ignored":
                continue
            places = self._places(column)
            mark = ""
            if np.isnan(row[places]).any():
                mark = "imputed"
            elif column.name in unusual:
                mark = "unusual"
            text = self._text(column, row[places], float(self.standardisation.mean[places[0]]))
            usual = self._usual(column, self.training[:, places])
            own = adds.get(column.name, 0.0)
            values.append(Value(column.name, text, usual, mark, own, own / most))
        yield from sorted(values, key=lambda value: -abs(value.adds))

    def _places(self, column: Column) -> list[int]:
        """Return the places of a column's features: one, or one for each level but the first."""
        features = self.schema.features()
        places = []
        if column.name in features:
            places.append(features.index(column.name))
        for level in column.levels[1:]:
            if f"{column.name}={level}" in features:
                places.append(features.index(f"{column.name}={level}"))
        return places

    def _text(self, column: Column, values: Floats, mean: float) -> str:
        """Format the values (f,) of a column's features; ``mean`` replaces a missing number."""
        if np.isnan(values).any():
            used = f"{mean:.4g}, the mean,"
            if column.levels:
                used = "the mixture of all levels"
            return f"missing; {used} is used"
        if not column.levels:
            return f"{values[0]:.6g}"
        if not values.any():
            return column.levels[0]
        return column.levels[int(values.argmax()) + 1]

    def _usual(self, column: Column, rows: Floats) -> str:
        """Describe the usual training values; empty if too few patients support it.

        A number with more than five values has the range of 90 % of the patients, or of 50 % if
        fewer patients than the floor are beyond each end. Others have their common values.
        """
        known = rows[~np.isnan(rows).any(axis=1)]
        if column.levels:
            # The first level has no feature: its rows have 0 in all others
            first = 1 - known.sum(axis=1, keepdims=True)
            counts = np.hstack([first, known]).sum(axis=0)
            return self._common(column.name, column.levels, counts.astype(int).tolist())
        found, counts = np.unique(known[:, 0], return_counts=True)
        if len(found) <= _FEW:
            return self._common(column.name, [f"{one:.4g}" for one in found], counts.tolist())
        for share in (0.05, 0.25):
            # At least ``floor`` patients are beyond each end, so no end is a single patient's value
            if len(known) * share >= self.floor:
                low, high = np.quantile(known[:, 0], (share, 1 - share))
                return f"{low:.4g} to {high:.4g} ({1 - 2 * share:.0%} of patients)"
        return ""

    @cached_property
    def _secret(self) -> int:
        """The key that chooses a further count to hide; equal training rows have an equal key."""
        return secret_of(self.training.tobytes())

    def _common(self, column: str, names: Sequence[str], counts: Sequence[int]) -> str:
        """List the values that ``floor`` patients or more have, and their shares.

        One more value is hidden if the total would otherwise reveal the count of a hidden value.
        """
        shown = suppress(counts, self.floor, self._secret, column)
        texts = []
        for name, count in zip(names, shown, strict=True):
            if count is not None:
                texts.append(f"{name} ({count / sum(counts):.0%})")
        return ", ".join(texts)
