"""Means, tables and curves by hand."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.tasks.task import task_of
from fedsilo.pictures.learning_curves import draw_curves, series
from fedsilo.server_app.records.recorder import METRICS_HEADER, GrowingCsv
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.records.summary import (
    MANY,
    NO_PRIVACY,
    by_distribution,
    join_names,
    means,
    privacy_document,
    result_table,
    worst,
)
from tests.support.run_files import SILO, SUMMARY

TASK = task_of(CommonSettings())

NAMES = [f"s{number:02}" for number in range(30)]
VALUES = {
    "s1a": {"accuracy": 0.8, "entropy": 0.2},
    "s1b": {"accuracy": 0.6, "entropy": 0.4},
    "s2a": {"accuracy": 0.1, "entropy": 0.9, "extra": 1.0},
}
OF = {"s1a": "D1", "s1b": "D1", "s2a": "D2"}


def _printed(table: Table) -> list[str]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


def _cells_of(lines: list[str], first: str) -> list[str]:
    row = next(line for line in lines if line.startswith(f"│ {first} "))
    return [cell.strip() for cell in row.split("│")[1:-1]]


def test_a_mean_is_over_the_sites_that_have_the_metric() -> None:
    assert means(VALUES) == pytest.approx({"accuracy": 0.5, "entropy": 0.5, "extra": 1.0})
    more = VALUES | {"s1a": {"extra": 0.5}}
    assert means(more) == pytest.approx({"accuracy": 0.35, "entropy": 0.65, "extra": 0.75})


def test_a_distributions_mean_is_over_its_own_sites() -> None:
    groups = by_distribution(VALUES, OF)
    assert groups["D1"] == pytest.approx({"accuracy": 0.7, "entropy": 0.3})
    assert groups["D2"] == {"accuracy": 0.1, "entropy": 0.9, "extra": 1.0}


def test_the_table_shows_every_site_and_each_distribution() -> None:
    lines = _printed(result_table(VALUES, OF, "title", ("accuracy", "entropy")))
    assert _cells_of(lines, "D1") == ["D1", "0.700", "0.300"]
    assert _cells_of(lines, "D2") == ["D2", "0.100", "0.900"]
    assert sum(line.startswith("│ s") for line in lines) == 3


def test_the_table_shows_the_metrics_asked_for_in_that_order_and_none_that_nobody_has() -> None:
    lines = _printed(result_table(VALUES, OF, "title", ("extra", "auc", "accuracy")))
    header = next(line for line in lines if "site" in line)
    assert [cell.strip() for cell in header.split("┃")[1:-1]] == [
        "site",
        "test extra",
        "test accuracy",
    ]
    assert _cells_of(lines, "s1a (D1)") == ["s1a (D1)", "n/a", "0.800"]
    assert _cells_of(lines, "all") == ["all", "1.000", "0.500"]


def test_a_site_that_is_a_distribution_of_its_own_has_one_row() -> None:
    own = {site: site for site in VALUES}
    lines = _printed(result_table(VALUES, own, "title", ("accuracy",)))
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == [
        *("s1a", "s1b", "s2a", "all"),
    ]


def test_privacy_says_what_leaves_and_promises_nothing() -> None:
    document = privacy_document("uefl", "server", TASK, ["weights"], {"up": 5, "down": 7})
    assert document["guarantee"] == NO_PRIVACY == "no differential-privacy guarantee"
    assert document["bytes up"] == 5
    told = " ".join(document["leaves each site"])
    assert "weights" in told
    assert "label counts" in told, "the hello tells them, whatever the method"
    assert "measurements" in told


def test_a_curve_is_the_mean_over_a_distributions_sites_by_round() -> None:
    rows = [
        {"round": "1", "site": site, "split": "test", "metric": "accuracy", "value": value}
        for site, value in (("s1a", "0.2"), ("s1b", "0.4"), ("s2a", "0.9"))
    ]
    other = [
        {"round": "1", "site": "s1a", "split": "val", "metric": "accuracy", "value": "1"},
        {"round": "1", "site": "s1a", "split": "test", "metric": "loss", "value": "1"},
    ]
    found = series([*rows, *other], "accuracy", OF)
    assert found["D1"] == pytest.approx({1: 0.3})
    assert found["D2"] == {1: 0.9}


def test_of_many_sites_the_table_shows_quantiles_and_the_five_worst() -> None:
    values = {f"s{place:03}": {"accuracy": place / 100, "loss": 1.0} for place in range(101)}
    for groups in (dict.fromkeys(values, "all of them"), {site: site for site in values}):
        lines = _printed(result_table(values, groups, "title", ("accuracy", "loss")))
        assert _cells_of(lines, "5% of 101 sites below")[1:] == ["0.050", "1.000"]
        assert _cells_of(lines, "50% of 101 sites below")[1:] == ["0.500", "1.000"]
        assert _cells_of(lines, "all")[1:] == ["0.500", "1.000"]
        assert sum(line.startswith("│ s0") for line in lines) == 5


_UEFL = ("accuracy", "entropy", "perplexity", "codebook-loss", "loss")


@pytest.mark.parametrize(
    ("metrics", "across", "down"),
    [
        (("accuracy", "entropy"), 2, 1),
        ((*_UEFL[:4], "codeword-distance"), 4, 1),
        (_UEFL, 3, 2),
    ],
)
def test_the_picture_has_a_panel_per_metric_that_was_measured(
    tmp_path: Path, metrics: tuple[str, ...], across: int, down: int
) -> None:
    directory = RunDirectory(tmp_path)
    summary = SUMMARY | {"title": "UEFL", "marks": {"1": "new codewords"}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "silos.json").write_text(json.dumps({"s1a": SILO}))
    rows = [[r, "s1a", "test", m, 0.5] for r in (0, 1, 2) for m in metrics]
    GrowingCsv(tmp_path / "metrics.csv", METRICS_HEADER).write(rows)
    draw_curves(directory)
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    # 120 dpi, 4.2 inches a panel beside the legend's 1.2, 3.2 inches below the title's 0.4
    assert int.from_bytes(picture[16:20], "big") == pytest.approx(120 * (4.2 * across + 1.2), abs=1)
    assert int.from_bytes(picture[20:24], "big") == pytest.approx(120 * (3.2 * down + 0.4), abs=1)


def test_few_names_are_listed_and_of_many_the_first() -> None:
    assert join_names(NAMES[:2]) == "s00, s01"
    assert join_names(NAMES[:MANY]).count(",") == MANY - 1
    assert join_names(NAMES) == "s00, s01, s02, s03, s04 and 25 more"


def test_the_worst_are_the_lowest_or_the_highest() -> None:
    values = {name: float(place) for place, name in enumerate(NAMES)}
    assert worst(values) == NAMES[:5]
    assert worst(values, high_is_worse=True) == NAMES[:-6:-1]
    assert worst({"b": 1.0, "a": 1.0}) == ["a", "b"]
