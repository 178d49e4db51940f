"""Whole runs of ``cross``: the diagonal is ``local``, and every file carries the matrix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.cli.main import main
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.tiny import VIT

Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
SITES = ["s1a", "s2a", "s3a"]


def metrics(directory: RunDirectory) -> dict[tuple[str, ...], str]:
    return {
        (row["round"], row["site"], row["split"], row["metric"]): row["value"]
        for row in directory.read_csv("metrics.csv")
    }


@pytest.mark.parametrize("changes", [{}, VIT, {"loss": "evidential"}], ids=["conv", "vit", "edl"])
def test_the_diagonal_is_local_to_the_bit(
    changes: dict[str, Value], tiny: Tiny, inline_run: InlineRun
) -> None:
    alone = inline_run(tiny("local", **changes) | {"run.name": "local"})
    crossed = inline_run(tiny("cross", **changes) | {"run.name": "cross"}, draw=True)
    found, local = metrics(crossed), metrics(alone)
    assert {k: v for k, v in found.items() if "-from-" not in k[3]} == local
    foreign = {key for key in found if "-from-" in key[3]}
    assert {key[0] for key in foreign} == {"2"}, "only the final evaluation"
    for site in SITES:
        assert (
            found["2", site, "test", f"accuracy-from-{site}"]
            == (local["2", site, "test", "accuracy"])
        )
    document = crossed.read_json("cross.json")["accuracy"]
    assert document["trained"] == document["tested"] == SITES
    for y, trained in enumerate(SITES):
        for x, tested in enumerate(SITES):
            told = found["2", tested, "test", f"accuracy-from-{trained}"]
            assert document["values"][y][x] == float(told)
    assert (crossed.path / "cross.png").is_file()
    summary = crossed.read_json("summary.json")
    column = [row[1] for row in document["values"]]
    names = [f"accuracy-from-{site}" for site in SITES]
    assert [summary["sites"]["s2a"][name] for name in names] == column
    mean = sum(document["values"][0]) / 3
    assert summary["mean"]["accuracy-from-s1a"] == pytest.approx(mean)


def _hospitals(folder: Path) -> list[str]:
    """Write two sites whose names hold dots and dashes; the truth is age > 50, at 'b.-2' reversed.

    Rows of a site are as many sick as not.
    """
    for site, sick in (("a-from.b", 1), ("b.-2", 0)):
        rows = [f"{age},{sick if age > 50 else 1 - sick}" for age in range(20, 82) if age != 50]
        (folder / f"{site}.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
    (folder / "schema.yaml").write_text(
        "columns:\n  - {name: age}\nlabel: {column: sick, classes: {'no': [0], 'yes': [1]}}\n"
        "sites:\n  a-from.b: a-from.b.csv\n  b.-2: b.-2.csv\n"
    )
    (folder / "simulation.yaml").write_text(
        "experiments:\n  own:\n    config: {method: cross, dataset: table, rounds: 2, "
        "local-steps: 80, learning-rate: 0.1, dropout: 0.0, mc-passes: 0, device: cpu, "
        f"data-dir: {folder}}}\n"
    )
    return ["--file", str(folder / "simulation.yaml"), "--out", str(folder / "out")]


def test_two_sites_of_opposite_truth_do_well_at_home_and_badly_abroad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = _hospitals(tmp_path)
    markdown = tmp_path / "t.md"
    shown = ["--metrics", "auc,auc-from-*", "--markdown", str(markdown)]
    engine = ["--engine", "inline", "--seed", "0", "--name", "own-seed0"]
    assert main(["simulate", "own", *engine, *where]) == 0  # compare runs what is missing slowly
    assert main(["compare", "own", "--seeds", "1", *where, *shown]) == 0
    assert "runs, " not in capsys.readouterr().out
    directory = RunDirectory(tmp_path / "out" / "own-seed0")
    document: dict[str, Any] = json.loads((directory.path / "cross.json").read_text())
    assert list(document) == ["accuracy", "balanced-accuracy", "auc", "average-precision"]
    assert document["auc"]["trained"] == ["a-from.b", "b.-2"]
    assert document["auc"]["values"] == [[1.0, 0.0], [0.0, 1.0]]
    (home, abroad), (back, own) = document["accuracy"]["values"]
    assert min(home, own) > 0.8
    assert max(abroad, back) < 0.2
    title, _, *lines = markdown.read_text().splitlines()
    assert title == (
        "| experiment | group | test auc | test auc-from-a-from.b | test auc-from-b.-2 |"
    )
    assert lines[:3] == [
        "| own | a-from.b | 1.000 | 1.000 | 0.000 |",
        "| own | b.-2 | 1.000 | 0.000 | 1.000 |",
        "| own | all | 1.000 | 0.500 | 0.500 |",
    ]
