import html
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fedsilo.core.errors import DataError, FedsiloError
from fedsilo.core.one_line import (
    abbreviate,
    as_word,
    format_count,
    format_measure,
    join_names,
    markdown_cell,
    one_line,
    printable,
    quote_value,
)


@given(st.text(max_size=2000))
def test_whatever_is_told_is_one_printable_line_of_its_length(text: str) -> None:
    for told in (one_line(text, 50), abbreviate(text, 120, 40), str(FedsiloError(text))):
        assert told.isprintable()
    assert len(one_line(text, 50)) <= 50
    assert len(abbreviate(text, 120, 40)) <= 120
    assert len(str(FedsiloError(text))) <= 1500


def test_a_plain_line_stays_as_it_is() -> None:
    line = "data/north.csv, line 3, column 'age': '12 é' is not a number"
    assert one_line(line) == abbreviate(line) == printable(line) == str(DataError(line)) == line


def test_control_characters_and_line_ends_become_spaces() -> None:
    assert printable("a\x1b[2J\r\nb\u202ec\x00") == "a [2J b c"


def test_of_a_long_error_the_end_stays_which_says_what_to_do() -> None:
    told = str(DataError(f"{'x' * 5000}: lower 'split.silos'"))
    assert told.startswith("xxx")
    assert told.endswith(": lower 'split.silos'")
    assert " … " in told


@pytest.mark.parametrize(
    ("value", "told"),
    [("a\nb", r"'a\nb'"), (1.5, "1.5"), ([1, "x"], "[1, 'x']"), ("y" * 500, "'" + "y" * 98 + "…")],
)
def test_a_value_is_shown_as_python_writes_it(value: object, told: str) -> None:
    assert quote_value(value) == told


def test_what_python_cannot_write_is_told_by_its_kind() -> None:
    assert quote_value(10**5000) == "a int that is too large to show"
    assert one_line(10**5000) == "a int that is too large to show"


def test_of_many_names_the_first_are_listed() -> None:
    assert join_names(["b", "a"]) == "b, a"
    assert join_names(range(40), 3) == "0, 1, 2 and 37 more"
    assert join_names(["b", "y" * 500]) == "b, " + "y" * 79 + "…"


def test_one_of_a_noun_is_singular_and_a_hiss_gets_its_e() -> None:
    assert [format_count(number, "site") for number in (0, 1, 2)] == [
        "0 sites",
        "1 site",
        "2 sites",
    ]
    assert format_count(1, "process") == "1 process"
    assert format_count(1200, "process") == "1,200 processes"


def test_a_path_with_a_space_is_one_word_and_one_below_here_is_relative() -> None:
    assert as_word(Path("/runs of today/a")) == "'/runs of today/a'"
    assert as_word(Path.cwd() / "runs" / "a") == "runs/a"


def cell_as_html(text: str) -> str:
    """Return what a Markdown reader makes of a cell between two others."""
    table = (
        f"| a | b | c |\n| --- | --- | --- |\n| (x) | {markdown_cell(text)} | (https://e.org) |\n"
    )
    shown = MarkdownIt("commonmark").enable("table").render(table)
    return shown.rpartition("<td>(x)</td>\n<td>")[2].partition("</td>\n<td>(https://e.org)</td>")[0]


@pytest.mark.parametrize(
    "text",
    [
        "+0.233 (1 run)",
        "-0.1",
        "-",
        "+",
        "0.700 [0.600, 0.800]",
        "+0.200 [-0.100, +0.500] p=0.040",
        "[nan, 1e-05]",
        "long *",
        "1. p < 0.05 > 0",
    ],
)
def test_numbers_intervals_and_signs_stay_as_they_are_in_a_cell(text: str) -> None:
    assert markdown_cell(text) == text
    assert cell_as_html(text) == html.escape(text, quote=False)


@pytest.mark.parametrize(
    "text",
    [
        "[0.6, 0.8](https://e.org)",
        "![0.6, 0.8](https://e.org)",
        "[[0.6, 0.8]](https://e.org)",
        "[0.6, 0.8][0.6, 0.8]",
        "[x](javascript:alert(1))",
        "<img src=x onerror=alert(1)>",
        "**b** *i* _u_ `c` a|b",
        "* * a *b*",
        "\\[0.6, 0.8] \\| \\<b>",
    ],
)
def test_what_could_be_markup_is_shown_as_it_is_in_a_cell(text: str) -> None:
    assert cell_as_html(text) == html.escape(text, quote=False)


@given(st.text(st.sampled_from("[]0, 1(!:)*_`<b>|\\~+-&#x"), max_size=30))
def test_no_text_of_markup_and_numbers_is_anything_else_in_a_cell(text: str) -> None:
    assert html.unescape(cell_as_html(text)) == " ".join(text.split())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((24, "24.0"), (23.34, "23.3"), (99.96, "100.0"), (1523.4, "1,523"), (0.5, "0.500")),
        *((-0.00123, "-0.00123"), (0.0, "0"), (0.0009, "0.0009"), (12_345_678, "1.23e+07")),
        *((math.inf, "inf"), (math.nan, "nan")),
    ],
)
def test_a_measured_number_has_three_digits_and_keeps_its_zeros(value: float, text: str) -> None:
    assert format_measure(value) == text
