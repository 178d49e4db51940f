"""Tests of the tables of TRIPOD+AI and of the GDPR in the reports."""

import dataclasses
import re
from pathlib import Path

import pytest

from fedsilo.reports.processing_record import TO_WRITE, processing_rows
from fedsilo.reports.reporting_guideline import guideline_items, guideline_rows
from fedsilo.runs.finished_run import FinishedRun, Shown


@pytest.fixture
def run(hearts: Path) -> Shown:
    """Return a run at the default floor."""
    found = next(path for path in sorted(hearts.iterdir()) if (path / "summary.json").is_file())
    return FinishedRun.open(found).shown()


def test_every_item_of_the_checklist_is_there_in_its_order(run: Shown) -> None:
    numbers = []
    for item in guideline_items(run):
        for first in re.findall(r"\d+", item.number):
            numbers.append(int(first))
    assert set(numbers) == set(range(1, 28))
    # Some rows hold two items, such as 5a and 6a, so only the first number of a row rises
    firsts = [int(re.match(r"\d+", item.number).group()) for item in guideline_items(run)]  # type: ignore[union-attr]
    assert firsts == sorted(firsts)


def test_an_item_says_what_the_run_knows_or_that_a_person_must_write_it(run: Shown) -> None:
    for item in guideline_items(run):
        assert item.answer or item.missing
        assert not item.place or item.answer


def test_predictors_have_their_titles_and_units(run: Shown) -> None:
    rows = {row[0]: row[2] for row in guideline_rows(run)}
    assert "serum cholesterol (chol, mg/dl)" in rows["9a, 9b"]
    assert "healthy, disease" in rows["8a"]


def test_sizes_that_are_hidden_are_not_summed(run: Shown) -> None:
    site = next(iter(run.silos))
    hidden = {**run.silos, site: {**run.silos[site], "sizes": {"train": None, "test": 5}}}
    changed = dataclasses.replace(run)
    changed.__dict__["silos"] = hidden
    rows = {row[0]: row[2] for row in guideline_rows(changed)}
    assert "hidden" in rows["10"]


def test_the_record_of_processing_has_each_point_once_and_blanks_are_marked(run: Shown) -> None:
    rows = processing_rows(run)
    articles = [row[0] for row in rows]
    assert articles == [f"30(1)({letter})" for letter in "abcdefg"] + [
        f"35(7)({letter})" for letter in "abcd"
    ]
    blanks = [row[0] for row in rows if row[2] == TO_WRITE]
    assert blanks == ["30(1)(a)", "30(1)(b)", "30(1)(e)", "35(7)(b)", "35(7)(c)"]
