"""Rows of new patients as people have them: CSV, Excel or Parquet, columns by name in any order.

What is wrong with one row is its own fault and costs no other row its prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, FedsiloError, SettingError, missing_extra
from fedsilo.core.files.text_files import csv_lines, file_fault, normalise_name, read_text
from fedsilo.core.files.unpacked_size import check_unpacked, most_unpacked
from fedsilo.core.one_line import one_line
from fedsilo.datasets.tables.packed_tables import check_parquet, check_workbook
from fedsilo.datasets.tables.parsing import RowReader, as_matrix, quote_texts
from fedsilo.datasets.tables.schema import TableSchema

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_EXCEL, _PARQUET = (".xlsx", ".xlsm", ".xls"), (".parquet", ".pq")
_DELIMITERS = ",;\t"
_LONGEST_ID = 60
BOOLEANS = {"true": "1", "false": "0"}  # as numbers, which they are in frames

Lines = Sequence[tuple[int, list[str]]]  # each line's number in the file, and its cells


@dataclass(frozen=True)
class NewRows:
    """Rows of new patients, whose labels nobody knows.

    Attributes:
        lines: (n,) each usable row's line in the file.
        rows: (n, features) float32, NaN where a value is missing.
        faults: line -> why the row is not among ``rows``.
        ids: line -> the patient's id, of all rows; empty if no column of ids is named.
        unread: how many columns the schema does not know; they are not read.
    """

    lines: tuple[int, ...]
    rows: npt.NDArray[np.float32]
    faults: Mapping[int, str]
    ids: Mapping[int, str]
    unread: int


def read_table(path: Path, delimiter: str = ",") -> Lines:
    """Return the lines that are not empty of a file: CSV, ``.parquet`` or Excel's first sheet.

    A CSV text's separator may be another than ``delimiter`` if that gives more columns.

    Raises:
        DataError: it is missing or damaged.
        SettingError: the package that reads such files is not installed.
    """
    kind = path.suffix.lower()
    if kind not in (*_EXCEL, *_PARQUET):
        text = read_text(path)
        first = text.partition("\n")[0]
        most = max((delimiter, *_DELIMITERS), key=first.count)  # the first of equals
        return csv_lines(text, str(path), most)
    frame = _read_frame(path, kind)
    lines: list[tuple[int, list[str]]] = []
    if kind in _PARQUET:
        lines.append((0, list(map(str, frame.columns))))
    characters = 0
    most = most_unpacked(path)
    columns = [_objects(frame.iloc[:, number]) for number in range(frame.shape[1])]
    for number, row in enumerate(zip(*columns, strict=True), 1):
        line = list(map(_cell, row))
        characters += sum(map(len, line))
        if characters > most:  # one text of the file may be in each of its rows
            check_unpacked(path, characters)
        if any(line) or kind in _PARQUET:
            lines.append((number, line))
    return lines


def _read_frame(path: Path, kind: str) -> DataFrame:
    """Read a packed table once its own figures say that it takes no more than it may."""
    import pandas as pd

    if not path.is_file():
        raise DataError(f"{path} cannot be read: no such file; correct its name")
    fault = file_fault(path)
    if fault:
        raise DataError(f"{path} {fault}")
    if kind == ".xls":
        raise DataError(f"{path} is an Excel file from before 2007: save it as .xlsx or CSV")
    try:
        if kind in _PARQUET:
            # Texts stay what they are in the file, a number each, and are not written out per row
            frame = pd.read_parquet(path, read_dictionary=check_parquet(path))
            return _with_index_columns(frame)
        import_module("openpyxl")  # first of all: without it no file is looked at
        check_workbook(path)
        # pandas would read words such as None and NA as empty cells by default
        return pd.read_excel(
            path, header=None, dtype=object, engine="openpyxl", keep_default_na=False
        )
    except ImportError:
        raise SettingError(missing_extra(str(path), "tables", "save it as CSV")) from None
    except FedsiloError:
        raise
    except Exception as error:  # openpyxl and pyarrow raise nearly anything at a damaged file
        raise DataError(
            f"{path} is damaged or no {kind} file ({type(error).__name__}): save it again, or as "
            "CSV"
        ) from None


def _with_index_columns(frame: DataFrame) -> DataFrame:
    """Return the frame with a named index as columns, because pandas stored it as such."""
    names = [name for name in frame.index.names if name is not None]
    if not names:
        return frame
    return frame.reset_index(names)


def _objects(column: Series) -> npt.NDArray[Any]:
    """Return a column's values as objects; those of a category stay one object for all rows."""
    import pandas as pd

    if not isinstance(column.dtype, pd.CategoricalDtype):
        return column.to_numpy(dtype=object)
    # pandas itself would make a text for each row
    known = np.append(column.cat.categories.to_numpy(dtype=object), [None])
    # A missing value has the code -1, which is the place of the last
    values: npt.NDArray[Any] = known[column.cat.codes.to_numpy()]
    return values


def _cell(value: Any) -> str:
    """Return a cell as a CSV file would have it; pandas has many values for a missing one."""
    import pandas as pd

    if pd.api.types.is_scalar(value) and pd.isna(value):
        return ""
    return str(value).strip()


def parse_new_rows(
    lines: Lines, schema: TableSchema, where: str, id_column: str | None = None
) -> NewRows:
    """Return the rows of a table with or without the label's column, which is not read.

    A first line that names columns is a header, whatever the schema says; its columns may be in any
    order and case, and others are not read. An empty cell is a missing value. ``id_column`` names
    the column of the patients' ids, if there is one.

    Raises:
        DataError: a column is missing or named twice, or there is no row; it names ``where``.
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
        try:
            features[number] = _read_row(schema, reader, number, line)
        except DataError as error:
            faults[number] = str(error).removeprefix(f"{where}, line {number}").lstrip(",: ")
    unread = set(names).difference(_declared_names(schema), [id_column])
    matrix = as_matrix(list(features.values()), schema)
    return NewRows(tuple(features), matrix, faults, ids, len(unread))


def _declared_names(schema: TableSchema) -> list[str]:
    """Return the names of the schema's columns, the label's last."""
    names = [column.name for column in schema.columns]
    return [*names, schema.label.column]


def _read_row(schema: TableSchema, reader: RowReader, number: int, line: list[str]) -> list[float]:
    """Read the features of a row that can be predicted.

    Raises:
        DataError: a value cannot be read, is outside the schema's range, or is missing and the
            schema drops such rows.
    """
    tokens = reader.tokens(number, line)
    for column in schema.numeric_columns():
        token = tokens[column.name]
        tokens[column.name] = BOOLEANS.get(token.lower(), token)
    features = reader.features(number, tokens)
    fault = _row_fault(schema, reader, tokens)
    if fault:
        raise DataError(fault)
    return features


def _columns(
    lines: Lines, schema: TableSchema, where: str, id_column: str | None
) -> tuple[list[str], Lines]:
    """Return the names of the columns, as the schema writes them, and the lines of rows."""
    declared = _declared_names(schema)
    folded = {name.casefold(): name for name in declared}
    named = []
    for cell in lines[0][1] if lines else []:
        name = normalise_name(cell)
        # Two columns may differ by case only, so that an exact name goes first
        if name not in declared and name != id_column:
            name = folded.get(name.casefold(), name)
        named.append(name)
    used = schema.used_columns()
    if not schema.header and id_column is None and not set(used).intersection(named):
        if len(named) == len(declared) - 1:
            declared.pop()  # the label's column is not there
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
    """Return a patient's id, printable and short enough for a table; empty in a short line."""
    if place >= len(line):
        return ""
    return one_line(line[place].strip(), _LONGEST_ID)


def _row_fault(schema: TableSchema, reader: RowReader, tokens: Mapping[str, str]) -> str | None:
    """Say why a row whose values can be read is still not predicted; None if it is."""
    impossible = []
    for column in schema.columns:
        token = tokens[column.name] if column.range else ""
        if not column.range or token in reader.missing or token in reader.unmeasured[column.name]:
            continue
        low, high = column.range
        if not low <= float(token) <= high:
            impossible.append(
                f"column '{column.name}': {one_line(token, 30)} is impossible, because the "
                f"schema's range is {low:g} to {high:g}"
            )
    if impossible:
        return "; ".join(impossible)
    lacking = [name for name in schema.used_columns() if tokens[name] in reader.missing]
    if lacking and schema.policy == "drop":
        return f"has no value of {', '.join(lacking)}, but the schema drops such rows"
    return None
