from pathlib import Path

import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import read_rows, read_text, same_text
from tests.support.errors import refuses


def test_a_file_that_is_missing_or_no_text_is_refused_by_its_path(tmp_path: Path) -> None:
    with refuses(DataError, "absent.csv"):
        read_text(tmp_path / "absent.csv")
    path = tmp_path / "latin.csv"
    path.write_bytes("Größe".encode("latin-1"))
    with refuses(DataError, "latin.csv"):
        read_text(path)


@pytest.mark.parametrize(
    ("token", "same"),
    [
        ("4", "4"),
        ("4.0", "4"),
        (" 4.00 ", "4"),
        ("+4", "4"),
        ("-0", "0"),
        ("4.5", "4.5"),
        ("4.50", "4.5"),
        (" f ", "f"),
        ("", ""),
        ("inf", "inf"),
        (" 1_0 ", "1_0"),
        ("1_0.0", "1_0.0"),
        ("1E1", "1E1"),  # a ward, and not ward 10
        ("2E10", "2E10"),
        (".5", "0.5"),
        ("NaN", "nan"),
        ("gro\u0308\u00dfe", "gr\u00f6\u00dfe"),  # as a Mac writes it
    ],
)
def test_a_number_is_the_same_level_however_it_is_written(token: str, same: str) -> None:
    assert same_text(token) == same


def test_lines_of_a_listing_come_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('b, a\n1, 2\n\n"3\n4",5\n')
    assert read_rows(path, ["a"]) == [(2, {"b": "1", "a": "2"}), (5, {"b": "3\n4", "a": "5"})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", [1, "a", 0]),
        ("c\n1\n", ["a", 0]),
        ("a,Smith\n1,2\n", [1]),
        ("a,a\n1,2\n", [0]),
        ("a,c\n1,2\n3\n", [3, 1, 2]),
        ("a\n1\n2,Smith\n", [3, 2, 1]),
        ("a\n" + "1" * 200_000, [2]),
    ],
)
def test_a_listing_that_cannot_be_is_told_by_its_line(
    tmp_path: Path, text: str, said: list[object]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with refuses(DataError, *said) as caught:
        read_rows(path, ["a"], ["c"])
    assert "Smith" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}, line ")


def test_names_of_columns_are_compared_in_one_unicode_form(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("gro\u0308\u00dfe\n170\n")
    assert read_rows(path, ["gr\u00f6\u00dfe"]) == [(2, {"gr\u00f6\u00dfe": "170"})]


def test_utf_16_with_a_mark_is_read_as_utf_8_is(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / encoding).write_bytes("Größe\r\n1\r\n".encode(encoding))
        assert read_text(tmp_path / encoding) == "Größe\n1\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04 packed", "an Excel file or another zip archive"),
        (b"PAR1 packed", "a Parquet file"),
        (b"\x1f\x8b packed", "a gzip file"),
        ("age".encode("utf-16-le"), "bytes of 0"),
    ],
)
def test_a_binary_file_is_called_what_it_is(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_bytes(content)
    with refuses(DataError, "north.csv", said):
        read_text(tmp_path / "north.csv")
