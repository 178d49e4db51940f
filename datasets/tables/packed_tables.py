"""How much memory a packed table takes, from its own figures, before pandas reads it.

A Parquet file of 270 kB can hold 60 million cells, a workbook of 4 MB a sheet of 1.5 GB.
"""

import re
import zipfile
from pathlib import Path
from xml.parsers.expat import ExpatError, ParserCreate

from fedsilo.core.files.unpacked_size import (
    CELL_BYTES,
    check_members,
    check_unpacked,
    most_unpacked,
)

_PART = 2**20  # bytes of a sheet that are looked at together
_TEXTS = "xl/sharedStrings.xml"
# Parquet's type of texts and bytes of any length
_BYTES = "BYTE_ARRAY"
_XML_TIMES = 4  # openpyxl's memory for a sheet's XML, at least
_LETTERS = re.compile(r"[A-Za-z]{1,9}")


def check_parquet(path: Path) -> list[str]:
    """Refuse a Parquet file that takes more memory than a file may; return its columns of bytes.

    Its footer says how many cells each column has, and how many bytes once they are inflated. A
    value that is stored once may be in every row: columns of texts and bytes are to be read as they
    are stored, a number a row, which is not possible within lists.

    Raises:
        DataError: it takes more.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        about = file.metadata
        cells, size = about.num_rows * about.num_columns, 0
        values = 0
        flat = {field.name for field in file.schema_arrow}
        texts = set()
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            for column in range(group.num_columns):
                chunk = group.column(column)
                # A list is one row with any number of values, so that values are counted, not only
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


def check_workbook(path: Path) -> None:
    """Refuse an Excel workbook that takes more memory than a file may.

    What is in its zip is counted as it is inflated. Then each part is looked through for the
    places of cells: pandas makes all rows as wide as the widest one, so that one cell in the last
    column of the last row makes 17 billion.

    Raises:
        DataError: it takes more.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        check_members(path, entries)
        for entry in entries:  # a sheet may have any name, also that of the shared texts
            times = 1 if entry.filename == _TEXTS else _XML_TIMES
            _Cells(path, times).count(archive, entry)


class _Cells:
    """The cells of a sheet: those that are written, and those that lie between them."""

    def __init__(self, path: Path, times: int) -> None:
        self.path = path
        # How often its XML a part takes of memory
        self.times = times
        self.most = most_unpacked(path) // CELL_BYTES
        self.row = self.column = self.widest = 0

    def count(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        """Read a part of the workbook as XML, and refuse it when there are too many."""
        parser = ParserCreate(namespace_separator=" ")
        parser.StartElementHandler = self._begin
        size = 0
        with archive.open(entry) as sheet:
            # A pattern would miss other encodings, prefixes and entities of XML; expat knows them
            # all
            for part in iter(lambda: sheet.read(_PART), b""):
                size += len(part)
                check_unpacked(self.path, self.times * size)
                try:
                    parser.Parse(part)
                except ExpatError:  # no XML: a picture, or what openpyxl refuses as well
                    return

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        element = name.rpartition(" ")[2]
        if element == "row":
            self.row = _row_number(attributes.get("r", ""), self.row + 1)
            self.column = 0
        elif element == "c":
            letters = _LETTERS.match(attributes.get("r", ""))
            self.column = _column_number(letters[0]) if letters else self.column + 1
            self.widest = max(self.widest, self.column)
        else:
            return
        # A row without cells is a list as well
        cells = self.row * max(1, self.widest)
        if cells > self.most:
            check_unpacked(self.path, CELL_BYTES * cells)


def _row_number(text: str, usual: int) -> int:
    """Return the number of a row as openpyxl reads it, '3e7' too; ``usual`` if there is none."""
    try:
        return int(float(text))
    except (ValueError, OverflowError):  # openpyxl refuses what is no whole number
        return usual


def _column_number(letters: str) -> int:
    """Return the number of a column by its letters: A is 1, Z 26, AA 27."""
    number = 0
    for letter in letters.upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return number
