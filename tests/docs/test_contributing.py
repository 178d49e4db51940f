"""The code that CONTRIBUTING shows is the repository's own: a block stands in a file named."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = 136
_PART = re.compile(r"^```(?:python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|yaml))`")


def _blocks(page: str) -> list[tuple[set[str], list[str]]]:
    """Return each block's possible files, those that its section names, and its pieces.

    A line ``...`` stands for lines that are left out.
    """
    found = []
    for block in _PART.finditer(page):
        before = page[: block.start()].rpartition("\n**")[2]
        pieces = re.split(r"^\.\.\.\n", block[1], flags=re.MULTILINE)
        found.append((set(_PATH.findall(before)), pieces))
    return found


def _missing(page: str) -> list[str]:
    """Return the pieces of code that stand, in their order, in none of the files named."""
    missing = []
    for paths, pieces in _blocks(page):
        rests = [(ROOT / path).read_text() for path in sorted(paths) if (ROOT / path).exists()]
        for piece in pieces:
            rests = [rest.partition(piece)[2] for rest in rests if piece in rest]
            if not rests:
                missing.append(piece)
                break
    return missing


def test_every_block_of_code_stands_in_a_file_that_its_section_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(_blocks(page)) == 5
    assert _missing(page) == []


def test_the_page_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= LINES


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("class FedAvg(Method):\n...\n        updates=True,\n", 0),
        ("class FedAvg(Strategy):\n", 1),
        ("        updates=True,\n...\nclass FedAvg(Method):\n", 1),  # not in this order
    ],
)
def test_code_that_is_no_more_there_is_found_out(block: str, told: int) -> None:
    page = f"\n**1. Here**, `strategies/methods/fedavg.py`:\n\n```python\n{block}```\n"
    assert len(_missing(page)) == told


def test_code_without_a_file_is_found_out() -> None:
    assert _missing("\n**1. Here**:\n\n```python\nimport this\n```\n") == ["import this\n"]
