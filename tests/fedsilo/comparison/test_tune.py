"""The choice of settings: the grid's points, the ranking by hand, and a real small search."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.main import main
from fedsilo.comparison.trials import FAILED
from fedsilo.comparison.tune import (
    Plan,
    Tuning,
    _as_gains,
    chosen_document,
    deciding_metric,
    ranking,
)
from fedsilo.core.errors import SettingError
from fedsilo.engines.experiments import find_experiment, read_section
from fedsilo.server_app.config.settings import resolve

Simulation = Callable[[str], Path]


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    """Return a writer of a simulation file."""

    def write(text: str) -> Path:
        path = tmp_path / "simulation.yaml"
        path.write_text(text)
        return path

    return write


def _plan(budget: Tuning, *seeds: int) -> Plan:
    return Plan("x", resolve({}), {"seed": seeds}, budget)


def _validation(loss: float, **accuracies: float) -> dict[str, Any]:
    mean = {"accuracy": sum(accuracies.values()) / len(accuracies), "loss": loss}
    sites = {site: {"accuracy": accuracy} for site, accuracy in accuracies.items()}
    return {"validation": {"mean": mean, "distributions": sites}, "digest": f"{loss}{accuracies}"}


def _sites(summary: dict[str, Any]) -> list[dict[str, float]]:
    return list(summary["validation"]["distributions"].values())


def test_points_are_ranked_by_mean_score_over_sites_and_equals_by_loss() -> None:
    points = [{"seed": seed} for seed in (1, 2, 3)]
    found = [
        [_validation(0.5, a=0.6, b=0.8), _validation(0.5, a=0.7, b=0.9)],  # 0.7, 0.8
        [_validation(0.4, a=0.8, b=0.8), _validation(0.3, a=0.7, b=0.7)],  # 0.8, 0.7
        [_validation(0.1, a=0.5, b=0.5), _validation(0.1, a=0.6, b=0.6)],  # 0.5, 0.6
    ]
    ranked = ranking(points, found, "accuracy")
    assert [point.settings["seed"] for point in ranked] == [2, 1, 3]
    best = ranked[0]
    assert best.score == pytest.approx(0.75)
    assert best.loss == pytest.approx(0.35)
    assert best.error == pytest.approx(0.05)  # sd 0.0707 over the root of two runs
    assert best.sites == pytest.approx({"a": 0.75, "b": 0.75})
    assert ranked[1].sites == pytest.approx({"a": 0.65, "b": 0.85})


def test_a_metric_that_a_fold_leaves_undefined_decides_nothing() -> None:
    found = [[_validation(0.5, a=0.9, b=0.7)], [_validation(0.5, a=0.8, b=0.6)]]
    first = found[0][0]["validation"]
    first["mean"]["auc"] = first["distributions"]["a"]["auc"] = 0.5  # b has one class there
    assert deciding_metric(("auc", "accuracy"), found) == "accuracy"
    assert deciding_metric(("auc",), found[:1]) == "auc"
    assert deciding_metric(("auc",), found) == "accuracy"
    (point,) = ranking([{"seed": 1}], found[:1], "auc")
    assert (point.score, point.sites) == (0.5, {"a": 0.5})


def test_a_single_run_has_no_error() -> None:
    (point,) = ranking([{"seed": 1}], [[_validation(0.5, a=0.6)]], "accuracy")
    assert (point.score, point.error) == (0.6, 0.0)


def test_another_metric_ranks_otherwise() -> None:
    found = [[_validation(0.5, a=0.9)], [_validation(0.5, a=0.8)]]
    for (summary,), balanced in zip(found, (0.5, 0.7), strict=True):
        for metrics in (summary["validation"]["mean"], *_sites(summary)):
            metrics["balanced-accuracy"] = balanced
    points = [{"seed": 1}, {"seed": 2}]
    assert ranking(points, found, "accuracy")[0].settings == {"seed": 1}
    best = ranking(points, found, "balanced-accuracy")[0]
    assert (best.settings, best.score, best.sites) == ({"seed": 2}, 0.7, {"a": 0.7})


def test_of_errors_the_least_is_the_best_for_the_ranking_and_for_a_sampler() -> None:
    points = [{"seed": seed} for seed in (1, 2, 3)]
    found: list[list[dict[str, Any]]] = []
    for error in (5.0, 3.0):
        measured = {"mae": error, "loss": error}
        validation = {"mean": measured, "distributions": {"a": measured}}
        found.append([{"validation": validation, "digest": f"{error}"}])
    found.append([{FAILED: "diverged"}])
    ranked = ranking(points, found, "mae")
    assert [point.settings["seed"] for point in ranked] == [2, 1, 3]
    assert _as_gains(ranked, "mae") == [-3.0, -5.0, -5.0]


def test_a_failed_run_puts_its_point_last_and_is_told() -> None:
    failing = [_validation(0.1, a=0.9), {"failed": "site a diverged"}]
    points, found = [{"seed": 1}, {"seed": 2}], [failing, [_validation(0.5, a=0.1)] * 2]
    ranked = ranking(points, found, "accuracy")
    assert [(p.settings["seed"], p.score, p.failed) for p in ranked] == [
        (2, pytest.approx(0.1), ""),
        (1, 0.0, "site a diverged"),
    ]
    assert deciding_metric(("accuracy",), found) == "accuracy"
    document = chosen_document(_plan(Tuning(trials=2), 1, 2), ranked, "accuracy")
    assert document["warnings"][-1] == "point {'seed': 1} failed: site a diverged"
    assert "the next one" not in document["why"]


def test_what_is_chosen_is_written_with_why_and_what_else_was_tried() -> None:
    found = [[_validation(0.5, a=0.6)], [_validation(0.5, a=0.8)]]
    ranked = ranking([{"seed": 1}, {"seed": 2}], found, "accuracy")
    budget = Tuning(trials=2, folds=3, seeds=1)
    document = chosen_document(_plan(budget, 1, 2), ranked, "accuracy")
    assert (document["experiment"], document["chosen"]) == ("x", {"seed": 2})
    assert document["budget"] == {"trials": 2, "folds": 3, "seeds": 1}
    assert document["grid"] == {"seed": [1, 2]}
    assert [point["settings"] for point in document["ranking"]] == [{"seed": 2}, {"seed": 1}]
    assert document["metric"] == "accuracy"
    assert "best mean validation accuracy over sites, 0.8000" in document["why"]
    assert "2 points on 3 folds, 1 seed; no test metric was used" in document["why"]
    assert "the next one has 0.6000" in document["why"]
    alone = chosen_document(_plan(Tuning(trials=1), 1), ranked[1:], "accuracy")
    assert "next" not in alone["why"]
    assert json.loads(json.dumps(document)) == document


def test_the_budget_is_read_or_has_its_defaults(simulation: Simulation) -> None:
    assert read_section(simulation("tuning: {trials: 2, seeds: 1}"), "tuning", Tuning) == Tuning(
        2, 5, 1
    )
    assert read_section(simulation("experiments: {}"), "tuning", Tuning) == Tuning()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tuning: [1]", "'tuning' must be a mapping"),
        ("tuning: {trails: 2}", "unknown setting 'tuning: trails'; did you mean 'tuning: trials'"),
        ("tuning: {trials: 0}", "'trials' must be at least 1, but is 0"),
        ("tuning: {folds: 1}", "'folds' must be at least 2, but is 1"),
        ("tuning: {seeds: '3'}", r"'seeds' must be a whole number, at least 1, but is '3' \(str\)"),
        ("tuning: [", "is not valid YAML"),
    ],
)
def test_a_wrong_budget_is_told(text: str, told: str, simulation: Simulation) -> None:
    with pytest.raises(SettingError, match=told):
        read_section(simulation(text), "tuning", Tuning)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("{rouns: [1, 2]}", "unknown setting 'rouns'; did you mean 'rounds'"),
        ("{rounds: 3}", "experiment 'x', 'grid' must have a list of values for 'rounds', not 3"),
        ("{rounds: []}", "must have a list of values"),
        ("{rounds: [[1]]}", r"'grid': setting 'rounds' must be .*, but is \[1\]"),
        ("[rounds]", "'grid' must be a mapping"),
    ],
)
def test_a_wrong_grid_is_told(grid: str, told: str, simulation: Simulation) -> None:
    path = simulation(f"experiments:\n  x:\n    grid: {grid}\n")
    with pytest.raises(SettingError, match=told):
        find_experiment(path, "x")


def test_an_experiment_takes_over_the_grid_of_its_base(simulation: Simulation) -> None:
    path = simulation(
        "experiments:\n  a: {grid: {rounds: [1], seed: [1]}}\n"
        "  b: {base: a, grid: {seed: [2, 3]}}\n"
    )
    assert find_experiment(path, "b").grid == {"rounds": [1], "seed": [2, 3]}


SEARCH = """
tuning: {trials: 2, folds: 2, seeds: 1}
experiments:
  heart:
    config: {method: fedavg, dataset: heart-synthetic, rounds: 2, local-steps: 5, batch-size: 16,
             dropout: 0.0, mc-passes: 0, device: cpu}
    grid: {learning-rate: [0.00001, 0.03]}
  impossible:
    base: heart
    config: {rounds: 8}
    grid: {method: [picsr], picsr.expert-rounds: [3, 8]}
  idle:
    base: heart
    grid: {learning-rate: [0.01], batch-size: [300, 400]}
  tables:
    base: heart
    config: {dataset: table}
  wild:
    base: heart
    grid: {learning-rate: [0.001, 1.0e+30]}
  hopeless:
    base: wild
    grid: {learning-rate: [1.0e+29, 1.0e+30]}
  images:
    config: {method: local, dataset: digits, silos: 3, silo-train-size: 40, silo-test-size: 10,
             width: 4, rounds: 1, local-epochs: 1, mc-passes: 1, device: cpu}
    grid: {learning-rate: [0.001, 0.01]}
"""


def _tune(experiment: str, file: Path, out: Path, *more: str) -> int:
    command = ["tune", experiment, "--file", str(file), "--out", str(out), "--jobs", "1"]
    return main([*command, *more])


@pytest.mark.usefixtures("in_process")
def test_a_search_reads_no_test_row_and_is_not_run_twice(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = simulation(SEARCH), tmp_path / "out" / "tune-heart"
    assert _tune("heart", file, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "2 points, 2 folds, 1 seed: 4 runs on training data" in said
    assert "for simulation.yaml: {train.learning-rate: 0.03}, and next to 'config'" in said
    assert (
        "warning: the best 'train.learning-rate', 0.03, is at the upper end of 1e-05 to 0.03"
        in said
    )
    document = json.loads((folder / "chosen.json").read_text())
    assert document["chosen"] == {"train.learning-rate": 0.03}, (
        "the other does not move from its start"
    )
    with (folder / "trials.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(row["seed"], row["fold"]) for row in rows] == [("0", "0"), ("0", "1")] * 2
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert len({row["digest"] for row in rows}) == 4
    assert {folder / row["run"] for row in rows} == {*(folder / "trials").iterdir()}
    mean = sum(float(r["accuracy"]) for r in rows if r["train.learning-rate"] == "0.03") / 2
    assert document["ranking"][0]["score"] == pytest.approx(mean)
    trials = {path: path.stat().st_mtime_ns for path in (folder / "trials").iterdir()}
    assert len(trials) == 4
    for path in trials:
        summary = json.loads(path.read_text())
        assert summary["sites"] == {}, "a trial saw test rows"
        assert summary["digest"] in {row["digest"] for row in rows}
        assert summary["validation"]["mean"].keys() >= {"accuracy", "loss"}
    before = (folder / "chosen.json").read_bytes()
    assert _tune("heart", file, tmp_path / "out") == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "trials").iterdir()} == trials
    assert (folder / "chosen.json").read_bytes() == before


@pytest.mark.usefixtures("in_process")
def test_a_point_at_which_training_diverges_is_told_and_the_search_goes_on(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = simulation(SEARCH), tmp_path / "out" / "tune-wild"
    assert _tune("wild", file, tmp_path / "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: point {'train.learning-rate': 1e+30} failed: site " in said
    assert json.loads((folder / "chosen.json").read_text())["chosen"] == {
        "train.learning-rate": 0.001
    }
    with (folder / "trials.csv").open(newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["train.learning-rate"] == "1e+30"]
    assert len(rows) == 2
    assert all(row["failed"].startswith("site ") and not row["accuracy"] for row in rows)
    assert len([*(folder / "trials").iterdir()]) == 2, "a failed run is run again next time"


@pytest.mark.usefixtures("in_process")
def test_a_search_whose_points_all_fail_chooses_none(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _tune("hopeless", simulation(SEARCH), tmp_path / "out") == 1
    assert "all 2 points failed; the first one: site " in capsys.readouterr().err
    assert not (tmp_path / "out" / "tune-hopeless" / "chosen.json").exists()


@pytest.mark.usefixtures("in_process")
def test_images_are_searched_on_their_own_validation_part(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _tune("images", simulation(SEARCH), tmp_path) == 0
    said = " ".join(capsys.readouterr().out.split())
    part = "the data set's own validation part, 1 seed"
    assert f"2 points, {part}: 2 runs on training data" in said
    assert f"2 points on {part}; no test metric was used" in said
    with (tmp_path / "tune-images" / "trials.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["fold"] for row in rows] == ["0", "0"]
    found = {}
    for path in (tmp_path / "tune-images" / "trials").iterdir():
        summary = json.loads(path.read_text())
        found[repr(summary["validation"]["mean"]["loss"])] = summary["mean"]["loss"]
    assert {row["loss"] for row in rows} == found.keys(), "validation, not test, metrics count"


@pytest.mark.parametrize("change", ["train.learning-rate=0.1", "learning-rate = 0.1"])
def test_a_setting_that_the_grid_decides_cannot_be_set(
    change: str, simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = simulation(SEARCH), tmp_path / "out"
    assert _tune("heart", file, out, "--set", "rounds=1", "--set", change) == 1
    error = capsys.readouterr().err
    assert f"--set {change}: the grid of this experiment has this setting" in error
    assert not out.exists()


@pytest.mark.usefixtures("in_process")
def test_a_point_of_the_grid_that_cannot_be_is_named(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _tune("impossible", simulation(SEARCH), out) == 1
    error = capsys.readouterr().err
    assert "grid point {" in error
    assert "'picsr.expert-rounds': 8}: setting 'rounds' is 8, but experts take 8 of them" in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.soak
@pytest.mark.usefixtures("in_process")
def test_tables_that_were_changed_are_searched_anew(simulation: Simulation, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "schema.yaml").write_text(
        "columns: [{name: age}]\nlabel: {column: sick, classes: {'no': [0], 'yes': [1]}}\n"
        "sites: {one: one.csv}\n"
    )

    def trials(labels: str) -> set[str]:
        rows = [f"{40 + index},{label}" for index, label in enumerate(labels)]
        (data / "one.csv").write_text("\n".join(["age,sick", *rows]) + "\n")
        file = simulation(SEARCH)
        assert _tune("tables", file, tmp_path / "out", "--set", f"data.dir={data}") == 0
        return {path.name for path in (tmp_path / "out" / "tune-tables" / "trials").iterdir()}

    before = trials("01" * 20)
    assert len(before) == 4
    assert trials("01" * 20) == before
    after = trials("001" * 14)
    assert before < after
    assert len(after) == 8


@pytest.mark.usefixtures("in_process")
def test_a_budget_of_the_command_stands_instead_of_the_files_and_is_written_down(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = simulation(SEARCH)
    assert _tune("images", file, tmp_path, "--trials", "1", "--seeds", "2") == 0
    assert "1 point, the data set's own validation part, 2 seeds: 2 runs" in " ".join(
        capsys.readouterr().out.split()
    )
    document = json.loads((tmp_path / "tune-images" / "chosen.json").read_text())
    assert (document["budget"]["trials"], document["budget"]["seeds"]) == (1, 2)
    assert _tune("images", file, tmp_path, "--trials", "3") == 1
    assert "a grid of 2 points" in capsys.readouterr().err
    assert _tune("images", file, tmp_path, "--trials", "0") != 0
    assert "--trials" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_folds_of_the_command_stand_instead_of_the_files(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = simulation(SEARCH)
    assert _tune("heart", file, tmp_path, "--trials", "1", "--folds", "3") == 0
    assert "1 point, 3 folds, 1 seed: 3 runs" in capsys.readouterr().out
    document = json.loads((tmp_path / "tune-heart" / "chosen.json").read_text())
    assert document["budget"] == {"trials": 1, "folds": 3, "seeds": 1}
    assert _tune("images", file, tmp_path, "--trials", "1", "--folds", "1") == 0
    assert "the data set's own validation part" in " ".join(capsys.readouterr().out.split())
    assert _tune("heart", file, tmp_path, "--folds", "1") != 0
    error = " ".join(capsys.readouterr().err.split())
    assert "--folds" in error
    assert "at least 2" in error


@pytest.mark.usefixtures("in_process")
def test_a_named_metric_decides_and_is_pooled_over_the_sites_validation_patients(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, pooled = simulation(SEARCH), "pooled-balanced-accuracy"
    assert _tune("heart", file, tmp_path, "--metric", pooled) == 0
    assert "best pooled validation balanced-accuracy" in " ".join(capsys.readouterr().out.split())
    with (tmp_path / "tune-heart" / "trials.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    for row in rows:
        summary = json.loads((tmp_path / "tune-heart" / row["run"]).read_text())
        assert 0 < float(row[pooled]) == summary["validation"]["mean"][pooled] <= 1
    assert _tune("images", file, tmp_path, "--metric", pooled) == 1
    error = capsys.readouterr().err
    assert f"--metric {pooled}: 2 of 2 runs lack this validation metric" in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("in_process")
def test_points_of_equal_bits_are_warned_of(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = simulation(SEARCH)
    # No site has as many training rows as either batch
    assert _tune("idle", file, tmp_path) == 0
    said = " ".join(capsys.readouterr().out.split())
    told = "the metrics are equal to the last bit: train.batch-size"
    assert told in said
    assert "warning: these settings had no effect" in said
    document = json.loads((tmp_path / "tune-idle" / "chosen.json").read_text())
    assert len({point["digest"] for point in document["ranking"]}) == 1
    assert [
        warning
        for warning in document["warnings"]
        if warning.startswith("these settings had no effect")
    ]


@pytest.mark.usefixtures("in_process")
def test_tpe_searches_the_range_and_asks_for_the_same_points_again(
    simulation: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = simulation(SEARCH), tmp_path / "tune-heart"
    more = ("--sampler", "tpe", "--trials", "6")
    assert _tune("heart", file, tmp_path, *more) == 0
    assert "6 points, 2 folds, 1 seed: 12 runs on training data" in capsys.readouterr().out
    document = json.loads((folder / "chosen.json").read_text())
    rates = [point["settings"]["train.learning-rate"] for point in document["ranking"]]
    assert len(set(rates)) == 6
    assert all(0.00001 <= rate <= 0.03 for rate in rates)
    assert document["sampler"] == "tpe"
    runs = {path: path.stat().st_mtime_ns for path in (folder / "trials").iterdir()}
    assert len(runs) == 12
    (folder / "chosen.json").unlink()
    gone = sorted(runs)[0]
    gone.unlink()  # as a death would have left it
    assert _tune("heart", file, tmp_path, *more) == 0
    again = {path: path.stat().st_mtime_ns for path in (folder / "trials").iterdir()}
    assert {path for path in again if again[path] != runs[path]} == {gone}
    assert json.loads((folder / "chosen.json").read_text()) == document


def test_tune_without_optuna_names_the_extra(
    simulation: Simulation,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert _tune("heart", simulation(SEARCH), tmp_path) == 1
    error = capsys.readouterr().err
    assert "'fedsilo tune' needs the extra 'tuning': pip install 'fedsilo[tuning]'" in error
    assert error.count("\n") == 1
