"""The measured tables of pages outside docs/results are the committed files, cell by cell."""

import csv
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "file"),
    [("operations.md", "resources.csv"), ("deployment-reference.md", "container-steps.csv")],
)
def test_a_measured_table_is_its_file(page: str, file: str) -> None:
    """A page's table may have more columns, in words, after those of the file."""
    with (DOCS / "results" / file).open(encoding="utf-8", newline="") as opened:
        header, *measured = csv.reader(opened)
    shown = _rows((DOCS / page).read_text(encoding="utf-8"), header[0])
    assert [row[: len(header)] for row in shown] == measured
    assert len(shown) >= 6


def _rows(text: str, first: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this title."""
    (begin,) = (at for at in range(len(text)) if text.startswith(f"\n| {first} |", at))
    block = text[begin + 1 :].split("\n\n", 1)[0]
    _, _, *lines = block.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
