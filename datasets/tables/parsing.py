"""The rows of a CSV text as features and classes, by a schema; errors name line and column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import Marks, csv_lines, normalise_name, same_text
from fedsilo.core.one_line import one_line
from fedsilo.datasets.silo.measures import LeftOutRows
from fedsilo.datasets.tables.schema import Column, TableSchema

_LARGEST = float(np.finfo(np.float32).max)  # the largest value of a feature


@dataclass(frozen=True)
class ParsedTable:
    """A hospital's rows: ``rows`` (n, features) float32 with NaN, ``labels`` (n,) int64.

    ``left_out`` counts the rows that are not among them. Rows of equal content, in ignored columns
    too, have the same number in ``contents`` (n,) int64. Errors about rows name line and column and
    never a value, since errors travel to the server.
    """

    rows: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    left_out: LeftOutRows
    contents: npt.NDArray[np.int64]


def parse_table(text: str, schema: TableSchema, where: str) -> ParsedTable:
    """Return the rows of a CSV text, whose file errors call ``where``.

    Raises:
        DataError: a column too few or too many, a text in a numeric column, a level or label that
            the schema does not know; with line and column.
    """
    lines = csv_lines(text, where, schema.delimiter)
    label = schema.label.column
    names = [column.name for column in schema.columns]
    names.append(label)
    if schema.header:
        header = lines[0][1] if lines else []
        first = [normalise_name(name) for name in header]
        _check_header(first, names, where)
        names, lines = first, lines[1:]
    reader = RowReader(schema, names, where)
    used = [name for name in names if name == label or name in schema.used_columns()]
    unused = [name for name in names if name not in used]
    missing = dict.fromkeys(used, 0)
    rows: list[list[float]] = []
    labels: list[int] = []
    ignored: list[tuple[str, ...]] = []
    for number, line in lines:
        tokens = reader.tokens(number, line)
        lacking = [name for name in used if tokens[name] in reader.missing]
        is_kept = label not in lacking
        if is_kept:
            # A row that is dropped is read too, so that its errors are not hidden
            features = reader.features(number, tokens)
            truth = reader.label(number, tokens)
            is_kept = schema.policy == "impute" or not lacking
        if is_kept:
            rows.append(features)
            labels.append(truth)
            ignored.append(tuple(tokens[name] for name in unused))
        else:
            for name in lacking:
                missing[name] += 1
    left_out = LeftOutRows(len(lines) - len(rows), missing)
    matrix = as_matrix(rows, schema)
    classes = np.array(labels, dtype=np.int64)
    return ParsedTable(matrix, classes, left_out, _number_contents(matrix, classes, ignored))


def _number_contents(
    rows: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], ignored: list[tuple[str, ...]]
) -> npt.NDArray[np.int64]:
    """Number the contents of rows, (n,) from 0; equal rows have one number.

    ``ignored`` has the texts of the columns that no feature is made of, row by row.
    """
    numbers: dict[tuple[bytes, int, tuple[str, ...]], int] = {}
    contents = np.empty(len(rows), dtype=np.int64)
    for place, texts in enumerate(ignored):
        content = (rows[place].tobytes(), int(labels[place]), texts)
        contents[place] = numbers.setdefault(content, len(numbers))
    return contents


def as_matrix(rows: list[list[float]], schema: TableSchema) -> npt.NDArray[np.float32]:
    """Return (n, features), also of no rows."""
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(schema.features()))


def _check_header(names: list[str], wanted: list[str], where: str) -> None:
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
    """Reads lines whose columns are ``names``; its errors are of line and column."""

    schema: TableSchema
    names: list[str]
    where: str
    missing: Marks = field(init=False)
    unmeasured: Mapping[str, Marks] = field(init=False)  # column -> its marks

    def __post_init__(self) -> None:
        marks = {column.name: column.unmeasured_marks() for column in self.schema.columns}
        object.__setattr__(self, "missing", self.schema.missing_marks())
        object.__setattr__(self, "unmeasured", marks)

    def tokens(self, number: int, line: list[str]) -> dict[str, str]:
        """Return the values of a line by column."""
        if len(line) != len(self.names):
            raise DataError(
                f"{self.where}, line {number}: the line has {len(line)} values, but the schema has "
                f"{len(self.names)} columns ({', '.join(self.names)}): correct the line, or the "
                "schema's 'delimiter'"
            )
        return {name: token.strip() for name, token in zip(self.names, line, strict=True)}

    def features(self, number: int, tokens: Mapping[str, str]) -> list[float]:
        """Read the features of a line: numbers, levels, indicators; NaN where one is missing."""
        numbers: list[float] = []
        levels: list[float] = []
        for column in self.schema.columns:
            token = tokens.get(column.name, "")
            if column.kind == "numeric":
                value = self._number(token, column)
                if value is None:
                    raise DataError(
                        f"{self._place(number, column)}: this is not a number: correct it, or use "
                        f"a mark of a missing value ({quote_texts(self.schema.missing)})"
                    )
                numbers.append(value)
            elif column.kind == "categorical":
                levels += self._one_hot(number, token, column)
        for column in self.schema.indicator_columns():
            levels.append(float(self._imputes(tokens[column.name], column)))
        return numbers + levels

    def _place(self, number: int, column: Column) -> str:
        return f"{self.where}, line {number}, column '{column.name}'"

    def _imputes(self, token: str, column: Column) -> bool:
        return token in self.missing or token in self.unmeasured[column.name]

    def _number(self, token: str, column: Column) -> float | None:
        """Read a number: NaN where it is imputed, None where the text is not a number."""
        if self._imputes(token, column):
            return math.nan
        try:
            value = float(token)
        except ValueError:
            return None
        # Python takes '_' for a separator of digits; the comparison is also false for NaN
        if "_" in token or not abs(value) < _LARGEST:
            return None
        return value

    def _one_hot(self, number: int, token: str, column: Column) -> list[float]:
        if token in self.missing:
            return [math.nan] * (len(column.levels) - 1)
        level = same_text(token)
        if level not in column.levels:
            raise DataError(
                f"{self._place(number, column)}: this is not one of the declared levels "
                f"{quote_texts(column.levels)}: correct it, or declare the level in the schema of "
                "all sites"
            )
        return [float(level == other) for other in column.levels[1:]]

    def label(self, number: int, tokens: Mapping[str, str]) -> int:
        """Return the class of a line."""
        classes = list(self.schema.classes.values())
        text = same_text(tokens[self.schema.label.column])
        for index, values in enumerate(classes):
            if text in values:
                return index
        raise DataError(
            f"{self.where}, line {number}, column '{self.schema.label.column}': this label is not "
            f"one of {quote_texts(chain(*classes))}: correct it, or declare it under 'classes'"
        )


def quote_texts(texts: Iterable[str]) -> str:
    """Quote texts and join them with commas on one line, for errors."""
    return one_line(", ".join(f"'{text}'" for text in texts), 300)
