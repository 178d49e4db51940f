"""Cross-validation: metrics and paired differences by hand, its tables, and a real small one."""

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsilo.cli.main import main
from fedsilo.comparison.crossvalidate import (
    CorrectedInterval,
    _lines,
    corrected_interval,
    difference_intervals,
    interval_frame,
    markdown_text,
    metric_intervals,
    metric_table,
)
from fedsilo.comparison.results import POOLED
from fedsilo.comparison.tables import csv_text


def _run(**sites: Mapping[str, float]) -> dict[str, Any]:
    return {"sites": sites}


# Site y has no AUC in the first run: its test rows are of one class there
RUNS = [
    _run(x={"accuracy": 0.6, "auc": 0.5}, y={"accuracy": 0.8}),
    _run(x={"accuracy": 0.8, "auc": 0.7}, y={"accuracy": 1.0, "auc": 0.9}),
]


def _means(rows: pd.DataFrame, metric: str) -> dict[str, tuple[float, int]]:
    return {
        row.group: (round(row.mean, 6), row.runs)
        for row in rows.itertuples()
        if row.metric == metric
    }


def _pairs(rows: pd.DataFrame) -> set[tuple[str, str]]:
    return {(row.experiment, row.compared_with) for row in rows.itertuples()}


def test_figures_are_means_over_runs_per_site_and_over_sites() -> None:
    rows = metric_intervals({"a": RUNS}, ("accuracy", "auc"), 2)
    assert _means(rows, "accuracy") == {"x": (0.7, 2), "y": (0.9, 2), "all": (0.8, 2)}
    assert _pairs(rows) == {("a", "")}


def test_a_site_without_a_metric_in_some_run_is_no_part_of_its_mean_over_sites() -> None:
    rows = metric_intervals({"a": RUNS}, ("auc",), 2)
    assert _means(rows, "auc") == {"x": (0.6, 2), "y": (0.9, 1), "all": (0.6, 2)}


def test_means_over_sites_of_two_experiments_are_of_the_same_sites() -> None:
    """Site y has no AUC in one run of the first experiment, but in all of the second's."""
    whole = [
        _run(x={"auc": 0.5}, y={"auc": 0.9}),
        _run(x={"auc": 0.7}, y={"auc": 0.9}),
    ]
    rows = metric_intervals({"a": RUNS, "b": whole}, ("auc",), 2)
    for name in ("a", "b"):
        assert _means(rows[rows["experiment"] == name], "auc")["all"] == (0.6, 2)
    differences = difference_intervals({"a": RUNS, "b": whole}, ("auc",), 2)
    assert _means(differences, "auc")["all"] == (0.0, 2)


def test_a_table_names_the_sites_that_its_means_over_sites_leave_out() -> None:
    rows = metric_intervals({"a": RUNS, "b": RUNS}, ("accuracy", "auc"), 2)
    text = markdown_text(rows, ("accuracy", "auc"))
    assert "**accuracy**, mean and 95 % interval\n" in text
    assert "interval; 'all' is over 1 of 2 sites, without y\n" in text


def test_a_metric_that_no_run_has_gives_no_row() -> None:
    lone = [_run(y={"accuracy": 0.8}), _run(y={"accuracy": 0.9})]
    metrics = metric_intervals({"a": lone}, ("accuracy", "auc"), 2)
    assert list(metrics["metric"]) == ["accuracy", "accuracy"]
    assert difference_intervals({"a": lone, "b": lone}, ("auc",), 2).empty


def test_differences_are_taken_run_by_run() -> None:
    other = [
        _run(x={"accuracy": 0.5, "auc": 0.5}, y={"accuracy": 0.6}),
        _run(x={"accuracy": 0.5, "auc": 0.6}, y={"accuracy": 0.6, "auc": 0.5}),
    ]
    rows = difference_intervals({"a": RUNS, "b": other}, ("accuracy", "auc"), 2)
    assert _pairs(rows) == {("a", "b")}
    assert _means(rows, "accuracy") == {"x": (0.2, 2), "y": (0.3, 2), "all": (0.25, 2)}
    assert _means(rows, "auc") == {"x": (0.05, 2), "y": (0.4, 1), "all": (0.05, 2)}
    chosen = rows[(rows["group"] == "x") & (rows["metric"] == "accuracy")]
    (site,) = chosen.itertuples()
    # 0.1 and 0.3: sd 0.1414; error 0.1414 * sqrt(1/2 + 1/1) = 0.1732; Student's t with one degree
    # of freedom is Cauchy's distribution
    error = math.sqrt(0.02) * math.sqrt(1.5)
    assert site.p == pytest.approx(1 - 2 / math.pi * math.atan(0.2 / error))
    assert site.low == pytest.approx(0.2 - math.tan(0.475 * math.pi) * error)
    assert site.high == pytest.approx(0.2 + math.tan(0.475 * math.pi) * error)


def test_differences_come_in_the_first_experiments_order_and_of_its_sites_alone() -> None:
    more = [{"sites": {**run["sites"], "w": {"accuracy": 0.5}}} for run in RUNS]
    assert list(difference_intervals({"a": RUNS, "b": more}, ("accuracy",), 2)["group"]) == [
        *("x", "y", "all")
    ]


def test_pooled_over_all_samples_has_its_own_metrics_and_no_site() -> None:
    mine = [{**run, "mean": {POOLED: value}} for run, value in zip(RUNS, (0.5, 0.7), strict=True)]
    others = [{**run, "mean": {POOLED: 0.5}} for run in RUNS]
    assert _means(metric_intervals({"a": mine}, (POOLED,), 2), POOLED) == {"all": (0.6, 2)}
    less = difference_intervals({"a": mine, "b": others}, (POOLED,), 2)
    assert _means(less, POOLED) == {"all": (0.1, 2)}


def test_every_other_experiment_is_compared_with_the_first() -> None:
    rows = difference_intervals({"a": RUNS, "b": RUNS, "c": RUNS}, ("auc", "accuracy"), 2)
    columns = ["experiment", "compared_with", "metric"]
    assert list(rows[columns].drop_duplicates().itertuples(index=False, name=None)) == [
        ("a", "b", "auc"),
        ("a", "b", "accuracy"),
        ("a", "c", "auc"),
        ("a", "c", "accuracy"),
    ]
    assert list(rows["group"]) == ["x", "y", "all"] * 4, "as the metrics have them"
    assert set(rows["mean"]) == {0.0}
    alone = (rows["group"] == "y") & (rows["metric"] == "auc")
    assert rows.loc[alone, "p"].isna().all(), "of a single run"
    assert set(rows.loc[~alone, "p"]) == {1.0}


def test_a_single_run_has_neither_interval_nor_p_value() -> None:
    one, other = [_run(x={"accuracy": 0.733})], [_run(x={"accuracy": 0.5})]
    rows = metric_intervals({"a": one, "b": other}, ("accuracy",), 2)
    rows = pd.concat([rows, difference_intervals({"a": one, "b": other}, ("accuracy",), 2)])
    cells = list(metric_table(rows, "accuracy").columns[1].cells)
    assert cells == ["0.733 (1 run)", "0.500 (1 run)", "+0.233 (1 run)"]
    lines = csv_text(rows).splitlines()
    assert lines[1] == "a,,x,accuracy,0.733000,,,,1"
    assert lines[5] == "a,b,x,accuracy,0.233000,,,,1"
    assert "| a - b | +0.233 (1 run) | +0.233 (1 run) |" in markdown_text(rows, ("accuracy",))


def test_figures_stay_between_0_and_1_and_differences_may_go_beyond() -> None:
    wide = [_run(x={"accuracy": value}) for value in (0.0, 1.0)]
    none = [_run(x={"accuracy": 0.0}) for _ in range(2)]
    rows = metric_intervals({"a": wide, "b": none}, ("accuracy",), 2)
    high, _, low, _ = rows.itertuples()
    assert (high.mean, high.low, high.high) == (0.5, 0.0, 1.0)
    assert (low.low, low.high) == (0.0, 0.0)
    difference, _ = difference_intervals({"a": wide, "b": none}, ("accuracy",), 2).itertuples()
    # sd 0.7071 * sqrt(1/2 + 1/1) = 0.866
    half = math.tan(0.475 * math.pi) * math.sqrt(0.75)
    assert (difference.low, difference.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert high.p == pytest.approx(difference.p), "cutting changes no p value"


def test_errors_and_negative_shares_are_not_cut_to_between_0_and_1() -> None:
    runs = [_run(x={"mae": 3.0, "r2": -0.4}), _run(x={"mae": 5.0, "r2": -0.2})]
    rows = metric_intervals({"a": runs}, ("mae", "r2"), 2)
    found = {row.metric: (row.mean, row.low, row.high) for row in rows.itertuples()}
    half = math.tan(0.475 * math.pi) * math.sqrt(0.75)  # of values that are 1 apart, as above
    assert found["mae"] == pytest.approx((4.0, 0.0, 4.0 + 2 * half))
    assert found["r2"] == pytest.approx((-0.3, -0.3 - 0.2 * half, 1.0))


def test_a_cell_of_fewer_runs_than_others_says_of_how_many() -> None:
    runs = [_run(x={"accuracy": value, "auc": value}) for value in (0.5, 0.7)]
    runs.append(_run(x={"accuracy": 0.6}))
    rows = metric_intervals({"a": runs}, ("accuracy", "auc"), 3)
    (accuracy,), (auc,) = (_lines(rows, metric)[1:] for metric in ("accuracy", "auc"))
    assert "runs" not in " ".join(accuracy)
    assert auc[1].endswith(" (2 runs)")


TABLE = interval_frame(
    [
        ("a", "", "x", "accuracy", CorrectedInterval(0.7, 0.6, 0.8, 0.001, 10)),
        ("a", "", "all", "accuracy", CorrectedInterval(0.75, 0.65, 0.85, 0.001, 10)),
        ("b", "", "x", "accuracy", CorrectedInterval(0.5, 0.4, 0.6, 0.001, 10)),
        ("a", "b", "x", "accuracy", CorrectedInterval(0.2, -0.1, 0.5, 0.04, 10)),
        ("a", "", "x", "auc", CorrectedInterval(0.9, 0.8, 1.0, 0.001, 10)),
    ]
)


def test_markdown_has_a_table_per_metric_with_metrics_then_differences() -> None:
    first, second = markdown_text(TABLE, ("accuracy", "auc")).split("\n\n**auc**")
    assert first.splitlines() == [
        "**accuracy**, mean and 95 % interval",
        "",
        "| experiment | x | all |",
        "| --- | --- | --- |",
        "| a | 0.700 [0.600, 0.800] | 0.750 [0.650, 0.850] |",
        "| b | 0.500 [0.400, 0.600] |  |",
        "| a - b | +0.200 [-0.100, +0.500] p = 0.040 |  |",
    ]
    assert second.splitlines()[2:] == [
        "| experiment | x |",
        "| --- | --- |",
        "| a | 0.900 [0.800, 1.000] |",
    ]


def test_csv_and_the_terminals_table_hold_the_same() -> None:
    lines = csv_text(TABLE).splitlines()
    assert lines[0] == "experiment,compared with,group,metric,mean,low,high,p,runs"
    assert lines[4] == "a,b,x,accuracy,0.200000,-0.100000,0.500000,0.040000,10"
    assert len(lines) == 6
    columns = {str(c.header): list(c.cells) for c in metric_table(TABLE, "accuracy").columns}
    assert columns["experiment"] == ["a", "b", "a - b"]
    assert columns["all"] == ["0.750\n[0.650, 0.850]", "", ""], "an interval has its own line"


SIMULATION = """
experiments:
  averaged:
    config: {method: fedavg, dataset: heart-synthetic, rounds: 2, local-steps: 5, batch-size: 16,
             learning-rate: 0.03, dropout: 0.0, mc-passes: 0, device: cpu}
  alone:
    base: averaged
    config: {method: local}
  longer:
    base: averaged
    config: {rounds: 3}
  patients:
    base: averaged
    config: {dataset: table}
  images:
    config: {method: local, dataset: digits}
"""
SCHEMA = """
columns: [{name: age}]
label: {column: sick, classes: {'no': [0], 'yes': [1]}}
sites: {one: one.csv, two: two.csv}
"""


def _tables(folder: Path, **labels: str) -> None:
    """Write a data set of tables."""
    folder.mkdir(exist_ok=True)
    (folder / "schema.yaml").write_text(SCHEMA)
    for site, found in labels.items():
        rows = [f"{40 + index},{label}" for index, label in enumerate(found)]
        (folder / f"{site}.csv").write_text("\n".join(["age,sick", *rows]) + "\n")


@pytest.mark.usefixtures("in_process")
def test_two_experiments_are_cross_validated_on_the_same_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(SIMULATION)
    arguments = ["crossvalidate", "averaged", "alone", "--file", str(file), "--jobs", "1"]
    arguments += ["--folds", "2", "--repeats", "1", "--out", str(tmp_path)]
    arguments += ["--csv", str(tmp_path / "t.csv"), "--markdown", str(tmp_path / "t.md")]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "2 experiments, 2 folds, 1 repeat: 4 runs" in said
    assert "test calibration-error: mean and 95 % interval" in said
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "crossvalidation").iterdir()}
    summaries = [json.loads(path.read_text()) for path in kept]
    assert len(summaries) == 4
    table = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    means = {
        (row["experiment"], row["compared with"]): float(row["mean"])
        for row in table
        if (row["group"], row["metric"]) == ("va", "accuracy")
    }
    for method, name in (("fedavg", "averaged"), ("local", "alone")):
        found = [s["sites"]["va"]["accuracy"] for s in summaries if s["method"] == method]
        assert means[name, ""] == pytest.approx(sum(found) / 2, abs=1e-6)
        found = [s["mean"][POOLED] for s in summaries if s["method"] == method]
        pooled = [r for r in table if r["metric"] == POOLED and not r["compared with"]]
        (row,) = (r for r in pooled if r["experiment"] == name)
        assert row["group"] == "all"
        assert float(row["mean"]) == pytest.approx(sum(found) / 2, abs=1e-6)
    difference = means["averaged", ""] - means["alone", ""]
    assert means["averaged", "alone"] == pytest.approx(difference, abs=2e-6)
    order = [row["group"] for row in table if row["compared with"] and row["metric"] == "auc"]
    assert order == ["cleveland", "hungary", "switzerland", "va", "all"]
    auc = {row["group"]: row["runs"] for row in table if row["metric"] == "auc"}
    assert auc == {"cleveland": "2", "hungary": "2", "switzerland": "1", "va": "2", "all": "2"}
    assert (tmp_path / "t.md").read_text().count("| averaged - alone |") == 5
    assert main(arguments) == 0
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "crossvalidation").iterdir()}
    assert again == kept


@pytest.mark.usefixtures("in_process")
def test_experiments_on_unequal_terms_are_refused_before_they_run_or_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(SIMULATION)
    arguments = ["crossvalidate", "averaged", "longer", "--file", str(file), "--jobs", "1"]
    arguments += ["--folds", "2", "--repeats", "1", "--out", str(tmp_path / "out")]
    arguments += ["--markdown", str(tmp_path / "t.md")]
    assert main(arguments) == 1
    remark = "experiment 'longer' has another budget than 'averaged': rounds 3, not 2"
    assert (
        f"{remark}; give all the same budget, or mark the row by --unequal"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--unequal"]) == 0
    assert f"* {remark}" in capsys.readouterr().out.splitlines()
    text = (tmp_path / "t.md").read_text()
    assert text.endswith(f"\n* {remark}\n")
    assert "| averaged - longer * |" in text


@pytest.mark.usefixtures("in_process")
def test_an_experiment_that_ends_early_is_refused_and_its_runs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = "{val-folds: 2, evaluate-every: 1, early-stopping-metric: loss, patience: 1}"
    file = tmp_path / "simulation.yaml"
    file.write_text(SIMULATION.replace("{rounds: 3}", stopping).replace("rounds: 2", "rounds: 9"))
    arguments = ["crossvalidate", "averaged", "longer", "--file", str(file), "--jobs", "1"]
    arguments += ["--folds", "2", "--repeats", "1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "rounds, not 9 of 9; all runs are kept; repeat with --unequal" in error
    assert len(list((tmp_path / "out" / "crossvalidation").iterdir())) == 4
    assert main([*arguments, "--unequal"]) == 0


def test_images_have_no_folds_and_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "simulation.yaml"
    file.write_text(SIMULATION)
    out = tmp_path / "out"
    assert main(["crossvalidate", "images", "--file", str(file), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert (
        "data set 'digits' has a fixed split, so it cannot be cut into folds: use 'fedsilo compare'"
        in error
    )
    assert not out.exists()


@pytest.mark.soak
@pytest.mark.usefixtures("in_process")
def test_tables_that_were_changed_are_cross_validated_anew(tmp_path: Path) -> None:
    file, data, kept = tmp_path / "s.yaml", tmp_path / "data", tmp_path / "crossvalidation"
    file.write_text(SIMULATION)
    arguments = ["crossvalidate", "patients", "--file", str(file), "--set", f"data.dir={data}"]
    arguments += ["--folds", "2", "--repeats", "1", "--jobs", "1", "--out", str(tmp_path)]
    _tables(data, one="01" * 20, two="011" * 14)
    assert main(arguments) == 0
    before = {path.name for path in kept.iterdir()}
    assert len(before) == 2
    _tables(data, one="01" * 20, two="001" * 14)
    assert main(arguments) == 0
    after = {path.name for path in kept.iterdir()}
    assert before < after
    assert len(after) == 4
    _tables(data, one="01" * 20, two="011" * 14)
    assert main(arguments) == 0
    assert {path.name for path in kept.iterdir()} == after, "the first data's runs are there yet"


def test_experiments_on_other_data_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data, other = tmp_path / "s.yaml", tmp_path / "data", tmp_path / "other"
    for folder in (data, other):
        _tables(folder, one="01" * 20, two="011" * 14)
    moved = f"  moved:\n    base: patients\n    config: {{data-dir: {other}}}\n"
    there = SIMULATION.replace("{dataset: table}", f"{{dataset: table, data-dir: {data}}}")
    file.write_text(there + moved)
    for one, two in (("averaged", "patients"), ("patients", "moved")):
        out = tmp_path / one
        arguments = ["crossvalidate", one, two, "--file", str(file), "--out", str(out)]
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert f"experiment '{two}' uses other data than '{one}'" in error
        assert error.count("\n") == 1
        assert not out.exists()


VALUES = [0.70, 0.80, 0.90, 0.80]  # mean 0.8, sum of squares 0.02, variance 0.02 / 3
METRICS = st.lists(st.floats(-1, 1), min_size=2, max_size=25)


def test_the_interval_of_four_runs_of_five_folds_by_hand() -> None:
    found = corrected_interval(VALUES, folds=5)
    # (1/4 + 1/4) * 0.02 / 3 = 0.01 / 3, and t of 3 degrees of freedom is 3.182 at 97.5 %
    half = 3.182446 * math.sqrt(0.01 / 3)
    assert found.mean == pytest.approx(0.8)
    assert found.low == pytest.approx(0.8 - half, abs=1e-6)
    assert found.high == pytest.approx(0.8 + half, abs=1e-6)
    assert found.runs == 4


def test_the_p_value_is_that_of_the_corrected_t() -> None:
    differences = [0.01, 0.03, -0.01, 0.02, 0.05]
    error = math.sqrt((1 / 5 + 1 / 2) * statistics.variance(differences))
    expected = 2 * (1 - stats.t.cdf(0.02 / error, 4))
    assert corrected_interval(differences, folds=3).p == pytest.approx(expected, rel=1e-9)
    assert 0.1 < expected < 0.9


def test_the_p_value_does_not_depend_on_the_sign_of_a_difference() -> None:
    one, other = corrected_interval(VALUES, 5), corrected_interval([-v for v in VALUES], 5)
    assert one.p == pytest.approx(other.p)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_an_interval_that_ends_at_zero_has_p_of_five_percent() -> None:
    spread = corrected_interval(VALUES, 5)
    shifted = [value - spread.low for value in VALUES]
    found = corrected_interval(shifted, 5)
    assert found.low == pytest.approx(0, abs=1e-12)
    assert found.p == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize(("value", "p"), [(0.25, 0.0), (0.0, 1.0), (-0.25, 0.0)])
def test_runs_that_all_say_the_same_have_no_width(value: float, p: float) -> None:
    assert corrected_interval([value] * 3, 5) == CorrectedInterval(value, value, value, p, 3)


def test_one_run_says_nothing_of_the_spread() -> None:
    assert corrected_interval([0.3], 5) == CorrectedInterval(0.3, None, None, None, 1)


@pytest.mark.parametrize(
    ("low", "high", "cut"),
    [(-0.1, 1.2, (0, 1)), (-0.1, 0.9, (0, 0.9)), (0.7, 1.2, (0.7, 1)), (0.7, 0.9, (0.7, 0.9))],
)
def test_an_interval_is_cut_to_what_the_metrics_can_be(
    low: float, high: float, cut: tuple[float, float]
) -> None:
    whole = CorrectedInterval(0.8, low, high, 0.01, 5)
    assert whole.within(0, 1) == CorrectedInterval(0.8, *cut, 0.01, 5)
    assert (whole.low, whole.high) == (low, high)


def test_of_one_run_there_is_nothing_to_cut() -> None:
    one = corrected_interval([0.3], 5)
    assert one.within(0.5, 1) == one


@given(METRICS, st.integers(2, 10))
def test_the_interval_is_wider_than_the_naive_one_and_has_the_mean_in_its_middle(
    values: list[float], folds: int
) -> None:
    found, runs = corrected_interval(values, folds), len(values)
    naive = stats.t.ppf(0.975, runs - 1) * statistics.stdev(values) / math.sqrt(runs)
    half = (found.high - found.low) / 2
    factor = math.sqrt(1 + runs / (folds - 1))
    assert half == pytest.approx(naive * factor, rel=1e-6, abs=1e-12)
    assert factor > 1
    assert (found.low + found.high) / 2 == pytest.approx(found.mean, abs=1e-9)


def test_more_runs_over_the_same_folds_do_not_make_it_arbitrarily_narrow() -> None:
    many = corrected_interval(VALUES * 500, folds=5)
    floor = stats.norm.ppf(0.975) * math.sqrt(statistics.variance(VALUES * 500) / 4)
    assert (many.high - many.low) / 2 > floor
