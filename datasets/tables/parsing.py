"""Parse a table's rows into features and classes by a schema; errors name line and column."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import Marks, normalise_name, same_text
from fedsilo.core.one_line import one_line
from fedsilo.core.tasks import TASKS
from fedsilo.datasets.silo.measures import LeftOutRows
from fedsilo.datasets.tables.columns import Column
from fedsilo.datasets.tables.row_counts import RowCounts
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import NAMES_LINE, OPEN_FORMULA, Lines
from fedsilo.models.tasks.task import task_class

BOOLEANS = {"true": "1", "false": "0"}  # pandas writes booleans so
_LARGEST = float(np.finfo(np.float32).max)  # the largest value of a feature


@dataclass(frozen=True)
class ParsedTable:
    """A hospital's rows as features and classes.

    Errors about rows name line and column but never a value, because errors travel to the server.

    Attributes:
        rows: features (n, features) float32, NaN where a value is missing.
        labels: the label of each row: class indices, (n,) int64; the numbers of a regression, (n,)
            float32; or times and events, (n, 2) float32.
        left_out: the number of rows of the table that were left out.
        contents: number of each row's content, (n,) int64. Rows that are equal in all columns,
            including ignored columns, have the same number.
        notes: sentences for the site's own log.
    """

    rows: npt.NDArray[np.float32]
    labels: npt.NDArray[Any]
    left_out: LeftOutRows
    contents: npt.NDArray[np.int64]
    notes: tuple[str, ...] = ()


def parse_table(lines: Lines, schema: TableSchema, where: str) -> ParsedTable:
    """Parse the lines of a site's table into features and labels.

    A row is left out in these cases:

    - Its label is missing. For survival, the label is the time and the event.
    - A value of a feature's column is missing, and the schema's 'policy' is 'drop'.
    - A value is out of range, and the schema's 'out-of-range' is 'drop'.

    If 'policy' is 'impute', a missing value becomes NaN. If 'out-of-range' is 'keep', a value out
    of range stays as it is. An invalid cell is an error in any row with a label, even if the row is
    left out.

    Args:
        lines: the table's lines.
        schema: the table's schema.
        where: the table's name for errors.

    Raises:
        DataError: the columns differ from the schema's, a numeric cell is not a number, or a cell
            has a level or label that the schema does not declare. The error names line and column.
    """
    names, rows = _split_header(lines, schema, where)
    reader = RowReader(schema, names, where)
    counts = RowCounts(schema)
    labelled = schema.label.columns()
    # Columns that no feature is made of still distinguish a row from its copies
    unused = [name for name in names if name not in counts.missing]
    features: list[list[float]] = []
    labels: list[float | tuple[float, float]] = []
    ignored: list[tuple[str, ...]] = []
    for number, line in rows:
        tokens = reader.tokens(number, line)
        # The label counts too, because a row without a label is useless under any policy
        lacking = reader.lacking(tokens, counts.missing)
        if any(name in lacking for name in labelled):
            counts.leave_out(lacking)
            continue
        # A row that is left out is read too, so that its errors are not hidden
        values = reader.features(number, tokens, lacking)
        truth = reader.label(number, tokens)
        outside = [column.name for column in reader.out_of_range(values)]
        if counts.is_kept(lacking, outside):
            features.append(values)
            labels.append(truth)
            ignored.append(tuple(tokens[name] for name in unused))
    matrix = as_matrix(features, schema)
    counts.add_imputed(matrix)
    truths = _as_labels(labels, schema)
    contents = _number_contents(matrix, truths, ignored)
    return ParsedTable(matrix, truths, counts.left_out(), contents, counts.notes())


def _as_labels(labels: Sequence[float | tuple[float, float]], schema: TableSchema) -> Any:
    """Convert the rows' labels to an array in the form of the schema's task, (n,) or (n, 2)."""
    truths = np.array(labels, dtype=task_class(schema.label.task).label_type)
    if schema.label.time:
        truths = truths.reshape(len(labels), 2)
    return truths


def _split_header(
    lines: Lines, schema: TableSchema, where: str
) -> tuple[list[str], Sequence[tuple[int, list[str]]]]:
    """Separate the header of a table from its rows, and return the columns' names and the rows.

    A Parquet file always has a header. For other files the schema declares whether the first line
    is a header. Without a header, the names are the schema's. ``where`` is the table's name, for
    errors.

    Raises:
        DataError: the names in the header are not those of the schema. Their order may differ.
    """
    names = schema.column_names()
    # A Parquet file has column names even if the schema declares no header
    if not schema.header and not (lines and lines[0][0] == NAMES_LINE):
        return names, lines
    header = lines[0][1] if lines else []
    first = list(map(normalise_name, header))
    _check_header(first, names, where)
    return first, lines[1:]


def _number_contents(
    rows: npt.NDArray[np.float32], labels: npt.NDArray[Any], ignored: list[tuple[str, ...]]
) -> npt.NDArray[np.int64]:
    """Number the distinct rows of a table from 0, so that copies of a row get equal numbers.

    Rows are equal if their features, labels and ignored cells are all equal. Missing values equal
    each other. The numbers follow the order of first appearance.

    Args:
        rows: features, (n, features).
        labels: labels, (n, ...).
        ignored: the cells in columns without features, as strings, row by row.

    Returns:
        (n,) int64.
    """
    numbers: dict[tuple[bytes, bytes, tuple[str, ...]], int] = {}
    contents = np.empty(len(rows), dtype=np.int64)
    for place, texts in enumerate(ignored):
        content = (rows[place].tobytes(), labels[place].tobytes(), texts)
        contents[place] = numbers.setdefault(content, len(numbers))
    return contents


def as_matrix(rows: list[list[float]], schema: TableSchema) -> npt.NDArray[np.float32]:
    """Convert rows to float32 (n, features), where n may be 0."""
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(schema.features()))


def _check_header(names: list[str], wanted: list[str], where: str) -> None:
    """Check that a header has exactly the ``wanted`` names, in any order.

    Raises:
        DataError: a name is missing, unknown or repeated. The error lists missing names and counts
            unknown ones, which could be a patient's values.
    """
    if sorted(names) == sorted(wanted):
        return
    missing = sorted(set(wanted).difference(names))
    # Surplus names are only counted: without a header they would be a patient's values
    surplus = len(set(names).difference(wanted))
    twice = ""
    if len(set(names)) < len(names):
        twice = ", a name appears twice"
    raise DataError(
        f"{where}: the first line does not name the schema's columns: missing {missing}, {surplus} "
        f"that the schema does not know{twice}: correct the file, declare surplus columns as "
        "'ignored', correct the schema's 'delimiter', or set the schema's 'header' to false"
    )


@dataclass(frozen=True)
class RowReader:
    """Parses lines whose columns are ``names``; its errors name line and column, but no value.

    Attributes:
        schema: the table's schema.
        names: the columns' names, in the lines' order.
        where: the table's name for errors.
        missing: marks of a missing value.
        unmeasured: column -> marks of a value that was not measured.
        ranged: index among the features -> its column, if it has a range.
    """

    schema: TableSchema
    names: list[str]
    where: str
    missing: Marks = field(init=False)
    unmeasured: Mapping[str, Marks] = field(init=False)  # column -> its marks
    ranged: Mapping[int, Column] = field(init=False)  # place among the features -> its column

    def __post_init__(self) -> None:
        # All of this is the same for each of a million cells
        ranged = {}
        for place, column in enumerate(self.schema.numeric_columns()):
            if column.range:
                ranged[place] = column
        object.__setattr__(self, "ranged", ranged)
        marks = {column.name: column.unmeasured_marks() for column in self.schema.columns}
        object.__setattr__(self, "missing", self.schema.missing_marks())
        object.__setattr__(self, "unmeasured", marks)

    def tokens(self, number: int, line: list[str]) -> dict[str, str]:
        """Return a line's cells by column, without spaces at both ends of a cell.

        Raises:
            DataError: line ``number`` has more or fewer cells than there are columns.
        """
        if len(line) != len(self.names):
            raise DataError(
                f"{self.where}, line {number}: the line has {len(line)} values, but the schema has "
                f"{len(self.names)} columns ({', '.join(self.names)}): correct the line, or the "
                "schema's 'delimiter'"
            )
        return {name: token.strip() for name, token in zip(self.names, line, strict=True)}

    def lacking(self, tokens: Mapping[str, str], columns: Iterable[str]) -> list[str]:
        """Return the ``columns`` whose cell in this line marks a missing value."""
        return [name for name in columns if tokens[name] in self.missing]

    def out_of_range(self, features: Sequence[float]) -> list[Column]:
        """Return the columns whose value in a row is outside the column's declared range.

        ``features`` are all features of the row. A value at an end of the range is in range, and
        NaN always is. Columns without a range are skipped.
        """
        outside = []
        for place, column in self.ranged.items():
            low, high = column.range
            if features[place] < low or features[place] > high:
                outside.append(column)
        return outside

    def features(
        self, number: int, tokens: Mapping[str, str], lacking: Collection[str]
    ) -> list[float]:
        """Parse a line to its features: first numbers, then one-hot levels, then indicators.

        Each of these groups is in the schema's order:

        - A numeric column has one number, or NaN if the value is missing or marked as unmeasured.
        - A categorical column has 0 or 1 for each level except the first. All are NaN for a missing
          value.
        - An indicator is 1 if its column's value is missing or unmeasured, and otherwise 0.

        Args:
            number: the line's number, for errors.
            tokens: the line's cells by column.
            lacking: the names of the columns whose value is missing in this line.

        Raises:
            DataError: a cell is not a number, or a level is not declared.
        """
        numbers: list[float] = []
        levels: list[float] = []
        for column in self.schema.columns:
            if column.kind == "ignored":
                continue
            token = tokens[column.name]
            is_missing = column.name in lacking
            if column.kind == "categorical":
                levels += self._one_hot(number, token, column, is_missing)
            elif is_missing or token in self.unmeasured[column.name]:
                numbers.append(math.nan)
            else:
                value = _as_number(token)
                if value is None:
                    raise self._error(
                        number,
                        column.name,
                        token,
                        "this is not a number: correct it, or use a mark of a missing value "
                        f"({quote_texts(self.schema.missing)})",
                    )
                numbers.append(value)
        # The indicators follow all other features, in the order of the schema
        for column in self.schema.indicator_columns():
            is_unmeasured = tokens[column.name] in self.unmeasured[column.name]
            levels.append(float(column.name in lacking or is_unmeasured))
        return numbers + levels

    def _error(self, number: int, column: str, token: str, fault: str) -> DataError:
        """Build the error about a cell without quoting it, because it is a patient's value."""
        if token.startswith(OPEN_FORMULA):
            fault = "this is a formula without a value: open the table in Excel and save it"
        return DataError(f"{self.where}, line {number}, column '{column}': {fault}")

    def _one_hot(self, number: int, token: str, column: Column, is_missing: bool) -> list[float]:
        """Convert a categorical cell to features, 0 or 1 for each level except the column's first.

        The features of the first level are all 0. Those of a missing value (``is_missing``) are all
        NaN. ``token`` is the cell's text and ``number`` the line, for the error.

        Raises:
            DataError: the level is not declared.
        """
        if is_missing:
            return [math.nan] * (len(column.levels) - 1)
        level = same_text(token)
        if level not in column.levels:
            raise self._error(
                number,
                column.name,
                token,
                f"this is not one of the declared levels {quote_texts(column.levels)}: correct it, "
                "or declare the level in the schema of all sites",
            )
        return [float(level == other) for other in column.levels[1:]]

    def label(self, number: int, tokens: Mapping[str, str]) -> float | tuple[float, float]:
        """Return the label of a line in the form of the schema's task.

        - The label of a classification is the index of the class in the schema. Texts are
          normalised first, so '1.0' equals '1'.
        - The label of a regression is a number.
        - The label of survival is a pair: the time, and 1 for an event or 0 for a censored patient.

        Args:
            number: the line's number, for errors.
            tokens: the line's cells, by column.

        Raises:
            DataError: the class is not declared, the outcome is not a finite number, or the time is
                not a finite number of at least 0.
        """
        if TASKS[self.schema.label.task].numeric:
            return self._outcome(number, tokens[self.schema.label.column])
        if self.schema.label.time:
            return self._time(number, tokens), float(self._class_number(number, tokens))
        return self._class_number(number, tokens)

    def _time(self, number: int, tokens: Mapping[str, str]) -> float:
        """Parse the time to the event in one line of the table, as a finite number of at least 0.

        Args:
            number: the line's number, for the error.
            tokens: the line's cells, by column.

        Raises:
            DataError: the time is negative, or is not a finite number.
        """
        column = self.schema.label.time
        value = _as_number(tokens[column])
        if value is None or value < 0:
            raise self._error(
                number,
                column,
                tokens[column],
                "the time to an event must be a number of at least 0: correct it, or use a mark of "
                f"a missing value ({quote_texts(self.schema.missing)}), which leaves the row out",
            )
        return value

    def _class_number(self, number: int, tokens: Mapping[str, str]) -> int:
        """Return the index of a line's label among the schema's classes.

        ``same_text`` normalises the label before the comparison.

        Raises:
            DataError: the label is not declared. The error names the line and the column.
        """
        classes = list(self.schema.classes.values())
        column = self.schema.label.column
        text = same_text(tokens[column])
        for index, values in enumerate(classes):
            if text in values:
                return index
        raise self._error(
            number,
            column,
            tokens[column],
            f"this label is not one of {quote_texts(chain(*classes))}: correct it, or declare it "
            "under 'classes'",
        )

    def _outcome(self, number: int, token: str) -> float:
        """Parse the numeric outcome in line ``number``, whose cell has the text ``token``.

        'true' counts as 1 and 'false' as 0, in upper or lower case.

        Raises:
            DataError: the text is not a finite number in the range of float32.
        """
        value = _as_number(token)
        if value is None:
            raise self._error(
                number,
                self.schema.label.column,
                token,
                "the outcome of task 'regression' must be a finite number: correct it, or use a "
                f"mark of a missing value ({quote_texts(self.schema.missing)})",
            )
        return value


def _as_number(token: str) -> float | None:
    """Parse a cell's text as a finite number in the range of float32, or return None.

    'true' and 'false' count as 1 and 0, in upper or lower case. A text with '_' between digits is
    not a number.
    """
    try:
        value = float(token)
    except ValueError:
        if token.lower() not in BOOLEANS:
            return None
        value = float(BOOLEANS[token.lower()])
    # Python takes '_' for a separator of digits; the comparison is also false for NaN
    if "_" in token or not abs(value) < _LARGEST:
        return None
    return value


def quote_texts(texts: Iterable[str]) -> str:
    """Quote strings and join them with commas, cut to 300 characters, for errors."""
    return one_line(", ".join(f"'{text}'" for text in texts), 300)
