"""How much memory a packed table takes, from its own figures, before pandas reads it.

A Parquet file of 270 kB can hold 60 million cells, a workbook of 4 MB a sheet of 1.5 GB.
"""

import re
import zipfile
from pathlib import Path
from xml.parsers.expat import ExpatError, ParserCreate

from fedsilo.datasets.io.unpacked_size import (
    CELL_BYTES,
    check_members,
    check_unpacked,
    most_unpacked,
)

_PART = 2**20  # bytes of a sheet that are looked at together
_TEXTS = "xl/sharedStrings.xml"
_XML_TIMES = 4  # openpyxl's memory for a sheet's XML, at least
_LETTERS = re.compile(r"[A-Za-z]{1,9}")


def check_parquet(path: Path) -> list[str]:
    """Refuse a Parquet file that takes more memory than a file may; return its columns of texts.

    Its footer says how many cells each column has, and how many bytes once they are inflated.

    Raises:
        DataError: it takes more.
    """
    from pyarrow import types
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        about = file.metadata
        cells, size = about.num_rows * about.num_columns, 0
        values = 0
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            for column in range(group.num_columns):
                chunk = group.column(column)
                # A list is one row with any number of values, so that values are counted, not only
                # rows
                values += chunk.num_values
                size += chunk.total_uncompressed_size
        check_unpacked(path, size + CELL_BYTES * max(cells, values))
        texts = []
        for field in file.schema_arrow:
            if types.is_string(field.type) or types.is_large_string(field.type):
                texts.append(field.name)
        return texts


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
        for entry in entries:  # a sheet may have any name
            if entry.filename != _TEXTS:
                _Cells(path).count(archive, entry)


class _Cells:
    """The cells of a sheet: those that are written, and those that lie between them."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
                check_unpacked(self.path, _XML_TIMES * size)
                try:
                    parser.Parse(part)
                except ExpatError:  # no XML: a picture, or what openpyxl refuses as well
                    return

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        element = name.rpartition(" ")[2]
        if element == "row":
            number = attributes.get("r", "")
            self.row = int(number) if number.isdecimal() else self.row + 1
            self.column = 0
        elif element == "c":
            letters = _LETTERS.match(attributes.get("r", ""))
            self.column = _column_number(letters[0]) if letters else self.column + 1
            self.widest = max(self.widest, self.column)
        else:
            return
        if self.row * self.widest > self.most:
            check_unpacked(self.path, CELL_BYTES * self.row * self.widest)


def _column_number(letters: str) -> int:
    """Return the number of a column by its letters: A is 1, Z 26, AA 27."""
    number = 0
    for letter in letters.upper():
        number = 26 * number + ord(letter) - ord("A") + 1
    return number
