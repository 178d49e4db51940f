"""The comparison's arithmetic, its files, and which runs it reuses."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from models.errors import RunDirectoryError
from server_app.compare import Job, csv_text, experiment_rows, markdown_text, of_split
from server_app.config import resolve
from server_app.run_directory import RunDirectory, config_document


def _summary(accuracy: float) -> dict[str, Any]:
    values = {"accuracy": accuracy, "entropy": 1 - accuracy}
    return {
        "method": "uefl",
        "distributions": {"D1": values},
        "mean": values,
        "published": {"D1": {"accuracy": 0.951}},
    }


def test_mean_and_sample_standard_deviation_are_over_seeds() -> None:
    rows = experiment_rows("uefl-x", [_summary(0.8), _summary(0.9), _summary(1.0)])
    first = rows[0]
    assert (first.group, first.metric, first.seeds, first.published) == ("D1", "accuracy", 3, 0.951)
    assert first.mean == pytest.approx(0.9)
    assert first.sd == pytest.approx(0.1)
    assert first.cell() == "0.900 ± 0.100"


def test_a_single_seed_shows_no_deviation() -> None:
    assert experiment_rows("uefl-x", [_summary(0.8)])[0].cell() == "0.800"


def test_markdown_and_csv_hold_every_row() -> None:
    rows = experiment_rows("uefl-x", [_summary(0.8), _summary(0.9)])
    lines = markdown_text(rows).splitlines()
    assert lines[2] == "| uefl-x | D1 | 0.850 ± 0.071 | 0.951 | 0.150 ± 0.071 |  |"
    table = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [row["group"] for row in table] == ["D1", "D1", "all", "all"]
    assert table[0]["published"] == "0.951"
    assert float(table[0]["sd"]) == pytest.approx(0.0707107, abs=1e-6)


def test_a_finished_run_is_reused_and_one_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = resolve({"out": str(tmp_path), "run-name": "x-seed0", "seed": 0})
    job = Job("x", settings, 9, [])
    assert not job.finished()
    directory = RunDirectory(tmp_path / "x-seed0")
    directory.path.mkdir()
    (directory.path / "config.toml").write_text(config_document(settings, {}))
    directory.write_json("silos.json", dict.fromkeys("abcdefghi"))
    assert not job.finished()
    directory.write_json("summary.json", {})
    assert job.finished()
    other = resolve({"out": str(tmp_path), "run-name": "x-seed0", "seed": 0, "rounds": 31})
    with pytest.raises(RunDirectoryError, match="rounds is 30 there and 31 here"):
        Job("x", other, 9, []).finished()
    with pytest.raises(RunDirectoryError, match="9 sites took part there and 3"):
        Job("x", settings, 3, []).finished()


def test_choices_between_settings_see_validation_figures_only() -> None:
    validation = _summary(0.3)
    summary = _summary(0.8) | {
        "validation": {key: validation[key] for key in ("mean", "distributions")}
    }
    rows = experiment_rows("uefl-x", [of_split(summary, "val")])
    assert [row.mean for row in rows if row.metric == "accuracy"] == [0.3, 0.3]
    assert all(row.published is None for row in rows)
    assert of_split(summary, "test") == summary
    assert "val accuracy" in markdown_text(rows, "val").splitlines()[0]
