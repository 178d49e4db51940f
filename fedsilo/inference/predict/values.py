"""The inputs of a table's cases as people read them: value, what is usual in training, marks."""

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
    standardisation: (
        FeatureStatistics  # means and deviations for standardising; means replace missing ones
    )
    floor: int  # fewest patients that a statement about training rows rests on

    def of(self, row: Floats, unusual: Sequence[str], adds: Mapping[str, float]) -> Iterator[Value]:
        """Yield the values of a row (f,), the inputs that matter most to the answer first."""
        names = self.schema.features()
        most = max([*map(abs, adds.values()), 1e-9])
        values = []
        for column in self.schema.columns:
            if column.kind == "ignored":
                continue
            places = [
                names.index(name)
                for name in (column.name, *(f"{column.name}={one}" for one in column.levels[1:]))
                if name in names
            ]
            missing = bool(np.isnan(row[places]).any())
            mark = "imputed" if missing else "unusual" if column.name in unusual else ""
            text = self._text(column, row[places], float(self.standardisation.mean[places[0]]))
            usual = self._usual(column, self.training[:, places])
            own = adds.get(column.name, 0.0)
            values.append(Value(column.name, text, usual, mark, own, own / most))
        yield from sorted(values, key=lambda value: -abs(value.adds))

    def _text(self, column: Column, values: Floats, mean: float) -> str:
        if np.isnan(values).any():
            used = "the mixture of all levels" if column.levels else f"{mean:.4g}, the mean,"
            return f"missing; {used} is used"
        if column.levels:
            return column.levels[int(values.argmax()) + 1 if values.any() else 0]
        return f"{values[0]:.6g}"

    def _usual(self, column: Column, rows: Floats) -> str:
        """Return the range of most training values, or common ones; empty where of too few."""
        known = rows[~np.isnan(rows).any(axis=1)]
        if column.levels:
            first = 1 - known.sum(axis=1, keepdims=True)
            counts = np.hstack([first, known]).sum(axis=0)
            return self._common(column.name, column.levels, counts.astype(int).tolist())
        found, counts = np.unique(known[:, 0], return_counts=True)
        if len(found) <= _FEW:
            return self._common(column.name, [f"{one:.4g}" for one in found], counts.tolist())
        for share in (0.05, 0.25):
            if len(known) * share >= self.floor:
                low, high = np.quantile(known[:, 0], (share, 1 - share))
                return f"{low:.4g} to {high:.4g} ({1 - 2 * share:.0%} of patients)"
        return ""

    @cached_property
    def _secret(self) -> int:
        """The key by which a further count is hidden: the same for the same training rows."""
        return secret_of(self.training.tobytes())

    def _common(self, column: str, names: Sequence[str], counts: Sequence[int]) -> str:
        """Return the values that ``floor`` patients or more have, and their shares.

        Others are hidden too where those of fewer patients would follow from the total.
        """
        shown = suppress(counts, self.floor, self._secret, column)
        return ", ".join(
            f"{name} ({count / sum(counts):.0%})"
            for name, count in zip(names, shown, strict=True)
            if count is not None
        )
