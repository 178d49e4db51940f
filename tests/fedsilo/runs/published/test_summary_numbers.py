"""What a run shows of the papers: their numbers, by its settings and sites; and its pictures."""

import io
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from fedsilo.core.errors import RunDirectoryError
from fedsilo.pictures.learning_curves import draw_documents
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.published.published_numbers import Published, Row, _merge_rows
from fedsilo.runs.published.table import print_published
from fedsilo.server_app.config.settings import RUN_FORMAT, group_settings, resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.run_files import silo

HOSPITALS = ("cleveland", "hungary", "switzerland", "va")


def _run(folder: Path, *sites: str, **changes: Any) -> RunDirectory:
    settings = resolve({"method": "picsr", "dataset": "heart"} | changes).as_mapping()
    content = {"format": RUN_FORMAT, **group_settings(settings)}
    (folder / "config.toml").write_text(tomli_w.dumps(content))
    directory = RunDirectory(folder)
    silos = {site: silo(label_counts={"train": [3, 1]}, classes=[]) for site in sites}
    directory.write_json("silos.json", silos)
    return directory


def test_a_run_in_the_papers_setting_has_its_numbers(tmp_path: Path) -> None:
    found = FinishedRun(_run(tmp_path, *HOSPITALS).path).paper
    assert found.numbers["va"] == {"accuracy": 0.8267, "accuracy-sd": 0.0166}
    assert not found.unlike


def test_a_run_in_another_setting_says_what_differs(tmp_path: Path) -> None:
    found = FinishedRun(_run(tmp_path, *HOSPITALS[:3]).path).paper
    assert found == Published({}, "the sites are without va")


def test_a_run_on_other_data_has_neither_numbers_nor_a_reason(tmp_path: Path) -> None:
    run = _run(tmp_path, *HOSPITALS, dataset="heart-synthetic")
    assert FinishedRun(run.path).paper == Published()


def test_a_later_table_adds_numbers_if_the_accuracies_that_both_print_are_equal() -> None:
    def row(parts: tuple[str, ...], *lines: tuple[float, float | None]) -> Row:
        metrics = ("accuracy", "auc")
        return Row(1, "m", "d", {}, {}, metrics, parts, lines, {}, None)

    first = row(("va",), (0.8, None))
    more = row(("va", "all"), (0.8, 0.9), (0.7, 0.6))
    other = row(("va",), (0.5, 0.6))
    assert _merge_rows([first, other]) == {"va": {"accuracy": 0.8}}
    assert _merge_rows([first, more]) == {"va": {"accuracy": 0.8, "auc": 0.9}}


def _printed(published: Published) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    print_published(MEASURED, published, ("accuracy", "auc"), console)
    return console.export_text()


# One site of its own, a distribution of two sites, and all sites
MEASURED = {
    "sites": {"va": {"accuracy": 0.7, "auc": 0.75}, "a": {"accuracy": 0.5}, "b": {"accuracy": 0.6}},
    "distributions": {"D1": {"accuracy": 0.55}},
    "mean": {"accuracy": 0.6, "auc": 0.75},
}


def test_the_papers_numbers_are_printed_next_to_those_of_the_run() -> None:
    numbers = {"va": {"accuracy": 0.8267}, "D1": {"accuracy": 0.951}, "gone": {"accuracy": 0.9}}
    printed = _printed(Published({**numbers, "all": {"accuracy": 0.815}}))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    assert rows == [["va", "0.700", "0.827"], ["D1", "0.550", "0.951"], ["all", "0.600", "0.815"]]
    assert "auc" not in printed, "the paper printed none"


def test_the_reason_for_no_numbers_is_printed_and_nothing_on_data_of_no_paper() -> None:
    assert "another setting: the sites are without va" in _printed(
        Published({}, "the sites are without va")
    )
    assert _printed(Published()) == ""


def test_documents_are_drawn_by_their_file_names(tmp_path: Path) -> None:
    directory = _run(tmp_path, "a", "b")
    matrix = {"trained": ["a", "b"], "tested": ["a", "b"], "values": [[0.5, None], [0.25, 1.0]]}
    directory.write_json("cross.json", {"accuracy": matrix})
    directory.write_json("of-no-picture.json", {})
    drawn = draw_documents(directory)
    stems = ("distribution", "cross")
    assert [path.name for path in drawn] == [f"{a}.{b}" for a in stems for b in ("png", "pdf")]
    assert {path.read_bytes()[:4] for path in drawn} == {b"\x89PNG", b"%PDF"}


def test_document_of_another_form_is_named(tmp_path: Path) -> None:
    directory = _run(tmp_path, "a", "b")
    directory.write_json("cross.json", {"accuracy": {}})
    with pytest.raises(RunDirectoryError, match=r"cross\.json"):
        draw_documents(directory)
