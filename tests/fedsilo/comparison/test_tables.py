"""The comparison's arithmetic and its tables."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from fedsilo.comparison.results import (
    CONSTANT,
    TwoClassMetrics,
    chosen_metrics,
    constant_results,
    experiment_results,
    of_split,
    pooled_balanced_accuracy,
)
from fedsilo.comparison.tables import (
    COMPARISON,
    Spread,
    comparison_lines,
    comparison_table,
    csv_text,
    draw_comparison,
    markdown_table,
    over_seeds,
    published_cell,
    spread_cell,
    tidy,
)
from fedsilo.core.errors import SettingError
from tests.support.errors import refuses

METRICS = ("accuracy", "entropy")
HEADER = tuple(name.replace("_", " ") for name in COMPARISON)


def _results(name: str, summaries: list[dict[str, Any]], metrics: Sequence[str]) -> pd.DataFrame:
    """Return the tidy results of seeds 0, 1, ..."""
    return experiment_results(name, dict(enumerate(summaries)), metrics)


def _rows(results: pd.DataFrame) -> list[Any]:
    """Return the metrics over seeds."""
    return list(over_seeds(results).itertuples())


def _summary(accuracy: float) -> dict[str, Any]:
    values = {"accuracy": accuracy, "entropy": 1 - accuracy}
    return {
        "method": "uefl",
        "distributions": {"D1": values},
        "mean": values,
        "published": {"D1": {"accuracy": 0.951}},
    }


def test_mean_and_sample_standard_deviation_are_over_seeds() -> None:
    rows = _results("uefl-x", [_summary(0.8), _summary(0.9), _summary(1.0)], METRICS)
    first = _rows(rows)[0]
    assert (first.group, first.metric, first.seeds, first.published) == ("D1", "accuracy", 3, 0.951)
    assert first.mean == pytest.approx(0.9)
    assert first.sd == pytest.approx(0.1)
    assert spread_cell(first) == "0.900 ± 0.100"


def test_a_single_seed_shows_no_deviation() -> None:
    first, *_ = _rows(_results("uefl-x", [_summary(0.8)], METRICS))
    assert spread_cell(first) == "0.800"


def test_markdown_and_csv_hold_every_row() -> None:
    rows = _results("uefl-x", [_summary(0.8), _summary(0.9)], METRICS)
    lines = markdown_table(comparison_lines(rows)).splitlines()
    assert lines[2] == "| uefl-x | D1 | 0.850 ± 0.071 | 0.951 | 0.150 ± 0.071 |"
    table = list(csv.DictReader(io.StringIO(csv_text(over_seeds(rows)))))
    assert list(table[0]) == list(HEADER)
    assert [row["group"] for row in table] == ["D1", "D1", "all", "all"]
    assert (table[0]["published"], table[0]["published sd"]) == ("0.951", "")
    assert float(table[0]["sd"]) == pytest.approx(0.0707107, abs=1e-6)


def test_choices_between_settings_see_validation_metrics_only() -> None:
    validation = _summary(0.3)
    summary = _summary(0.8) | {
        "validation": {key: validation[key] for key in ("mean", "distributions")}
    }
    rows = _results("uefl-x", [of_split(summary, "val")], METRICS)
    assert [row.mean for row in _rows(rows) if row.metric == "accuracy"] == [0.3, 0.3]
    assert all(row.published is None for row in _rows(rows))
    assert of_split(summary, "test") == summary
    assert "val accuracy" in markdown_table(comparison_lines(rows, "val")).splitlines()[0]


def test_the_papers_deviation_stands_beside_its_figure() -> None:
    summary = _summary(0.8) | {
        "published": {"D1": {"accuracy": 0.9, "accuracy-sd": 0.05}, "all": {"accuracy": 0.85}}
    }
    rows = _results("x", [summary], METRICS)
    assert [published_cell(row) for row in _rows(rows)] == ["0.900 ± 0.050", "", "0.850", ""]
    title, _, first, every = markdown_table(comparison_lines(rows)).splitlines()
    named = "published ± population sd"
    assert title == f"| experiment | group | test accuracy | {named} | test entropy |"
    assert first == "| x | D1 | 0.800 | 0.900 ± 0.050 | 0.200 |"
    assert every == "| x | all | 0.800 | 0.850 | 0.200 |"
    table = list(csv.DictReader(io.StringIO(csv_text(over_seeds(rows)))))
    assert [row["published sd"] for row in table] == ["0.05", "", "", ""]


def test_beside_a_papers_deviation_ours_is_told_of_the_sample_and_of_the_population() -> None:
    published = {"published": {"D1": {"accuracy": 0.9, "accuracy-sd": 0.05}}}
    rows = _results("x", [_summary(value) | published for value in (0.7, 0.8, 0.9)], METRICS)
    line = markdown_table(comparison_lines(rows)).splitlines()[2]
    # Squared distances 0.01, 0, 0.01: over 2 and over 3
    assert line.startswith("| x | D1 | 0.800 ± 0.100 (0.082) | 0.900 ± 0.050 |")
    title = comparison_table(rows).title
    assert title == "mean ± sample sd (population sd, as published) over 3 seeds"


def test_a_metric_that_is_undefined_for_a_group_has_no_row_and_is_not_available() -> None:
    def summary(auc: float) -> dict[str, Any]:
        return {
            "method": "local",
            "distributions": {"a": {"accuracy": 0.5, "auc": auc}, "b": {"accuracy": 1.0}},
            "mean": {"accuracy": 0.75, "auc": auc},
            "published": None,
        }

    rows = _results("x", [summary(0.6), summary(0.8)], ("accuracy", "auc"))
    found = {(row.group, row.metric): row.mean for row in _rows(rows)}
    assert ("b", "auc") not in found
    assert found["a", "auc"] == found["all", "auc"] == pytest.approx(0.7)
    assert "| x | b | 1.000 ± 0.000 | n/a |" in markdown_table(comparison_lines(rows)).splitlines()
    columns = comparison_table(rows).columns
    assert [column.header for column in columns] == [
        "experiment",
        "group",
        "test accuracy",
        "test auc",
    ]
    assert list(columns[3].cells) == ["0.700 ± 0.141", "n/a", "0.700 ± 0.141"]


def test_a_metric_that_only_some_seeds_have_is_over_those() -> None:
    whole = {"accuracy": 0.5, "auc": 0.6}
    summaries = [
        {"method": "local", "distributions": {"a": values}, "mean": values, "published": None}
        for values in (whole, {"accuracy": 0.7})
    ]
    rows = _results("x", summaries, ("accuracy", "auc"))
    assert [(row.metric, row.seeds) for row in _rows(rows) if row.group == "a"] == [
        ("accuracy", 2),
        ("auc", 1),
    ]
    assert comparison_lines(rows)[1] == ["x", "a", "0.600 ± 0.141", "0.600 (1 of 2 seeds)"]


def _silo(name: str, test: list[int], val: list[int]) -> dict[str, Any]:
    return {"distribution": name, "label_counts": {"train": [5, 5], "val": val, "test": test}}


def test_answering_the_second_class_every_time_scores_its_share() -> None:
    silos = {"one": _silo("one", [6, 2], [1, 1]), "two": _silo("two", [0, 4], [0, 0])}
    rows = constant_results(silos, "test")
    assert {(row.group, row.metric): row.mean for row in _rows(rows)} == {
        ("one", "accuracy"): 0.25,
        ("one", "balanced-accuracy"): 0.5,
        ("one", "auc"): 0.5,
        ("two", "accuracy"): 1.0,  # of one class nothing else is defined
        ("all", "accuracy"): 0.625,
        ("all", "balanced-accuracy"): 0.5,  # over the sites that have it
        ("all", "auc"): 0.5,
    }
    assert {row.experiment for row in _rows(rows)} == {CONSTANT} == {"always positive (class 1)"}
    assert {(row.seeds, row.published) for row in _rows(rows)} == {(1, None)}
    validation = constant_results(silos, "val")
    assert {row.group for row in _rows(validation)} == {"one", "all"}, (
        "site two has no validation rows"
    )


def test_sites_of_one_distribution_are_one_group_of_the_constant_answer() -> None:
    silos = {"x": _silo("D", [3, 1], [0, 0]), "y": _silo("D", [1, 3], [0, 0])}
    means = {row.group: row.mean for row in _rows(constant_results(silos, "test"))}
    assert means == {"D": 0.5, "all": 0.5}


def test_three_classes_have_no_second_one_to_answer() -> None:
    silos = {"one": {"distribution": "one", "label_counts": {"test": [1, 2, 3]}}}
    assert constant_results(silos, "test").empty
    assert constant_results({"one": _silo("one", [1, 2], [0, 0])}, "val").empty


def test_a_site_of_the_first_class_alone_is_never_answered_right() -> None:
    rows = constant_results({"one": _silo("one", [4, 0], [0, 0])}, "test")
    assert {(row.group, row.metric): row.mean for row in _rows(rows)} == {
        ("one", "accuracy"): 0.0,
        ("all", "accuracy"): 0.0,
    }


def test_the_csv_ends_with_median_and_range() -> None:
    assert HEADER[:9] == (
        *("experiment", "method", "group", "metric", "mean", "sd", "seeds"),
        *("published", "published sd"),
    ), "readers of older tables find their columns in place"
    assert HEADER[9:] == ("median", "min", "max")
    rows = _results("x", [_summary(0.8), _summary(0.5), _summary(0.9)], ["accuracy"])
    first, *_ = csv.DictReader(io.StringIO(csv_text(over_seeds(rows))))
    assert [first[name] for name in HEADER[9:]] == ["0.800000", "0.500000", "0.900000"]


def test_median_and_range_stand_in_the_place_of_mean_and_deviation() -> None:
    three = [_summary(0.8), _summary(0.5), _summary(0.9)]
    rows = _results("x", three, ["accuracy"])
    assert spread_cell(_rows(rows)[0], median=True) == "0.800 (0.500 to 0.900)"
    assert _rows(_results("x", three[:2], ["accuracy"]))[0].median == pytest.approx(0.65)
    alone = _rows(_results("x", three[:1], ["accuracy"]))[0]
    assert spread_cell(alone, median=True) == "0.800"
    lines = markdown_table(comparison_lines(rows, median=True)).splitlines()
    assert lines[2] == "| x | D1 | 0.800 (0.500 to 0.900) | 0.951 |"
    assert comparison_table(rows, median=True).title == "median (min to max) over 3 seeds"
    assert comparison_table(rows).title == "mean ± sample sd over 3 seeds"


def _with(*metrics: str) -> dict[str, Any]:
    return {"mean": dict.fromkeys(metrics, 0.5)}


def test_metrics_are_chosen_by_name_and_pattern_in_the_order_asked_for() -> None:
    runs = [_with("auc", "auc-from-b", "loss"), _with("auc", "auc-from-a", "auc-from-b.[1]")]
    every = ["auc-from-a", "auc-from-b", "auc-from-b.[1]"]
    assert chosen_metrics("loss,auc-from-*", runs, "--metrics") == ["loss", *every]
    assert chosen_metrics("auc*, auc", runs, "--metrics") == ["auc", *every], "each once"
    assert chosen_metrics("auc-from-b.[1]", runs, "--metrics") == ["auc-from-b.[1]"]


@pytest.mark.parametrize("asked", ["f1", "auc,f1", "f*", "auc,"])
def test_a_metric_that_no_run_has_is_refused_with_those_there_are(asked: str) -> None:
    wanted = asked.rpartition(",")[2]
    with pytest.raises(SettingError) as caught:
        chosen_metrics(asked, [_with("auc", "loss"), _with("accuracy")], "--tests")
    assert str(caught.value) == (
        f"--tests: unknown metric '{wanted}': known are accuracy, auc, loss"
    )


def test_the_constant_answer_has_the_metrics_that_are_shown() -> None:
    rows = constant_results({"one": _silo("one", [6, 2], [1, 1])}, "test", ["auc", "loss"])
    assert [(row.group, row.metric, row.mean) for row in _rows(rows)] == [
        ("one", "auc", 0.5),
        ("all", "auc", 0.5),
    ]


def test_a_metrics_of_one_seed_has_no_deviation_and_a_range_of_nothing() -> None:
    assert Spread.of([0.7]) == Spread(0.7, 0.0, 1, 0.7, 0.7, 0.7)


def test_a_mean_is_rounded_once_whatever_the_order() -> None:
    values = [0.1, 0.7, 0.2, 0.6, 0.3, 0.6, 1e-17]
    assert Spread.of(values).mean == Spread.of(values[::-1]).mean == Spread.of(sorted(values)).mean


def test_experiments_stay_in_the_order_in_which_they_were_named() -> None:
    frames = [_results(name, [_summary(0.5)], METRICS) for name in ("z", "a")]
    assert [row.experiment for row in _rows(pd.concat(frames))] == ["z"] * 4 + ["a"] * 4


def test_published_metrics_are_told_as_they_were_published() -> None:
    summary = _summary(0.8) | {"published": {"D1": {"accuracy": 1, "accuracy-sd": 0.0125}}}
    first, *_ = csv.DictReader(io.StringIO(csv_text(over_seeds(_results("x", [summary], METRICS)))))
    assert (first["published"], first["published sd"]) == ("1", "0.0125")


# 3 of 4 healthy and 3 of 6 ill; all 5 are ill and 4 right; 2 of 2 healthy and 1 of 3 ill
BOTH = TwoClassMetrics((4, 6), 0.6, (3 / 4 + 3 / 6) / 2)
ILL = TwoClassMetrics((0, 5), 0.8, None)
OTHER = TwoClassMetrics((2, 3), 0.6, (1 + 1 / 3) / 2)


def test_right_answers_of_each_class_follow_from_the_two_accuracies() -> None:
    assert [site.count_correct() for site in (BOTH, ILL, OTHER)] == [(3, 3), (0, 4), (2, 1)]
    assert TwoClassMetrics((5, 0), 0.8, None).count_correct() == (4, 0)


def test_pooled_each_sample_counts_once_of_its_class() -> None:
    found = pooled_balanced_accuracy([BOTH, ILL, OTHER])
    assert found == pytest.approx((5 / 6 + 8 / 14) / 2)
    right = pooled_balanced_accuracy([BOTH, TwoClassMetrics((0, 5), 1.0, None), OTHER])
    assert right == pytest.approx((5 / 6 + 9 / 14) / 2), "a site of one class counts, a little"


def test_equal_classes_at_a_site_or_one_class_at_all_have_no_pooled_figure() -> None:
    assert TwoClassMetrics((5, 5), 0.7, 0.7).count_correct() is None
    assert pooled_balanced_accuracy([BOTH, TwoClassMetrics((5, 5), 0.7, 0.7)]) is None
    assert pooled_balanced_accuracy([ILL]) is None
    assert pooled_balanced_accuracy([]) is None


def test_a_bar_is_the_mean_over_seeds_at_a_site_and_a_panel_a_metric() -> None:
    values = {"a": {"north": (0.8, 0.6), "all": (0.7, 0.7)}, "b": {"all": (0.5, 0.9)}}
    results = tidy(
        (name, name, seed, group, metric, value, None, None)
        for metric in ("accuracy", "entropy")
        for name, groups in values.items()
        for group, seeds in groups.items()
        for seed, value in enumerate(seeds)
    )
    figure = draw_comparison(results, "test")
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy", "entropy (nats)"]
    a, b = (c for c in figure.axes[0].containers if len(getattr(c, "patches", ())))
    assert [bar.get_height() for bar in a.patches] == pytest.approx([0.7, 0.7])  # type: ignore[attr-defined]
    heights = [bar.get_height() for bar in b.patches]  # type: ignore[attr-defined]
    assert heights[0] != heights[0], "b was not measured at north"
    assert heights[1] == pytest.approx(0.7)
    deviations = [b.errorbar.lines[2][0].get_segments()[1][:, 1]]  # type: ignore[attr-defined]
    assert deviations[0].tolist() == pytest.approx([0.7 - 0.08**0.5, 0.7 + 0.08**0.5])
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["north", "all"]


def test_a_metric_that_is_measured_but_hidden_is_not_called_unknown() -> None:
    summaries: list[Any] = [{"mean": {"loss": 0.5}}]
    with refuses(SettingError, "--no-floor"):
        chosen_metrics("accuracy", summaries, "--tests", {"accuracy", "loss"})
    with refuses(SettingError, "unknown metric 'acuracy'"):
        chosen_metrics("acuracy", summaries, "--tests", {"accuracy", "loss"})
    assert chosen_metrics("loss", summaries, "--tests", {"accuracy", "loss"}) == ["loss"]
