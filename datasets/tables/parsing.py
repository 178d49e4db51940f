"""Tables with a small schema: typed columns, a label column, marks of missing values.

A categorical column becomes one feature per level but the first (one-hot, first level dropped);
levels are declared, not found, so that all hospitals have the same features without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.datasets.io.text_files import csv_lines, same_text
from fedsilo.datasets.silo.measures import LeftOutRows
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.feature_statistics import FeatureStatistics
from fedsilo.models.contract.one_line import one_line

_LARGEST = float(np.finfo(np.float32).max)  # what a feature can hold


@dataclass(frozen=True)
class Column:
    """A column: ``kind`` numeric, categorical or ignored; ``levels`` of a categorical one.

    ``mean`` and ``std`` standardise a numeric column, if they are declared. ``edges`` are those of
    its histogram in a survey; without them they follow from mean and standard deviation.
    """

    name: str
    kind: str = "numeric"
    levels: Sequence[str] = ()
    mean: float | None = None
    std: float | None = None
    edges: Sequence[float] = ()

    def survey_edges(self) -> tuple[float, ...]:
        """Return the edges of its histogram, or none if nothing declares them."""
        if self.edges or self.mean is None or self.std is None:
            return tuple(self.edges)
        return tuple(self.mean + step * self.std for step in range(-3, 4))


@dataclass(frozen=True)
class TableSchema:
    """What every hospital's table looks like.

    Attributes:
        columns: in file order where there is no header; without the label.
        label: name of the label column; without a header it is the last.
        classes: class name -> the label's values that mean it, in class order.
        missing: texts that mark a missing value.
        policy: ``drop`` rows with a missing value, or ``impute`` it by the pooled mean.
        header: whether the first line names the columns.
        delimiter: separates values.
    """

    columns: tuple[Column, ...]
    label: str
    classes: Mapping[str, Sequence[str]]
    missing: tuple[str, ...] = ("", "?")
    policy: str = "drop"
    header: bool = True
    delimiter: str = ","
    sites: Mapping[str, str] = field(default_factory=dict)
    test_share: float = 0.34
    split_seed: int = 43

    def features(self) -> tuple[str, ...]:
        """Return the features' names: numeric columns, then ``column=level`` of the others."""
        numbers = [column.name for column in self.columns if column.kind == "numeric"]
        levels = [f"{one.name}={level}" for one in self.columns for level in one.levels[1:]]
        return (*numbers, *levels)

    def used(self) -> list[str]:
        """Return the columns that features are made of."""
        return [column.name for column in self.columns if column.kind != "ignored"]

    def digest(self) -> str:
        """Return a SHA-256 of all that must be the same at every site for one model to fit all."""
        facts = [
            [[c.name, c.kind, c.levels, c.mean, c.std] for c in self.columns],
            [self.label, [[name, sorted(values)] for name, values in self.classes.items()]],
            [sorted(same_text(mark) for mark in self.missing), self.policy],
        ]
        return json_digest(facts)

    def lacks(self, token: str) -> bool:
        """Return whether ``token`` marks a missing value; '-9.0' is the mark '-9'."""
        return same_text(token) in {same_text(mark) for mark in self.missing}

    def declared(self) -> FeatureStatistics | None:
        """Return declared mean and standard deviation, or None if a numeric column has none.

        One-hot features are shifted by an equal share of each level, which a missing one gets.
        """
        numeric = [column for column in self.columns if column.kind == "numeric"]
        pairs = [(c.mean, c.std) for c in numeric if c.mean is not None and c.std is not None]
        if len(pairs) < len(numeric):
            return None
        for column in self.columns:  # a first level has no feature: all of the others are 0 there
            pairs += [(1 / len(column.levels), 1.0) for _ in column.levels[1:]]
        return FeatureStatistics(
            np.array([mean for mean, _ in pairs]), np.array([std for _, std in pairs])
        )


@dataclass(frozen=True)
class Table:
    """A hospital's rows: ``rows`` (n, features) float32 with NaN, ``labels`` (n,) int64.

    ``left_out`` counts the rows that are not among them. Errors about rows name line and column and
    never a value, since errors travel to the server.
    """

    rows: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    left_out: LeftOutRows


def parse_table(text: str, schema: TableSchema, where: str) -> Table:
    """Return the rows of a CSV text.

    Args:
        text: the file's content.
        schema: the expected columns.
        where: names the file in errors.

    Raises:
        DataError: a column too few or too many, a text in a numeric column, a level or label that
            the schema does not know; with line and column.
    """
    reader, lines = _opened(text, schema, where)
    used = [name for name in reader.names if name in {*schema.used(), schema.label}]
    missing = dict.fromkeys(used, 0)
    rows: list[list[float]] = []
    labels: list[int] = []
    for number, line in lines:
        tokens = reader.tokens(number, line)
        lacking = [name for name in missing if schema.lacks(tokens[name])]
        if schema.label not in lacking:
            features, label = reader.features(number, tokens), reader.label(number, tokens)
            if schema.policy == "impute" or not lacking:
                rows.append(features)
                labels.append(label)
                continue
        missing |= {name: missing[name] + 1 for name in lacking}
    left_out = LeftOutRows(len(lines) - len(rows), missing)
    return Table(_matrix(rows, schema), np.array(labels, dtype=np.int64), left_out)


@dataclass(frozen=True)
class NewRows:
    """Rows of new patients, whose labels nobody knows.

    Attributes:
        lines: (n,) each row's line in the file.
        rows: (n, features) float32, NaN where a value is missing.
        lacking: line -> the columns without a value, of rows that the schema's policy drops; they
            are not among ``rows``.
    """

    lines: tuple[int, ...]
    rows: npt.NDArray[np.float32]
    lacking: Mapping[int, tuple[str, ...]]


def parse_new_rows(text: str, schema: TableSchema, where: str) -> NewRows:
    """Return the rows of a CSV text with or without the label's column, which is not read.

    Args:
        text: the file's content.
        schema: the expected columns, of which the label may be absent.
        where: names the file in errors.

    Raises:
        DataError: as ``parse_table``'s, or there is no row.
    """
    reader, lines = _opened(text, schema, where, label_needed=False)
    if not lines:
        raise DataError(f"{where} has no rows: give at least one")
    kept: dict[int, list[float]] = {}
    lacking: dict[int, tuple[str, ...]] = {}
    for number, line in lines:
        tokens = reader.tokens(number, line)
        features = reader.features(number, tokens)
        missing = tuple(name for name in schema.used() if schema.lacks(tokens[name]))
        if missing and schema.policy == "drop":
            lacking[number] = missing
        else:
            kept[number] = features
    return NewRows(tuple(kept), _matrix(list(kept.values()), schema), lacking)


def _matrix(rows: list[list[float]], schema: TableSchema) -> npt.NDArray[np.float32]:
    """Return (n, features), also of no rows."""
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(schema.features()))


def _opened(
    text: str, schema: TableSchema, where: str, label_needed: bool = True
) -> tuple[_RowReader, list[tuple[int, list[str]]]]:
    """Return a reader of the columns in the file's order, and the lines of rows."""
    lines = csv_lines(text, where, schema.delimiter)
    names = [column.name for column in schema.columns]
    first = [name.strip() for name in lines[0][1]] if lines else []
    labelled = schema.label in first if schema.header else len(first) == len(names) + 1
    if label_needed or labelled:
        names.append(schema.label)
    if schema.header:
        _check_header(first, names, where)
        names, lines = first, lines[1:]
    return _RowReader(schema, names, where), lines


def _check_header(names: list[str], wanted: list[str], where: str) -> None:
    # Surplus names are only counted: without a header they would be a patient's values
    missing, surplus = sorted(set(wanted) - set(names)), len(set(names) - set(wanted))
    if missing or surplus or len(names) != len(set(names)):
        raise DataError(
            f"{where}: the first line does not name the schema's columns: missing {missing}, "
            f"{surplus} that the schema does not know"
            f"{'' if len(names) == len(set(names)) else ', a name stands twice'}; correct the "
            "file, declare surplus columns as 'ignored', or set the schema's 'header' to false"
        )


@dataclass(frozen=True)
class _RowReader:
    """Reads lines whose columns are ``names``; its errors are of line and column."""

    schema: TableSchema
    names: list[str]
    where: str

    def tokens(self, number: int, line: list[str]) -> dict[str, str]:
        """Return the values of a line by column."""
        if len(line) != len(self.names):
            raise DataError(
                f"{self.where}, line {number}: {len(line)} values, and the schema has "
                f"{len(self.names)} columns ({', '.join(self.names)}); correct the line"
            )
        return {name: token.strip() for name, token in zip(self.names, line, strict=True)}

    def features(self, number: int, tokens: Mapping[str, str]) -> list[float]:
        """Return the features of a line's values, NaN where one is missing."""
        numbers: list[float] = []
        levels: list[float] = []
        for column in self.schema.columns:
            place = f"{self.where}, line {number}, column '{column.name}'"
            if column.kind == "numeric":
                numbers.append(self._number(tokens[column.name], place))
            elif column.kind == "categorical":
                levels += self._one_hot(tokens[column.name], column, place)
        return numbers + levels

    def _number(self, token: str, place: str) -> float:
        if self.schema.lacks(token):
            return math.nan
        try:
            value = math.nan if "_" in token else float(token)
        except ValueError:
            value = math.nan
        if not abs(value) < _LARGEST:  # also not a number
            raise DataError(
                f"{place}: this is no number; correct it or use a mark of a missing value "
                f"({_listed(self.schema.missing)})"
            )
        return value

    def _one_hot(self, token: str, column: Column, place: str) -> list[float]:
        if self.schema.lacks(token):
            return [math.nan] * (len(column.levels) - 1)
        level = same_text(token)
        if level not in column.levels:
            raise DataError(
                f"{place}: this is none of the declared levels {_listed(column.levels)}; "
                "correct it, or declare the level in the schema of all sites"
            )
        return [float(level == other) for other in column.levels[1:]]

    def label(self, number: int, tokens: Mapping[str, str]) -> int:
        """Return the class of a line."""
        classes = list(self.schema.classes.values())
        text = same_text(tokens[self.schema.label])
        for index, values in enumerate(classes):
            if text in values:
                return index
        raise DataError(
            f"{self.where}, line {number}, column '{self.schema.label}': this label is none "
            f"of {_listed(chain(*classes))}; correct it, or declare it under 'classes'"
        )


def _listed(texts: Iterable[Any]) -> str:
    return one_line(", ".join(f"'{text}'" for text in texts), 300)
