"""Count the rows of a table that are left out, and its values that will be imputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedsilo.core.one_line import one_line
from fedsilo.datasets.silo.measures import LeftOutRows
from fedsilo.datasets.tables.schema import TableSchema


class RowCounts:
    """Counters for the rows of a table that are left out and the values that will be imputed."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self.rows_left_out = 0
        self.missing = dict.fromkeys([*schema.used_columns(), *schema.label.columns()], 0)
        self.outside: Counter[str] = Counter()
        self.imputed: Counter[str] = Counter()

    def is_kept(self, lacking: Sequence[str], outside: Sequence[str]) -> bool:
        """Decide by the schema whether a row of the table is kept, and update the counters.

        A row that lacks a value is left out if the schema's 'policy' is 'drop'. Any other row with
        a value out of range is left out if 'out-of-range' is 'drop'.

        Rows that are left out are counted. If the policy is 'drop', missing values are counted by
        column. Values out of range are always counted by column.

        Args:
            lacking: the row's columns without a value.
            outside: the row's columns with a value out of range.

        Returns:
            True if the row is kept.
        """
        self.outside.update(outside)
        if lacking and self._schema.policy == "drop":
            self.leave_out(lacking)
            return False
        if outside and self._schema.out_of_range == "drop":
            self.leave_out([])
            return False
        return True

    def leave_out(self, lacking: Sequence[str]) -> None:
        """Count a row that is left out, and each of its columns without a value."""
        self.rows_left_out += 1
        for name in lacking:
            self.missing[name] += 1

    def add_imputed(self, rows: npt.NDArray[np.float32]) -> None:
        """Count the missing values (NaN) in rows (n, features), which will be imputed."""
        self.imputed.update(self._schema.count_missing(rows))

    def left_out(self) -> LeftOutRows:
        """Return the number of rows that were left out, in total and by column.

        A row left out for missing values counts in each column where it lacks a value. If
        'out-of-range' is 'drop', a row also counts in each column where its value is out of range.
        A row may count in several columns, so their sum may exceed the total.
        """
        without = Counter(self.missing)
        if self._schema.out_of_range == "drop":
            without.update(self.outside)
        return LeftOutRows(self.rows_left_out, dict(without))

    def notes(self) -> tuple[str, ...]:
        """Describe the values that are out of range or will be imputed, for the site's own log.

        Returns:
            One sentence on values out of range, if there are any, and then one on missing values in
            the kept rows, if there are any.
        """
        notes = []
        if self.outside:
            fate = {"drop": "left out", "keep": "kept"}[self._schema.out_of_range]
            notes.append(
                f"rows with a value outside the schema's range are {fate}: "
                f"{_describe_counts(self.outside)}"
            )
        if self.imputed:
            notes.append(
                f"values are missing and will be imputed: {_describe_counts(self.imputed)}"
            )
        return tuple(notes)


def _describe_counts(counts: Mapping[str, int]) -> str:
    """Describe counts by column, such as '3 of age, 1 of pulse', leaving out columns with 0."""
    parts = [f"{count} of {name}" for name, count in counts.items() if count]
    return one_line(", ".join(parts), 300)
