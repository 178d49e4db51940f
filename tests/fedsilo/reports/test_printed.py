"""A page on paper, by its print styles; and where a page is written."""

from pathlib import Path

import pytest

from fedsilo.core.errors import SettingError
from fedsilo.pages.page import render_page
from fedsilo.pages.written import refuse_twice, write_page
from tests.support.printed import printed_text

_DATA = {
    "verdict": "One sentence.",
    "alarm": True,
    "facts": [("run", "a run")],
    "checks": [("a check", "0.1", "above 0.25", "ok")],
    "missing": ["coverage: no calibration"],
}
_PAGE = render_page("monitor.html", "A title", _DATA)


def test_a_printed_page_has_its_text_and_no_navigation() -> None:
    text = printed_text(_PAGE)
    assert "A title" in text
    assert "One sentence." in text
    # The table of contents names it once more, and is not printed
    assert _PAGE.count("What was not checked") == 2
    assert text.count("What was not checked") == 1


def test_a_page_is_written_where_no_file_is(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert write_page(out, lambda: "one") == out
    with pytest.raises(SettingError, match="--overwrite"):
        write_page(out, lambda: "two")
    assert out.read_text() == "one"
    write_page(out, lambda: "two", overwrite=True)
    assert out.read_text() == "two"
    with pytest.raises(SettingError, match="is a folder"):
        write_page(tmp_path, lambda: "three", overwrite=True)


def test_a_file_that_would_be_written_twice_is_refused(tmp_path: Path) -> None:
    refuse_twice([tmp_path / "a", tmp_path / "b"], "--out")
    with pytest.raises(SettingError, match="b would be written twice: give --out another name"):
        refuse_twice([tmp_path / "a", tmp_path / "b", tmp_path / "b"], "--out")
