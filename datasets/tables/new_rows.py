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
    cells: list[list[str]] = []
    characters, most = 0, most_unpacked(path)
    columns = [_objects(frame.iloc[:, number]) for number in range(frame.shape[1])]
    for row in zip(*columns, strict=True):
        line = [_cell(value) for value in row]
        characters += sum(map(len, line))
        if characters > most:  # one text of the file may be in each of its rows
            check_unpacked(path, characters)
        cells.append(line)
    if kind in _PARQUET:
        return [(0, [str(name) for name in frame.columns]), *enumerate(cells, 1)]
    return [(number, line) for number, line in enumerate(cells, 1) if any(line)]


def _read_frame(path: Path, kind: str) -> DataFrame:
    """Read a packed table once its own figures say that it takes no more than it may."""
    import pandas as pd

    if not path.is_file() or (fault := file_fault(path)):
        raise DataError(f"{path} {fault if path.is_file() else 'cannot be read: no such file'}")
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
        raise DataError(f"{path} is damaged or no {kind} file ({type(error).__name__})") from None


def _with_index_columns(frame: DataFrame) -> DataFrame:
    """Return the frame with a named index as columns, because pandas stored it as such."""
    names = [name for name in frame.index.names if name is not None]
    return frame.reset_index(names) if names else frame


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

    return "" if pd.api.types.is_scalar(value) and pd.isna(value) else str(value).strip()


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
    schema = schema.model_copy(update={"missing": [*dict.fromkeys([*schema.missing, ""])]})
    names, rows = _columns(lines, schema, where, id_column)
    if not rows:
        raise DataError(f"{where} has no rows: give at least one")
    reader = RowReader(schema, names, where)
    numeric = [column.name for column in schema.columns if column.kind == "numeric"]
    kept, faults, ids = dict[int, list[float]](), dict[int, str](), dict[int, str]()
    for number, line in rows:
        if id_column is not None:
            ids[number] = _id(line, names.index(id_column))
        try:
            tokens = reader.tokens(number, line)
            tokens |= {one: BOOLEANS.get(tokens[one].lower(), tokens[one]) for one in numeric}
            features = reader.features(number, tokens)
        except DataError as error:
            faults[number] = str(error).removeprefix(f"{where}, line {number}").lstrip(",: ")
            continue
        if fault := _row_fault(schema, reader, tokens):
            faults[number] = fault
        else:
            kept[number] = features
    known = {*(column.name for column in schema.columns), schema.label.column, id_column}
    matrix = as_matrix(list(kept.values()), schema)
    return NewRows(tuple(kept), matrix, faults, ids, len(set(names) - known))


def _columns(
    lines: Lines, schema: TableSchema, where: str, id_column: str | None
) -> tuple[list[str], Lines]:
    """Return the names of the columns, as the schema writes them, and the lines of rows."""
    declared, label = [column.name for column in schema.columns], schema.label.column
    first = [normalise_name(cell) for cell in lines[0][1]] if lines else []
    exact = {*declared, label, id_column}
    folded = {name.casefold(): name for name in (*declared, label)}
    named = [cell if cell in exact else folded.get(cell.casefold(), cell) for cell in first]
    used = schema.used_columns()
    if not schema.header and id_column is None and not set(used) & set(named):
        names = declared if len(first) == len(declared) else [*declared, label]
        return names, lines
    needed = used if id_column is None else [*used, id_column]
    # Names of other columns are not quoted: without a header they would be a patient's values
    missing = [name for name in needed if name not in named]
    twice = [name for name in needed if named.count(name) > 1]
    if missing or twice:
        what = (
            f"lacks the columns {quote_texts(missing)}"
            if missing
            else f"has {quote_texts(twice)} twice"
        )
        raise DataError(
            f"{where}: the first line {what}: name each once there, in any order "
            f"(the schema's are {quote_texts(used)})"
        )
    return named, lines[1:]


def _id(line: Sequence[str], place: int) -> str:
    """Return a patient's id, printable and of no length that breaks a table."""
    return one_line(line[place].strip(), _LONGEST_ID) if place < len(line) else ""


def _row_fault(schema: TableSchema, reader: RowReader, tokens: Mapping[str, str]) -> str | None:
    """Say why a row whose values can be read is still not predicted; None if it is."""
    impossible = [
        f"column '{column.name}': {one_line(token, 30)} is impossible, the schema's range is "
        f"{column.range[0]:g} to {column.range[1]:g}"
        for column in schema.columns
        if column.range and (token := tokens[column.name]) not in reader.missing
        if token not in reader.unmeasured[column.name]
        if not column.range[0] <= float(token) <= column.range[1]
    ]
    if impossible:
        return "; ".join(impossible)
    lacking = [name for name in schema.used_columns() if tokens[name] in reader.missing]
    if lacking and schema.policy == "drop":
        return f"has no value of {', '.join(lacking)}, and the schema drops such rows"
    return None
