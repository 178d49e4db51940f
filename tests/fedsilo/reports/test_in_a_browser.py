"""Reports in a real browser: on a desktop, on a phone and on paper."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedsilo.pages.page import write_page
from fedsilo.reports.report import READERS, report
from tests.support.browser import chromium, opened

DESKTOP, PHONE = 1280, 390

_WIDER_THAN_THE_WINDOW = "document.documentElement.scrollWidth - window.innerWidth"
_HEADINGS = "[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))"
_WITHOUT_NAME = """[...document.querySelectorAll('svg')].filter(
  svg => !svg.closest('[role=img][aria-label]')).length"""
_TWICE = """[...document.querySelectorAll('[id]')].map(e => e.id).filter(
  (id, at, all) => all.indexOf(id) !== at)"""
_UNHEADED = """[...document.querySelectorAll('table')].filter(table => !table.caption
  || [...table.tHead.rows[0].cells].some(cell => cell.scope !== 'col')
  || [...table.tBodies[0].rows].some(row => row.cells[0].scope !== 'row')).length"""
_SMALL_LETTERS = """[...document.querySelectorAll('svg text')].filter(
  text => text.getBoundingClientRect().height > 0).map(text => {
    const svg = text.closest('svg');
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return parseFloat(getComputedStyle(text).fontSize) * scale; }).reduce(
  (a, b) => Math.min(a, b), 99)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def pages(hearts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a page for each reader, of several runs."""
    out = tmp_path_factory.mktemp("pages")
    return {
        reader: write_page(out / f"{reader}.html", partial(report, [hearts], reader))
        for reader in READERS
    }


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("reader", READERS)
def test_a_page_fits_the_window_and_loads_nothing(
    reader: str, width: int, browser: Any, pages: dict[str, Path]
) -> None:
    page, told = opened(browser, pages[reader], width)
    assert told == []
    assert page.evaluate(_WIDER_THAN_THE_WINDOW) <= 0
    assert page.evaluate(_SMALL_LETTERS) >= (8 if width == PHONE else 9), "pixels"
    page.close()


@pytest.mark.parametrize("reader", READERS)
def test_a_page_can_be_read_without_seeing_it(
    reader: str, browser: Any, pages: dict[str, Path]
) -> None:
    page, _ = opened(browser, pages[reader], DESKTOP)
    levels = page.evaluate(_HEADINGS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - before <= 1 for before, later in pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate(_WITHOUT_NAME) == 0
    assert page.evaluate(_UNHEADED) == 0
    assert page.evaluate(_TWICE) == []
    page.close()


@pytest.mark.parametrize("reader", READERS)
def test_a_page_prints_without_cutting_tables_off(
    reader: str, browser: Any, pages: dict[str, Path]
) -> None:
    paper = 680  # pixels of A4 between margins of 15 mm
    page, _ = opened(browser, pages[reader], paper)
    page.emulate_media(media="print")
    assert page.evaluate(_WIDER_THAN_THE_WINDOW) <= 0
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
