"""Means, intervals, ranks and Friedman's test, by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.ranking.config import Benchmark
from benchmarks.ranking.page import Benchmarked
from benchmarks.ranking.ranks import (
    chosen_runs,
    equals,
    ranking,
    relative_costs,
    results_table,
)
from benchmarks.ranking.rows import Row, Rows, best_point


def row(method: str, seed: int, rate: float, validation: float, test: float, **more: object) -> Row:
    measured = {
        "metric": "accuracy",
        "loss": 1.0,
        "accuracy": test,
        "up": 600,
        "down": 400,
        "samples": 96,
    }
    values = {**measured, "seconds": 2.0, "run": "d", **more}
    return Row("one", method, seed, rate, "", validation=validation, test=test, **values)  # type: ignore[arg-type]


def test_friedman_of_four_methods_over_three_settings_is_that_of_hand() -> None:
    # Ranks: a 1, 1, 2; b 2, 2, 1; c 3, 3.5, 3; d 4, 3.5, 4. Their sums are 4, 5, 9.5, 11.5
    metrics = pd.DataFrame(
        {"x": [0.9, 0.8, 0.7, 0.6], "y": [0.9, 0.8, 0.5, 0.5], "z": [0.8, 0.9, 0.7, 0.1]},
        index=["a", "b", "c", "d"],
    )
    found = ranking(metrics)
    assert found.ranks == pytest.approx({"a": 4 / 3, "b": 5 / 3, "c": 9.5 / 3, "d": 11.5 / 3})
    # 12 / (3 * 4 * 5) * (16 + 25 + 90.25 + 132.25) - 3 * 3 * 5 = 7.7; a tie of two divides it by
    # 1 - 6 / (3 * 60)
    assert found.statistic == pytest.approx(7.7 / (1 - 6 / 180))
    assert found.p is not None
    assert 0.04 < found.p < 0.05  # chi-squared of 3 degrees of freedom is above 7.81 at 5 %
    assert found.difference == pytest.approx(2.569 * np.sqrt(4 * 5 / 18), abs=0.002)  # Demsar's q


def test_a_method_that_lacks_a_setting_has_no_rank() -> None:
    metrics = pd.DataFrame({"x": [0.9, 0.8, 0.7], "y": [0.9, np.nan, 0.5]}, index=["a", "b", "c"])
    found = ranking(metrics)
    assert found.ranks == {"a": 1.0, "c": 2.0}
    assert found.statistic is None, "two methods are too few for the test"


def test_the_choice_reads_validation_metrics_alone() -> None:
    rows = [row("fedavg", 0, 0.1, 0.6, 0.99), row("fedavg", 0, 0.2, 0.7, 0.5)]
    rows += [row("fedavg", 1, 0.2, 0.1, 0.6)]
    (runs,) = chosen_runs(rows, 2).values()
    assert [(one.seed, one.rate) for one in runs] == [(0, 0.2), (1, 0.2)]
    (result,) = results_table(chosen_runs(rows, 2)).itertuples()
    assert (result.mean, result.seeds, result.kilobytes) == (pytest.approx(0.55), 2, 1.0)


def test_a_trial_counts_by_the_mean_over_its_seeds() -> None:
    # Seed 0 prefers 0.1, but both seeds together prefer 0.2; 0.3 lacks a seed, and 0.4 failed
    rows = [row("fedavg", 0, 0.1, 0.9, 0.1), row("fedavg", 1, 0.1, 0.5, 0.1)]
    rows += [row("fedavg", 0, 0.2, 0.8, 0.2), row("fedavg", 1, 0.2, 0.8, 0.2)]
    rows += [row("fedavg", 0, 0.3, 1.0, 0.3)]
    rows += [row("fedavg", 0, 0.4, 1.0, 0.4), Row("one", "fedavg", 1, 0.4, run="d", note="failed")]
    assert best_point(rows, 2) == (0.2, "")
    assert best_point(rows, 1) == (0.3, ""), "the first of two equals"
    assert best_point([], 2) == (0.0, "")


def test_equal_validation_metrics_are_decided_by_loss() -> None:
    rows = [row("fedavg", 0, 0.1, 0.6, 0.9), row("fedavg", 0, 0.2, 0.6, 0.5, loss=0.5)]
    (runs,) = chosen_runs(rows, 1).values()
    assert [one.rate for one in runs] == [0.2]


def test_a_method_without_all_seeds_or_with_a_failed_one_has_no_result() -> None:
    assert chosen_runs([row("fedavg", 0, 0.1, 0.6, 0.9)], 2) == {}
    failed = row("fedavg", 1, 0.1, 0.6, 0.9, note="a run failed: it diverged")
    assert chosen_runs([row("fedavg", 0, 0.1, 0.6, 0.9), failed], 2) == {}
    late = [row("fedavg", seed, 0.1, 0.6, 0.9) for seed in (1, 2)]
    assert chosen_runs(late, 3) == {}, "the lines of its trials were deleted"
    assert results_table({}).empty


def test_costs_are_geometric_means_of_multiples_of_fedavg() -> None:
    records = [
        {
            "experiment": name,
            "method": method,
            "kilobytes": size,
            "samples": 0 if method == "local" else 5,
        }
        for name, method, size in [
            ("x", "fedavg", 10.0),
            ("y", "fedavg", 10.0),
            ("x", "moon", 20.0),
            ("y", "moon", 80.0),
            ("z", "moon", 1.0),  # where FedAvg has not run
            ("x", "local", 10.0),  # trains on nothing
        ]
    ]
    costs = relative_costs(pd.DataFrame(records))
    assert costs["moon"] == pytest.approx({"bytes": 4.0, "samples": 1.0})
    assert costs["fedavg"] == pytest.approx({"bytes": 1.0, "samples": 1.0})
    assert costs["local"]["samples"] == 0.0


def test_means_that_are_equal_as_shown_share_a_rank(tmp_path: Path) -> None:
    means = {"fedavg": 0.8004, "moon": 0.7996, "local": 0.79}
    rows = [row(name, seed, 0.1, 0.6, mean) for name, mean in means.items() for seed in (0, 1)]
    benchmark = Benchmark(seeds=2, rates=[0.1, 0.2], experiments={"one": "accuracy"}, methods={})
    file = Rows(tmp_path / "rows.csv")
    file.rows.extend(rows)
    found = Benchmarked("benchmark", benchmark, file, {"one": {"dataset": "digits"}})
    assert found.rankings["methods so far"].ranks == {"fedavg": 1.5, "moon": 1.5, "local": 3.0}
    assert found.finished == [], "all other methods are missing"


def test_methods_of_equal_metrics_are_named() -> None:
    rows = [row(name, 0, 0.1, 0.6, 0.9) for name in ("fedavg", "star")]
    rows.append(row("moon", 0, 0.1, 0.6, 0.9 + 1e-12))
    assert equals(chosen_runs(rows, 1)) == {"one": [["fedavg", "star"]]}
