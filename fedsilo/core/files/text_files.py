"""Text files: decoding, reading CSV files by column name, and normalising values."""

import codecs
import csv
import io
import re
import stat
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsilo.core.errors import DataError

_MOST_BYTES = 2**30
# The first bytes of files that are often given where text is expected
_PACKED = {
    b"PK\x03\x04": "an Excel file or another zip archive",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip file",
    b"\xd0\xcf\x11\xe0": "an Excel file from before 2007, or one with a password",
}
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")
# Tells whether a string without white space at its ends is a plain decimal number, such as '-4.50'
is_plain_number = _DECIMAL.fullmatch


def read_text(path: Path) -> str:
    """Read a text file, and return its content with line feeds as line ends.

    The file must be in UTF-8, or in UTF-16 with a byte-order mark. A byte-order mark is removed.

    Raises:
        DataError: the file is missing or cannot be read, is not a regular file, is larger than 1
            GiB, or is not text. The error names the file and the reason. If the file looks like an
            Excel, zip, Parquet or gzip file, the error names this format.
    """
    fault = file_fault(path)
    if fault is None:
        try:
            return decode_text(path.read_bytes())
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        except ValueError as error:
            fault = str(error)
    raise DataError(f"{path} {fault}")


def decode_text(content: bytes) -> str:
    """Decode the bytes of a text file: UTF-8, or UTF-16 with a byte-order mark.

    The byte-order mark is removed, and every line end becomes a line feed.

    Raises:
        ValueError: the bytes begin like an Excel, zip, Parquet or gzip file, cannot be decoded, or
            decode to a text with a NUL character. The message begins with "is", to follow the
            file's name. It also tells the user how to save the file.
    """
    for signature, kind in _PACKED.items():
        if content.startswith(signature):
            raise ValueError(f"is {kind}, but must be text: save it as text (UTF-8)")
    encoding = "utf-8-sig"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        text = io.TextIOWrapper(io.BytesIO(content), encoding=encoding).read()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    if "\0" in text:
        # The text may be UTF-16 without a mark, in which every second byte is 0
        raise ValueError("is not UTF-8 text, because it has bytes of 0: save it as UTF-8")
    return text


def file_fault(path: Path, most: int = _MOST_BYTES) -> str | None:
    """Explain why a file must not be read as a whole; None if no reason is found.

    Two reasons are possible, in words that follow the file's name. A pipe or device gives "is not a
    file". A file of more than ``most`` bytes, by default 1 GiB, gives "has ... bytes, more than
    ...".

    A folder, a missing file and an unreadable file give None, because the attempt to read them
    raises a better error.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return "is not a file"
    if found.st_size > most:
        return f"has {found.st_size} bytes, more than {most}"
    return None


def normalise_name(name: str) -> str:
    """Remove white space at both ends of a name, and compose its Unicode characters (NFC).

    A Mac writes an umlaut as a letter and a separate accent (NFD), which looks the same.
    """
    return unicodedata.normalize("NFC", name.strip())


def same_text(token: str) -> str:
    """Convert the string of a value to a standard form, so that equal values become equal strings.

    White space at both ends is removed, and Unicode is composed (NFC). 'nan' becomes lower case. A
    plain decimal number is read as a float64. A whole one is written as an integer, so '4.0' and
    '+4' become '4'. Any other one is written as Python writes a float, so '0.00001' becomes
    '1e-05'.

    Two kinds of numbers stay unchanged, because they may be identifiers: those with an exponent,
    such as '1E1', and those whose absolute value is 2^53 or more.
    """
    text = normalise_name(token)
    if text.lower() == "nan":
        return "nan"
    if not _DECIMAL.fullmatch(text):
        return text
    number = float(text)
    # From 2^53 on, neighbouring whole numbers can be the same float, so different ids would
    # become equal
    if abs(number) >= 2**53:
        return text
    if number.is_integer():
        return str(int(number))
    return repr(number)


class Marks:
    """A set of strings that mark a missing value, such as '?'.

    ``in`` compares strings in the form of ``same_text``. For speed, the first 10,000 answers are
    remembered, and plain numbers are looked up only if a mark is a number.
    """

    _REMEMBERED = 10_000  # texts; a column of free text must not fill the memory

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = frozenset(same_text(mark) for mark in marks)
        self.has_numbers = any(is_plain_number(mark) for mark in self._marks)
        self._known: dict[str, bool] = {}

    def __contains__(self, token: str) -> bool:
        if not self._marks or (not self.has_numbers and is_plain_number(token)):
            return False
        known = self._known.get(token)
        if known is None:
            known = same_text(token) in self._marks
            if len(self._known) < self._REMEMBERED:
                self._known[token] = known
        return known


def csv_lines(text: str, where: str, delimiter: str = ",") -> list[tuple[int, list[str]]]:
    """Split the text of a CSV file into rows, each as (line number in the file, cells).

    Empty rows are left out. Rows may differ in their number of cells. A row with a quoted line end
    covers several lines, and gets the number of the last one. Python's csv module reads the text in
    its non-strict mode, which accepts most quotes in wrong places.

    Args:
        text: the content of the file.
        where: the file's name, for errors.
        delimiter: the character between two cells.

    Raises:
        DataError: the csv module refuses the text, for example because a cell has more than 131,072
            characters. The error names the file and the line.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, line) for line in reader if line]
    except csv.Error as error:
        raise DataError(f"{where}, line {reader.line_num}: not valid CSV ({error})") from None


def read_rows(
    path: Path, needed: Sequence[str], optional: Sequence[str] | None = None, delimiter: str = ","
) -> list[tuple[int, dict[str, str]]]:
    """Read the rows of a CSV file whose first row has the names of the columns.

    White space at both ends of names and values is removed, and Unicode in names is composed (NFC).
    Values stay strings and may be empty. Empty rows are skipped.

    Args:
        path: the file.
        needed: columns that the file must have.
        optional: further columns that the file may have; None allows any.
        delimiter: the character between two values.

    Returns:
        A pair for each row: its line number in the file, and a mapping from column to value. The
        list is empty if the file has only a header.

    Raises:
        DataError: the file cannot be read as text or as CSV, a row has too few or too many values,
            or a column is missing, unknown or named twice.
    """
    lines = csv_lines(read_text(path), str(path), delimiter)
    header: list[str] = []
    if lines:
        header = [normalise_name(name) for name in lines[0][1]]
    fault = _find_header_fault(header, needed, optional)
    if fault:
        raise DataError(f"{path}, line 1: {fault}")
    rows = []
    for number, line in lines[1:]:
        # A missing delimiter would shift all later values into the wrong columns
        if len(line) != len(header):
            raise DataError(
                f"{path}, line {number}: {len(line)} values, but line 1 names {len(header)} columns"
            )
        rows.append((number, dict(zip(header, map(str.strip, line), strict=True))))
    return rows


def _find_header_fault(
    header: Sequence[str], needed: Sequence[str], optional: Sequence[str] | None
) -> str | None:
    """Describe the faults in the column names of a CSV file, in one clause; None if there are none.

    Three faults are possible: a needed column is missing, a name occurs twice, or a column is
    unknown. With ``optional`` as None, no column is unknown. The clause names all needed and
    optional columns, and the missing needed ones. Unknown columns are only counted, because in a
    file without a header they would be a patient's values.
    """
    missing = [name for name in needed if name not in header]
    # Surplus names are only counted: without a header they would be a patient's values
    surplus = 0
    if optional is not None:
        surplus = len(set(header) - {*needed, *optional})
    is_repeated = len(header) != len(set(header))
    if not missing and not surplus and not is_repeated:
        return None
    known = list(needed)
    for name in optional or ():
        known.append(f"{name} (optional)")
    said = f"the columns must be {', '.join(known)}: missing {missing}, {surplus} unknown"
    if is_repeated:
        said += ", a name appears twice"
    return said
