"""The comparison's arithmetic, its files, and which runs it reuses."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from datasets.registry import load_silo
from models.errors import RunDirectoryError
from server_app.cli import main
from server_app.compare import (
    HEADER,
    Job,
    comparison_table,
    constant_rows,
    csv_text,
    experiment_rows,
    markdown_text,
    of_split,
)
from server_app.config import resolve
from server_app.run_directory import RunDirectory, config_document

METRICS = ("accuracy", "entropy")
SILOS = [f"s{distribution}{letter}" for distribution in "123" for letter in "abc"]


def _summary(accuracy: float) -> dict[str, Any]:
    values = {"accuracy": accuracy, "entropy": 1 - accuracy}
    return {
        "method": "uefl",
        "distributions": {"D1": values},
        "mean": values,
        "published": {"D1": {"accuracy": 0.951}},
    }


def test_mean_and_sample_standard_deviation_are_over_seeds() -> None:
    rows = experiment_rows("uefl-x", [_summary(0.8), _summary(0.9), _summary(1.0)], METRICS)
    first = rows[0]
    assert (first.group, first.metric, first.seeds, first.published) == ("D1", "accuracy", 3, 0.951)
    assert first.mean == pytest.approx(0.9)
    assert first.sd == pytest.approx(0.1)
    assert first.cell() == "0.900 ± 0.100"


def test_a_single_seed_shows_no_deviation() -> None:
    assert experiment_rows("uefl-x", [_summary(0.8)], METRICS)[0].cell() == "0.800"


def test_markdown_and_csv_hold_every_row() -> None:
    rows = experiment_rows("uefl-x", [_summary(0.8), _summary(0.9)], METRICS)
    lines = markdown_text(rows).splitlines()
    assert lines[2] == "| uefl-x | D1 | 0.850 ± 0.071 | 0.951 | 0.150 ± 0.071 |"
    table = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert list(table[0]) == list(HEADER)
    assert list(HEADER[-3:]) == ["seeds", "published", "published sd"]
    assert [row["group"] for row in table] == ["D1", "D1", "all", "all"]
    assert (table[0]["published"], table[0]["published sd"]) == ("0.951", "")
    assert float(table[0]["sd"]) == pytest.approx(0.0707107, abs=1e-6)


def test_a_finished_run_is_reused_and_one_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = resolve({"out": str(tmp_path), "run-name": "x-seed0", "seed": 0})
    job = Job("x", settings, 9, [])
    assert not job.finished()
    directory = RunDirectory(tmp_path / "x-seed0")
    directory.path.mkdir()
    (directory.path / "config.toml").write_text(config_document(settings, {}))
    fingerprints = {name: load_silo(name, settings.common).fingerprints for name in SILOS}
    silos = {name: {"fingerprints": found} for name, found in fingerprints.items()}
    directory.write_json("silos.json", silos)
    assert not job.finished()
    directory.write_json("summary.json", {})
    assert job.finished()
    other = resolve({"out": str(tmp_path), "run-name": "x-seed0", "seed": 0, "rounds": 31})
    with pytest.raises(RunDirectoryError, match="rounds is 30 there and 31 here"):
        Job("x", other, 9, []).finished()
    with pytest.raises(RunDirectoryError, match="9 sites took part there and 3"):
        Job("x", settings, 3, []).finished()
    for name in ("s1b", "s3c"):
        silos[name] = {"fingerprints": fingerprints[name] | {"train": "ab"}}
    directory.write_json("silos.json", silos)
    with pytest.raises(RunDirectoryError, match="the data of s1b, s3c are others there; choose"):
        job.finished()


def test_choices_between_settings_see_validation_figures_only() -> None:
    validation = _summary(0.3)
    summary = _summary(0.8) | {
        "validation": {key: validation[key] for key in ("mean", "distributions")}
    }
    rows = experiment_rows("uefl-x", [of_split(summary, "val")], METRICS)
    assert [row.mean for row in rows if row.metric == "accuracy"] == [0.3, 0.3]
    assert all(row.published is None for row in rows)
    assert of_split(summary, "test") == summary
    assert "val accuracy" in markdown_text(rows, "val").splitlines()[0]


def test_the_papers_deviation_stands_beside_its_figure() -> None:
    summary = _summary(0.8) | {
        "published": {"D1": {"accuracy": 0.9, "accuracy-sd": 0.05}, "all": {"accuracy": 0.85}}
    }
    rows = experiment_rows("x", [summary], METRICS)
    assert [row.published_cell() for row in rows] == ["0.900 ± 0.050", "", "0.850", ""]
    title, _, first, every = markdown_text(rows).splitlines()
    assert title == "| experiment | group | test accuracy | published | test entropy |"
    assert first == "| x | D1 | 0.800 | 0.900 ± 0.050 | 0.200 |"
    assert every == "| x | all | 0.800 | 0.850 | 0.200 |"
    table = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [row["published sd"] for row in table] == ["0.05", "", "", ""]


def test_a_metric_that_is_undefined_for_a_group_has_no_row_and_an_empty_cell() -> None:
    def summary(auc: float) -> dict[str, Any]:
        return {
            "method": "local",
            "distributions": {"a": {"accuracy": 0.5, "auc": auc}, "b": {"accuracy": 1.0}},
            "mean": {"accuracy": 0.75, "auc": auc},
            "published": None,
        }

    rows = experiment_rows("x", [summary(0.6), summary(0.8)], ("accuracy", "auc"))
    found = {(row.group, row.metric): row.mean for row in rows}
    assert ("b", "auc") not in found
    assert found["a", "auc"] == found["all", "auc"] == pytest.approx(0.7)
    assert "| x | b | 1.000 ± 0.000 |  |" in markdown_text(rows).splitlines()
    columns = comparison_table(rows).columns
    assert [column.header for column in columns] == [
        "experiment",
        "group",
        "test accuracy",
        "test auc",
    ]
    assert list(columns[3].cells) == ["0.700 ± 0.141", "", "0.700 ± 0.141"]


def test_a_metric_that_only_some_seeds_have_is_over_those() -> None:
    whole = {"accuracy": 0.5, "auc": 0.6}
    summaries = [
        {"method": "local", "distributions": {"a": values}, "mean": values, "published": None}
        for values in (whole, {"accuracy": 0.7})
    ]
    rows = experiment_rows("x", summaries, ("accuracy", "auc"))
    assert [(row.metric, row.seeds) for row in rows if row.group == "a"] == [
        ("accuracy", 2),
        ("auc", 1),
    ]


def _silo(name: str, test: list[int], val: list[int]) -> dict[str, Any]:
    return {"distribution": name, "label_counts": {"train": [5, 5], "val": val, "test": test}}


def test_answering_the_second_class_every_time_scores_its_share() -> None:
    silos = {"one": _silo("one", [6, 2], [1, 1]), "two": _silo("two", [0, 4], [0, 0])}
    rows = constant_rows(silos, "test")
    assert {(row.group, row.metric): row.mean for row in rows} == {
        ("one", "accuracy"): 0.25,
        ("one", "balanced-accuracy"): 0.5,
        ("one", "auc"): 0.5,
        ("two", "accuracy"): 1.0,  # of one class nothing else is defined
        ("all", "accuracy"): 0.625,
        ("all", "balanced-accuracy"): 0.5,  # over the sites that have it
        ("all", "auc"): 0.5,
    }
    assert {row.experiment for row in rows} == {"always positive (class 1)"}
    assert {(row.seeds, row.published) for row in rows} == {(1, None)}
    validation = constant_rows(silos, "val")
    assert {row.group for row in validation} == {"one", "all"}, "site two has no validation rows"


def test_sites_of_one_distribution_are_one_group_of_the_constant_answer() -> None:
    silos = {"x": _silo("D", [3, 1], [0, 0]), "y": _silo("D", [1, 3], [0, 0])}
    means = {row.group: row.mean for row in constant_rows(silos, "test")}
    assert means == {"D": 0.5, "all": 0.5}


def test_three_classes_have_no_second_one_to_answer() -> None:
    silos = {"one": {"distribution": "one", "label_counts": {"test": [1, 2, 3]}}}
    assert constant_rows(silos, "test") == []
    assert constant_rows({"one": _silo("one", [1, 2], [0, 0])}, "val") == []


def test_a_site_of_the_first_class_alone_is_never_answered_right() -> None:
    rows = constant_rows({"one": _silo("one", [4, 0], [0, 0])}, "test")
    assert {(row.group, row.metric): row.mean for row in rows} == {
        ("one", "accuracy"): 0.0,
        ("all", "accuracy"): 0.0,
    }


def _table(folder: Path, **labels: str) -> list[str]:
    """Write a data set of tables and the command that compares by it."""
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    for site, found in labels.items():
        rows = [f"{40 + index},{label}" for index, label in enumerate(found)]
        (tables / f"{site}.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
    files = "".join(f"  {site}: {site}.csv\n" for site in labels)
    (tables / "schema.yaml").write_text(
        "columns:\n  - {name: age}\nlabel: {column: sick, classes: {'no': [0], 'yes': [1]}}\n"
        f"sites:\n{files}"
    )
    (folder / "simulation.yaml").write_text(
        "experiments:\n  own:\n    config: {method: local, dataset: table, rounds: 1, "
        f"local-steps: 1, dropout: 0.0, mc-passes: 0, device: cpu, data-dir: {tables}}}\n"
    )
    arguments = ["compare", "own", "--file", str(folder / "simulation.yaml"), "--seeds", "1"]
    return [*arguments, "--out", str(folder / "out"), "--csv", str(folder / "t.csv")]


def test_a_run_on_tables_that_were_changed_since_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main(command) == 0
    assert "1 runs, " in capsys.readouterr().out
    before = (tmp_path / "t.csv").read_bytes()
    assert main(command) == 0
    assert "runs, " not in capsys.readouterr().out
    _table(tmp_path, one="01" * 12, two="001" * 8)
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "own-seed0 holds a run with other settings: the data of two are others there" in error
    assert error.count("\n") == 1
    assert (tmp_path / "t.csv").read_bytes() == before


def test_a_finished_run_whose_data_have_gone_from_their_folder_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main(command) == 0
    (tmp_path / "tables" / "one.csv").unlink()
    capsys.readouterr()
    assert main(command) == 1
    assert "the data cannot be read now" in capsys.readouterr().err


def test_another_schema_over_the_same_rows_is_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _table(tmp_path, one="01" * 12, two="011" * 8)
    assert main(command) == 0
    schema = tmp_path / "tables" / "schema.yaml"
    schema.write_text(schema.read_text() + "\npolicy: impute\n")
    assert main(command) == 1
    assert "the data of one, two are others there" in capsys.readouterr().err


def test_a_comparison_by_validation_figures_that_no_site_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*_table(tmp_path, one="01" * 20, two="011" * 14), "--split", "val"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "no site has val samples to compare by: set 'val-folds', or use 'fedsilo tune'" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t.csv").exists()
    assert main([*command, "--set", "val-folds=2", "--out", str(tmp_path / "folds")]) == 0
    with (tmp_path / "t.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert {row["group"] for row in rows} == {"one", "two", "all"}
    assert {row["published"] for row in rows} == {""}
