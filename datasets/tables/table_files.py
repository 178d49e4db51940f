"""Read table files as lines of texts: CSV (also gzipped), Excel and Parquet.

A Parquet file of 270 kB can hold 60 million cells, and a workbook of 4 MB a sheet of 1.5 GB. So the
memory that a packed table needs is computed from the file's own sizes before it is read.
"""

from __future__ import annotations

import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from gzip import BadGzipFile, GzipFile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from xml.parsers.expat import ExpatError, ParserCreate

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, FedsiloError, SettingError, missing_extra
from fedsilo.core.files.text_files import csv_lines, decode_text, file_fault, read_text
from fedsilo.core.files.unpacked_size import (
    CELL_BYTES,
    check_members,
    check_unpacked,
    most_unpacked,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_Read = TypeVar("_Read")
Place = tuple[int, int]  # row and column of a cell, from 1
Lines = Sequence[tuple[int, list[str]]]  # each line's number in the file, and its cells

# The text of a cell whose formula has no stored value, because no program has computed it yet
OPEN_FORMULA = "="
NAMES_LINE = 0  # the line number of the names that a Parquet file always has

_EXCEL = (".xlsx", ".xlsm")
_OLD_EXCEL = ".xls"
_PARQUET = (".parquet", ".pq")
_GZIP = ".gz"
# The first bytes of a file -> its kind, for files whose name does not show it
_SIGNATURES = {
    b"PK\x03\x04": ".xlsx",
    b"PAR1": ".parquet",
    b"\x1f\x8b": _GZIP,
    b"\xd0\xcf\x11\xe0": _OLD_EXCEL,
}
_DELIMITERS = ",;\t"
_PART = 2**20  # bytes of a sheet that are parsed at a time
_TEXTS = "xl/sharedStrings.xml"
# Parquet's type for texts and bytes of any length
_BYTES = "BYTE_ARRAY"
_XML_TIMES = 4  # openpyxl's memory for a sheet's XML, at least
_LETTERS = re.compile(r"[A-Za-z]{1,9}")


def read_table(path: Path, delimiter: str = ",", guess_delimiter: bool = False) -> Lines:
    """Read a table file as lines of text cells: CSV, gzipped CSV, Excel (first sheet) or Parquet.

    The endings .xlsx, .xlsm, .xls, .parquet and .pq decide the format. For any other ending the
    file's first bytes decide, and unknown bytes mean CSV.

    In Excel and Parquet, spaces at both ends of a cell are removed, and a missing value becomes ''.
    In Excel, a formula without a stored value becomes ``OPEN_FORMULA``. Empty lines are left out,
    except in Parquet.

    Args:
        path: the file.
        delimiter: the character between the values of a CSV file.
        guess_delimiter: whether the first line of a CSV file decides the delimiter. It is the most
            frequent of ``delimiter``, ',', ';' and tab, and on a tie the first of these.

    Returns:
        (line number, cells) for each line. In Parquet, the column names come first, with the number
        ``NAMES_LINE``.

    Raises:
        DataError: in one of these cases:

            - The file is missing, damaged or in none of these formats.
            - It is larger than 1 GiB, or than fedsilo's limit when unpacked, by default 1 GiB.
            - It is an Excel workbook from before 2007 (.xls) or with a password.
        SettingError: the package that reads this format is not installed.
    """
    kind = _kind_of(path)
    if kind in _PARQUET:
        frame = _read_packed(path, kind, _read_parquet)
        names = list(map(str, frame.columns))
        return [(NAMES_LINE, names), *_as_lines(path, _rows_of(frame))]
    if kind in _EXCEL:
        lines = _as_lines(path, _read_packed(path, kind, _read_workbook))
        return [(number, line) for number, line in lines if any(line)]
    if kind == _OLD_EXCEL:
        raise DataError(
            f"{path} is an Excel file from before 2007, or has a password: save it as .xlsx "
            "without a password, or as CSV"
        )
    text = _unpack_text(path) if kind == _GZIP else read_text(path)
    if guess_delimiter:
        first = text.partition("\n")[0]
        delimiter = max((delimiter, *_DELIMITERS), key=first.count)  # the first of equals
    return csv_lines(text, str(path), delimiter)


def _kind_of(path: Path) -> str:
    """Return the format of a table file as an ending, such as '.xlsx' or '.gz', or '' for text.

    The path's ending decides if it is .xlsx, .xlsm, .xls, .parquet or .pq, in upper or lower case.
    Otherwise the first four bytes of the file decide. If they match no known format, or cannot be
    read, the result is ''.

    Raises:
        DataError: the path is a pipe or device, the file is too large, or a file with one of these
            endings does not exist.
    """
    ending = path.suffix.lower()
    is_packed = ending in (*_EXCEL, *_PARQUET, _OLD_EXCEL)
    fault = file_fault(path)
    if is_packed and not path.is_file():
        fault = "cannot be read: no such file; correct its name"
    if fault:
        raise DataError(f"{path} {fault}")
    if is_packed:
        return ending
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:  # reading it as text gives the reason
        return ""
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature):
            return kind
    return ""


def _read_packed(path: Path, kind: str, read: Callable[[Path], _Read]) -> _Read:
    """Read an Excel or Parquet file with ``read``, and raise a ``DataError`` if it is damaged.

    Any exception of ``read`` that is not fedsilo's counts as damage, except a failed import.

    Args:
        path: the file.
        kind: the format's ending, for errors.
        read: the function that reads the file. Its result is returned.

    Raises:
        DataError: the file is damaged, or ``read`` raises a ``DataError``.
        SettingError: the package that reads this format is not installed.
    """
    try:
        return read(path)
    except ImportError:
        raise SettingError(missing_extra(str(path), "tables", "save it as CSV")) from None
    except FedsiloError:
        raise
    except Exception as error:  # openpyxl and pyarrow raise nearly anything at a damaged file
        raise DataError(
            f"{path} is damaged or not a {kind} file ({type(error).__name__}): save it again, or "
            "as CSV"
        ) from None


def _as_lines(path: Path, rows: Iterable[Sequence[Any]]) -> list[tuple[int, list[str]]]:
    """Convert rows of cells to pairs: the line number, from 1, and the cells as strings.

    A missing value becomes ''. Empty rows are kept, so that the line numbers match the file.

    Raises:
        DataError: all cells together have more characters than fedsilo's limit for unpacked files,
            by default 2^30.
    """
    # Read once: ``check_unpacked`` would ask the file system for each row
    most = most_unpacked(path)
    lines = []
    characters = 0
    for number, row in enumerate(rows, 1):
        line = list(map(_cell, row))
        characters += sum(map(len, line))
        if characters > most:  # one text of the file may be in each of its rows
            check_unpacked(path, characters)
        lines.append((number, line))
    return lines


def _cell(value: Any) -> str:
    """Convert a cell to a string without spaces at its ends, as in a CSV file.

    Missing values, which are None, NaN, NaT and pandas's NA, become ''. ``str`` converts all other
    values.
    """
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return ""
    import pandas as pd

    if pd.api.types.is_scalar(value) and pd.isna(value):
        return ""
    return str(value).strip()


def _unpack_text(path: Path) -> str:
    """Inflate and decode the text in a gzip file.

    The size is checked step by step, because a small file may inflate to any size.

    Raises:
        DataError: the file is missing, damaged, not text, or larger than fedsilo's limit for
            unpacked files, by default 1 GiB.
    """
    content = bytearray()
    try:
        with GzipFile(path) as file:
            for part in iter(lambda: file.read(_PART), b""):
                content += part
                check_unpacked(path, len(content))
        return decode_text(bytes(content))
    except (BadGzipFile, EOFError, zlib.error):
        fault = "is a gzip file that is truncated or damaged: pack it again"
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except ValueError as error:
        fault = f"contains a file that {error}"
    raise DataError(f"{path} {fault}")


def _read_parquet(path: Path) -> DataFrame:
    """Read a Parquet file as a data frame, with any named index as ordinary columns.

    An unnamed index, such as row numbers, stays the index.

    Raises:
        DataError: the file needs more memory than fedsilo's limit for unpacked files, by default 1
            GiB.
    """
    import pandas as pd

    # Texts stay what they are in the file, a number each, and are not written out per row
    frame = pd.read_parquet(path, read_dictionary=check_parquet(path))
    names = [name for name in frame.index.names if name is not None]
    if not names:
        return frame
    return frame.reset_index(names)


def _rows_of(frame: DataFrame) -> Iterator[Sequence[Any]]:
    columns = [_objects(frame.iloc[:, number]) for number in range(frame.shape[1])]
    return zip(*columns, strict=True)


def _objects(column: Series) -> npt.NDArray[Any]:
    """Convert a column to an array of objects, with few new strings.

    In a categorical column, all rows of a category share one string, and a missing value becomes
    None. Any other column is converted by pandas.
    """
    import pandas as pd

    if not isinstance(column.dtype, pd.CategoricalDtype):
        return column.to_numpy(dtype=object)
    # pandas itself would make a text for each row
    known = np.append(column.cat.categories.to_numpy(dtype=object), [None])
    # A missing value has the code -1, which is the place of the last
    values: npt.NDArray[Any] = known[column.cat.codes.to_numpy()]
    return values


def _read_workbook(path: Path) -> list[list[Any]]:
    """Read the rows of a workbook's first sheet, padded with None to the length of the longest row.

    Some programs write a formula without its value, which Excel computes when a person opens the
    file. Such a cell becomes ``OPEN_FORMULA``, to distinguish it from a missing value.

    Raises:
        DataError: the workbook needs more memory than fedsilo's limit for unpacked files, by
            default 1 GiB.
    """
    import_module("openpyxl")  # first of all: without it no file is looked at
    open_formulas = check_workbook(path)
    rows = list(map(list, _sheet_rows(path, stored=True)))
    if open_formulas:
        # They may be on another sheet, and only a second reading tells which cells have formulas
        for row, formulas in enumerate(_sheet_rows(path, stored=False)):
            for column, formula in enumerate(formulas):
                if formula is not None and (row + 1, column + 1) in open_formulas:
                    rows[row][column] = OPEN_FORMULA
    rows = list(map(_trim, rows))
    width = max(map(len, rows), default=0)
    return [[*row, *[None] * (width - len(row))] for row in rows]


def _sheet_rows(path: Path, stored: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a workbook's first sheet, which may differ in length.

    Args:
        path: the workbook.
        stored: whether a cell with a formula yields its stored value, or None without one. If
            False, the cell yields the formula.
    """
    from openpyxl import load_workbook

    # A path whose ending is not Excel's would be refused, an open file is not
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts of a workbook that hold no cells
        book = load_workbook(file, read_only=True, data_only=stored, keep_links=False)
        try:
            sheet = book.worksheets[0]
            # The file's own dimensions may be wrong
            sheet.reset_dimensions()
            yield from sheet.iter_rows(values_only=True)
        finally:
            book.close()


def _trim(row: Sequence[Any]) -> list[Any]:
    """Remove the empty cells at the end of a row, and convert whole floats such as 50.0 to int.

    A cell is empty if it is None or ''. Other empty cells stay. ``row`` is not changed.
    """
    cells = list(row)
    for place, cell in enumerate(cells):
        if isinstance(cell, float) and cell.is_integer():
            cells[place] = int(cell)
    while cells and cells[-1] in (None, ""):
        cells.pop()
    return cells


def check_parquet(path: Path) -> list[str]:
    """Check the memory that a Parquet file needs, and list its columns of strings or bytes.

    The memory follows from the number of cells and the unpacked bytes of each column. A string that
    is stored once may appear in every row. The caller should therefore read the listed columns as
    categories, which hold each distinct value once. Columns within lists cannot be read in this
    way. They are not listed, and count as if each string were as large as its whole column.

    Returns:
        The names of the listed columns, sorted.

    Raises:
        DataError: the file needs more memory than fedsilo's limit for unpacked files, by default 1
            GiB.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        about = file.metadata
        # With lists there may be more values than cells, so the larger number counts
        cells, size = about.num_rows * about.num_columns, 0
        values = 0
        flat = {field.name for field in file.schema_arrow}
        texts = set()
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            for column in range(group.num_columns):
                chunk = group.column(column)
                # A list is one row with any number of values, so values are counted, not only
                # rows
                values += chunk.num_values
                size += chunk.total_uncompressed_size
                # A length is stated of values of a fixed one, else 0
                size += chunk.num_values * about.schema.column(column).length
                if chunk.physical_type == _BYTES and chunk.path_in_schema in flat:
                    texts.add(chunk.path_in_schema)
                elif chunk.physical_type == _BYTES:
                    # Within a list each value is written out, and may be all that is stored
                    size += chunk.num_values * chunk.total_uncompressed_size
        check_unpacked(path, size + CELL_BYTES * max(cells, values))
        return sorted(texts)


def check_workbook(path: Path) -> set[Place]:
    """Check how much memory an Excel workbook needs, and find formulas without a stored value.

    A workbook is a zip archive, so a small one may need much memory. Each file in it is inflated
    step by step, to count its bytes and cells. The number of cells is the largest row number times
    the largest column number, because a reader pads every row to the widest.

    Returns:
        (row, column), from 1, of each formula without a stored value. The places of all sheets are
        in one set.

    Raises:
        DataError: the workbook needs more memory than fedsilo's limit for unpacked files, by
            default 1 GiB.
    """
    open_formulas: set[Place] = set()
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        check_members(path, entries)
        for entry in entries:  # a sheet may have any name, also that of the shared texts
            times = 1 if entry.filename == _TEXTS else _XML_TIMES
            part = _WorkbookPart(path, times)
            part.count(archive, entry)
            open_formulas |= part.open_formulas
    return open_formulas


class _WorkbookPart:
    """Counts the cells in one part of a workbook, including empty ones, and finds open formulas.

    An open formula is a formula without a stored value.
    """

    def __init__(self, path: Path, times: int) -> None:
        self.path = path
        # How often its XML a part takes of memory
        self.times = times
        self.most = most_unpacked(path) // CELL_BYTES
        self.row = self.column = self.widest = 0
        self.cell_type = ""
        self.has_value = False
        self.open_formulas: set[Place] = set()
        # Elements arrive as 'namespace name', so prefixes do not matter
        self.parser = ParserCreate(namespace_separator=" ")
        self.parser.StartElementHandler = self._begin

    def count(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        """Inflate and parse one file in a workbook as XML, to count cells and find open formulas.

        An open formula has no stored value. The places of open formulas are added to
        ``open_formulas``. At the first XML error, reading stops without an exception, because a
        workbook also contains other files, such as pictures.

        Args:
            archive: the workbook's zip archive.
            entry: the file within it.

        Raises:
            DataError: the file's bytes or cells need more memory than fedsilo's limit, by default 1
                GiB.
        """
        size = 0
        with archive.open(entry) as sheet:
            # A pattern would miss other encodings, prefixes and entities of XML; expat knows them
            # all
            for part in iter(lambda: sheet.read(_PART), b""):
                size += len(part)
                check_unpacked(self.path, self.times * size)
                try:
                    self.parser.Parse(part)
                except ExpatError:  # no XML: a picture, or what openpyxl refuses as well
                    return

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        """Count a row or a cell, or note that a formula begins, at the start of an XML element.

        The XML parser calls this method. Other elements are ignored. ``name`` is 'namespace
        element'. ``attributes`` has the place of a row or cell ('r') and the type of a cell ('t').

        Raises:
            DataError: the cells so far, including empty ones, need too much memory.
        """
        element = name.rpartition(" ")[2]
        if element == "row":
            self.row = _row_number(attributes.get("r", ""), self.row + 1)
            self.column = 0
        elif element == "c":
            letters = _LETTERS.match(attributes.get("r", ""))
            self.column = _column_number(letters[0]) if letters else self.column + 1
            self.widest = max(self.widest, self.column)
            self.cell_type = attributes.get("t", "")
        elif element == "f":
            self._begin_formula()
            return
        else:
            return
        # A row without cells is a list as well
        cells = self.row * max(1, self.widest)
        if cells > self.most:
            check_unpacked(self.path, CELL_BYTES * cells)

    def _begin_formula(self) -> None:
        """Prepare to find out whether the cell whose formula begins here has a stored value.

        The parser will call ``_end`` at each end tag until the cell ends. Text is skipped until the
        formula ends, because it is the formula. Cells without a formula are not examined in this
        way, because handling every end tag and text would double the time.
        """
        self.has_value = False
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = None

    def _end(self, name: str) -> None:
        """Handle the end of an XML element within a cell that has a formula.

        The XML parser calls this method. After the formula, ``_take_text`` takes all text as its
        value. A value of type text may be empty. If the cell ends without a value, its place is
        added to ``open_formulas``. At the cell's end, this method and ``_take_text`` are
        unregistered.
        """
        element = name.rpartition(" ")[2]
        if element == "f":
            self.parser.CharacterDataHandler = self._take_text
        elif element == "v" and self.cell_type == "str":
            self.has_value = True  # a formula whose value is the empty text
        elif element == "c":
            if not self.has_value:
                self.open_formulas.add((self.row, self.column))
            self.parser.EndElementHandler = None
            self.parser.CharacterDataHandler = None

    def _take_text(self, text: str) -> None:
        self.has_value |= not text.isspace()


def _row_number(text: str, usual: int) -> int:
    """Parse the number of a row in a workbook in the same way as openpyxl.

    The text may be a float, such as '3e7', whose fraction is cut off. If the text is empty or not a
    finite number, the result is ``usual``, the previous row's number plus 1.
    """
    try:
        return int(float(text))
    except (ValueError, OverflowError):  # openpyxl refuses a number that is not an integer
        return usual


def _column_number(letters: str) -> int:
    """Convert a column's letters to its number: A is 1, Z is 26, AA is 27."""
    number = 0
    for letter in letters.upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return number
