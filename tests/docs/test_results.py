"""What docs/results/ say in tables and sentences stands in the committed files that they name."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
METHODS = DOCS / "methods" / "README.md"
PAGES = sorted((DOCS / "results").glob("*.md"))

Numbers = npt.NDArray[np.float64]
_NAMED = re.compile(r"([\w-]+\.csv)\b")
_FIGURE = re.compile(r"(?<![\w.·^-])[-+]?\d*\.\d+(?![\w.]*\w)")
_PAIR = re.compile(r"([-+]?\d*\.\d+) ?± ?(\d*\.\d+)")
_WORKED_OUT = re.compile(r"[-+]?[\d.]+ points\b")  # differences of figures beside them
_NOT_MEASURED = ("chosen", "here")  # columns


def _tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield each table's header and rows."""
    for block in page.read_text(encoding="utf-8").strip().split("\n\n"):
        if block.startswith("|"):
            lines = [row.strip("|").split("|") for row in block.split("\n")]
            header, _, *rows = [[cell.strip() for cell in line] for line in lines]
            yield header, rows


def _cells(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the cells of a page's tables, each with its row; what papers printed is left out."""
    for header, rows in _tables(page):
        for row in rows:
            for name, cell in zip(header[1:], row[1:], strict=True):
                if name not in _NOT_MEASURED and "the paper" not in f"{row[0]} {name}":
                    yield cell, " | ".join(row)


def _sentences(page: Path) -> Iterator[str]:
    """Yield a page's sentences outside tables, without code, links and what papers printed."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in text.split("\n\n"):
        if not block.startswith("|"):
            plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", " ".join(block.split()))
            for sentence in re.split(r"(?<=[.!?*]) ", plain):
                if "paper" not in sentence:
                    yield sentence


def _evidence(pages: Iterable[Path]) -> list[pd.DataFrame]:
    """Return the tables of the files that pages name."""
    texts = [page.read_text(encoding="utf-8") for page in pages]
    named = {DOCS / "results" / name for text in texts for name in _NAMED.findall(text)}
    tables = [pd.read_csv(path) for path in sorted(named) if path.is_file()]
    return [part for table in tables for part in (table, *_over_seeds(table))]


def _over_seeds(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield mean and sd over the seeds of a file that lists them one by one."""
    table = table.dropna(axis=1, how="all")
    if "seed" in table:
        figures = [str(name) for name in table.select_dtypes("number") if name != "seed"]
        keys = [name for name in table if name not in (*figures, "seed")]
        groups: Any = table.groupby(keys, dropna=False)
        for name in figures:
            yield groups[name].agg(mean="mean", sd="std", median="median")


def _numbers(tables: Sequence[pd.DataFrame]) -> Numbers:
    """Return every number of ``tables``, as it stands and in percent."""
    parts = [table.select_dtypes("number").to_numpy(float).ravel() for table in tables]
    found = np.concatenate([np.empty(0), *parts])
    return np.concatenate([scale * found[np.isfinite(found)] for scale in (1, -1, 100, -100)])


def _pairs(tables: Sequence[pd.DataFrame]) -> Numbers:
    """Return (2, n) the means and their standard deviations, as they stand and in percent."""
    parts = [t[["mean", "sd"]].to_numpy(float).T for t in tables if {"mean", "sd"} <= set(t)]
    found = np.concatenate([np.empty((2, 0)), *parts], axis=1)
    return np.concatenate([found, 100 * found], axis=1)


def _is_told(figure: str, numbers: Numbers) -> npt.NDArray[np.bool_]:
    """Tell which numbers are the figure to the digits shown."""
    places = len(figure.partition(".")[2])
    told: npt.NDArray[np.bool_] = np.abs(numbers - float(figure)) <= 0.5001 * 10**-places
    return told


def _lost(pages: Iterable[Path], texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the figures in ``texts`` that none of the pages' files has, each with what it is in."""
    tables = _evidence(pages)
    numbers, (means, deviations) = _numbers(tables), _pairs(tables)
    for text, whole in texts:
        for mean, deviation in _PAIR.findall(text):
            if not (_is_told(mean, means) & _is_told(deviation, deviations)).any():
                yield f"{mean} ± {deviation} in: {whole}"
        for figure in _FIGURE.findall(_PAIR.sub("", text)):
            if not _is_told(figure, numbers).any():
                yield f"{figure} in: {whole}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_of_a_table_is_in_a_file_that_its_page_names(page: Path) -> None:
    assert list(_lost([page], _cells(page))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_of_a_sentence_is_in_a_file_that_its_page_names(page: Path) -> None:
    texts = ((_WORKED_OUT.sub("", sentence), sentence) for sentence in _sentences(page))
    assert list(_lost([page], texts)) == []


def test_every_figure_of_the_table_of_methods_is_in_a_file_of_a_page_in_its_row() -> None:
    rows = [row for row in METHODS.read_text(encoding="utf-8").splitlines() if "results/" in row]
    assert len(rows) > 10
    for row in rows:
        pages = {DOCS / found for found in re.findall(r"\(\.\./(results/[\w-]+\.md)\)", row)}
        assert list(_lost(pages, [(row.rpartition(" | ")[2], row)])) == []


def test_every_figure_of_the_readmes_table_is_in_a_file_of_the_page_in_its_row() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| [`")]
    assert len(rows) == 5
    for row in rows:
        (page,) = re.findall(r"\(docs/(results/[\w-]+\.md)(?:#[\w-]+)?\)", row)
        cells = re.sub(r"\([^)]*\)", "", row)
        assert list(_lost([DOCS / page], [(cells, row)])) == []
        assert list(_lost([DOCS / page], [(cells.replace("|", "| 7.654321", 1), row)])) != []


def test_a_figure_that_no_file_has_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    table = "| method | accuracy | the paper |\n|---|---|---|\n| FedAvg | {} | 99.99 |\n"
    measured = "0.613 ± 0.033"  # of docs/results/fedefm.csv, at 100 % unseen
    for cell, found in ((measured, 0), ("61.3 / 0.613", 0), ("0.613 ± 0.042", 1), ("0.9999", 1)):
        page.write_text("[figures](fedefm.csv)\n\n" + table.format(cell), encoding="utf-8")
        assert len(list(_lost([page], _cells(page)))) == found, cell
