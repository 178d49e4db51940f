"""Read rows of new patients for prediction: CSV, Excel or Parquet, columns by name in any order.

A fault in one row is recorded for that row, and all other rows are still predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import normalise_name
from fedsilo.core.one_line import one_line
from fedsilo.datasets.tables.columns import Column
from fedsilo.datasets.tables.parsing import RowReader, as_matrix, quote_texts
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import Lines

_LONGEST_ID = 60


@dataclass(frozen=True)
class NewRows:
    """Rows of new patients, whose labels are unknown.

    Attributes:
        lines: line in the file of each usable row, (n,).
        rows: features (n, features) float32, NaN where a value is missing.
        faults: line -> why the row is not in ``rows``.
        ids: line -> the patient's id, for usable and faulty rows; empty without a column of ids.
        unread: number of columns that the schema does not know.
        imputed: column -> number of ``rows`` without a value there, which will be imputed.
    """

    lines: tuple[int, ...]
    rows: npt.NDArray[np.float32]
    faults: Mapping[int, str]
    ids: Mapping[int, str]
    unread: int
    imputed: Mapping[str, int]


def parse_new_rows(
    lines: Lines, schema: TableSchema, where: str, id_column: str | None = None
) -> NewRows:
    """Read a table of new patients by the schema of the training data, for predictions.

    The label's column may be missing. An empty cell is always a missing value.

    The first line is a header if the schema has one, if ``id_column`` is given, or if a cell names
    a column of the features. With a header, columns may be in any order, and unknown ones are
    skipped. Without a header, columns must be in the schema's order.

    Args:
        lines: the table's lines.
        schema: the schema of the training data.
        where: the table's name for errors.
        id_column: the column of patients' ids, which needs a header. None for no ids.

    Returns:
        The readable rows, and in ``faults`` the reason for each row that cannot be read, by line
        number. ``unread`` is the number of unknown columns. ``imputed`` is the number of missing
        values in the readable rows, by column.

    Raises:
        DataError: a needed column is missing or named twice, or the table has no rows.
    """
    if "" not in schema.missing:
        schema = schema.model_copy(update={"missing": [*schema.missing, ""]})
    names, rows = _columns(lines, schema, where, id_column)
    if not rows:
        raise DataError(f"{where} has no rows: give at least one")
    reader = RowReader(schema, names, where)
    features: dict[int, list[float]] = {}
    faults: dict[int, str] = {}
    ids: dict[int, str] = {}
    for number, line in rows:
        if id_column is not None:
            ids[number] = _id(line, names.index(id_column))
        # A bad row is reported beside the others, whose predictions are still wanted
        try:
            features[number] = _read_row(schema, reader, number, line)
        except DataError as error:
            faults[number] = str(error).removeprefix(f"{where}, line {number}").lstrip(",: ")
    unread = set(names).difference(schema.column_names(), [id_column])
    matrix = as_matrix(list(features.values()), schema)
    imputed = schema.count_missing(matrix)
    return NewRows(tuple(features), matrix, faults, ids, len(unread), imputed)


def _read_row(schema: TableSchema, reader: RowReader, number: int, line: list[str]) -> list[float]:
    """Read a row's features, in the order of ``TableSchema.features``.

    Args:
        schema: the schema.
        reader: reads the columns of this table.
        number: the row's line, for errors.
        line: the row's cells.

    Raises:
        DataError: in one of these cases:

            - The row has more or fewer cells than the table has columns.
            - A value cannot be read, or is outside its column's range.
            - A value is missing, and the schema's policy is 'drop'.
    """
    tokens = reader.tokens(number, line)
    lacking = reader.lacking(tokens, schema.used_columns())
    features = reader.features(number, tokens, lacking)
    impossible = reader.out_of_range(features)
    if impossible:
        raise DataError("; ".join(_describe_impossible(column, tokens) for column in impossible))
    if lacking and schema.policy == "drop":
        raise DataError(f"has no value of {', '.join(lacking)}, but the schema drops such rows")
    return features


def _describe_impossible(column: Column, tokens: Mapping[str, str]) -> str:
    return (
        f"column '{column.name}': {one_line(tokens[column.name], 30)} is impossible, because the "
        f"schema's range is {column.range_text()}"
    )


def _columns(
    lines: Lines, schema: TableSchema, where: str, id_column: str | None
) -> tuple[list[str], Lines]:
    """Find the names of the columns in a table of new patients, and the lines of its rows.

    The first line is a header if the schema has one, if ``id_column`` is given, or if a cell names
    a column of the features. Case and extra spaces do not matter. Without a header the names are
    the schema's, in its order. If the first line is shorter than the schema by exactly the label's
    columns, these are left out.

    Args:
        lines: the table's lines, as (line number, cells).
        schema: the schema of the training data.
        where: the table's name, for errors.
        id_column: the column of patients' ids, which the header must name. None for no ids.

    Returns:
        The columns' names, in the schema's spelling if the schema knows them, and the lines of the
        rows.

    Raises:
        DataError: the header lacks or repeats the name of the id column or of a column of the
            features.
    """
    declared = schema.column_names()
    folded = {name.casefold(): name for name in declared}
    # Columns as people write them: any case, extra spaces
    named = []
    for cell in lines[0][1] if lines else []:
        name = normalise_name(cell)
        # Two columns may differ by case only, so an exact name goes first
        if name not in declared and name != id_column:
            name = folded.get(name.casefold(), name)
        named.append(name)
    used = schema.used_columns()
    if not schema.header and id_column is None and not set(used).intersection(named):
        without_label = len(declared) - len(schema.label.columns())
        if len(named) == without_label:
            return declared[:without_label], lines
        return declared, lines
    needed = list(used)
    if id_column is not None:
        needed.append(id_column)
    # Names of other columns are not quoted: without a header they would be a patient's values
    missing = [name for name in needed if name not in named]
    twice = [name for name in needed if named.count(name) > 1]
    if missing or twice:
        fault = f"has {quote_texts(twice)} twice"
        if missing:
            fault = f"lacks the columns {quote_texts(missing)}"
        raise DataError(
            f"{where}: the first line {fault}: name each once there, in any order "
            f"(the schema's are {quote_texts(used)})"
        )
    return named, lines[1:]


def _id(line: Sequence[str], place: int) -> str:
    """Return a patient's id as one printable line, cut to 60 characters.

    ``place`` is the index of the cell with the id. If the row is too short to have this cell, the
    id is ''.
    """
    if place >= len(line):
        return ""
    return one_line(line[place].strip(), _LONGEST_ID)
