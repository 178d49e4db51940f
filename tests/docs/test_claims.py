"""Every claim has a verdict, and every figure beside it stands in a file that its section names."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.core.arguments import RunSources
from fedsilo.engines.planning import planned_settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "claims.md").read_text(encoding="utf-8")
VERDICTS = ("holds", "does not hold", "not tested")
METHODS = ("UEFL", "FedEvPrompt", "Fed-Align-CL", "FedEFM", "PICSR")

COLUMNS = ("mean", "median", "low", "high")
_NUMBER = r"[-+]?\d*\.\d+"
_DEVIATION = re.compile(rf"({_NUMBER}) ± ({_NUMBER})")
_INTERVAL = re.compile(rf"({_NUMBER}) \[({_NUMBER}), ({_NUMBER})\]")
_RANGE = re.compile(rf"({_NUMBER}) \(({_NUMBER}) to ({_NUMBER})\)")
_FORMS = (
    (_DEVIATION, ("mean", "sd")),
    (_INTERVAL, ("mean", "low", "high")),
    (_RANGE, ("median", "min", "max")),
)


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _rows(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def _records(section: str) -> Iterator[dict[str, str]]:
    for name in re.findall(r"\((results/[\w-]+\.csv)\)", section):
        with (DOCS / name).open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)


def _told(record: dict[str, str], columns: tuple[str, ...], texts: tuple[str, ...]) -> bool:
    """Tell whether a record has the figures, as they stand or in percent."""
    if any(not record.get(column) for column in columns):
        return False
    found = [float(record[column]) for column in columns]
    digits = [len(text.partition(".")[2]) for text in texts]
    return any(
        all(
            abs(scale * value - float(text)) <= 0.5001 * 10**-places
            for value, text, places in zip(found, texts, digits, strict=True)
        )
        for scale in (1, 100)
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_claim_has_a_verdict(method: str) -> None:
    rows = _rows(_sections()[method])
    assert len(rows) >= 5
    for claim, _, verdict, _ in rows:
        assert verdict.startswith(VERDICTS), claim


@pytest.mark.parametrize("method", METHODS)
def test_every_figure_with_its_spread_is_in_a_committed_file(method: str) -> None:
    section = _sections()[method]
    records, looked_up = list(_records(section)), 0
    for _, _, _, figures in _rows(section):
        for form, columns in _FORMS:
            for texts in form.findall(figures):
                looked_up += 1
                assert any(_told(record, columns, texts) for record in records), texts
    assert looked_up >= 5


README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
CARRIED = _rows(_sections()["README's table of methods"])


@pytest.mark.parametrize(("method", "figures", "file"), [(m, f, c) for m, f, _, c in CARRIED])
def test_a_figure_of_the_readme_is_in_the_file_that_carries_it(
    method: str, figures: str, file: str
) -> None:
    (row,) = (line for line in README.splitlines() if line.startswith(f"| [{method}]"))
    records = list(_records(file))
    numbers = re.findall(_NUMBER, figures)
    assert numbers
    assert records
    for number in numbers:
        assert number.lstrip("+") in row
        found = (_told(record, (column,), (number,)) for record in records for column in COLUMNS)
        assert any(found), number


def test_each_method_of_the_readmes_table_has_all_its_figures_carried() -> None:
    table = README.partition("| as published | our variant |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        method = re.match(r"\| \[(`\w+`)\]", line)
        assert method, line
        carried = " ".join(figures for name, figures, _, _ in CARRIED if name == method[1])
        for number in re.findall(r"(?<![\w.])\d*\.\d+", re.sub(r"\]\([^)]*\)", "", line)):
            assert number in carried, f"{method[1]}: {number}"


def test_each_command_behind_the_readme_names_experiments_that_there_are() -> None:
    for method, _, command, _ in CARRIED:
        if command == "the same":
            continue
        words = command.strip("`").split()
        assert words[:2] in (["fedsilo", "compare"], ["fedsilo", "crossvalidate"]), method
        names = words[2 : _first_option(words)]
        changes = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        assert names
        for name in names:
            planned_settings(name, RunSources(changes=tuple(changes)))


def _first_option(words: list[str]) -> int:
    return next(place for place, word in enumerate(words) if word.startswith("--"))


def test_the_readmes_table_of_methods_leads_here() -> None:
    assert "docs/claims.md" in (DOCS.parent / "README.md").read_text(encoding="utf-8")
