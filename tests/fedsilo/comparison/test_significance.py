"""ANOVA and t-tests against numbers worked out by hand, and by scipy with the factor explicit."""

import warnings

import pytest
from rich.table import Table
from scipy import stats

from fedsilo.comparison.significance import (
    Outcome,
    lines_of_tests,
    markdown_tests,
    notes,
    one_way,
    significance,
    significance_csv,
    two_sided,
)
from fedsilo.core.errors import SettingError

A, B, C = [1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [6.0, 7.0, 8.0]


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


THREE = {"a": by_seed(*A), "b": by_seed(*B), "c": by_seed(*C)}


@pytest.fixture(autouse=True)
def _no_warning_leaks() -> None:
    warnings.simplefilter("error")


def test_anova_is_the_mean_square_between_over_that_within() -> None:
    # Means 2, 3, 7, grand mean 4: between 3 * (4 + 1 + 9) / 2 = 21; within (2 + 2 + 2) / 6 = 1
    found = one_way({"a": A, "b": B, "c": C})
    assert found.statistic == pytest.approx(21)
    assert found.freedom == (2, 6)
    # Of 2 and n degrees the tail is (1 + 2 F / n)^(-n / 2): (1 + 7)^-3
    assert found.p == pytest.approx(8**-3)


def test_a_t_test_is_the_difference_over_its_pooled_error() -> None:
    # Difference 5, pooled variance 1: t = 5 / sqrt(2 / 3)
    found = two_sided("c", "a", THREE, paired=False)
    assert found.statistic == pytest.approx(5 / (2 / 3) ** 0.5)
    assert found.p == pytest.approx(stats.ttest_ind(C, A).pvalue)
    # Of two values each, 2 degrees: p = 1 - t / sqrt(2 + t^2), t = 2 / sqrt(0.5 + 0.5)
    few = {"a": by_seed(0.0, 1.0), "b": by_seed(2.0, 3.0)}
    assert two_sided("b", "a", few, paired=False).p == pytest.approx(
        1 - 8**0.5 / (2 + 8) ** 0.5, rel=1e-6
    )


def test_a_paired_test_is_of_the_differences_by_seed() -> None:
    samples = {"a": {0: 1.0, 1: 5.0}, "b": {1: 8.0, 0: 2.0}}  # differences 1 and 3
    found = two_sided("b", "a", samples, paired=True)
    assert found.statistic == pytest.approx(2 / (2**0.5 / 2**0.5))
    # One degree: p = 1 - 2 / pi * arctan t
    assert found.p == pytest.approx(1 - 2 / 3.141592653589793 * 1.1071487177940904)


def test_p_is_times_the_number_of_pairs_and_at_most_one() -> None:
    tested = significance("auc", THREE, paired=False)
    assert list(tested.pairs) == [("b", "a"), ("c", "a"), ("c", "b")]
    assert tested.pairs["c", "a"].p == pytest.approx(3 * stats.ttest_ind(C, A).pvalue)
    assert tested.pairs["c", "b"].p == pytest.approx(3 * stats.ttest_ind(C, B).pvalue)
    assert 3 * stats.ttest_ind(B, A).pvalue > 0.8
    near = {name: by_seed(*A) for name in "xy"} | {"z": by_seed(1.0, 2.0, 3.1)}
    assert {found.p for found in significance("auc", near, paired=False).pairs.values()} == {1.0}


def test_the_table_is_a_triangle_of_later_against_earlier_experiments() -> None:
    tested = significance("auc", THREE, paired=False)
    cells = {pair: found.cell() for pair, found in tested.pairs.items()}
    assert cells["c", "a"] == f"{tested.pairs['c', 'a'].p:.3f}"
    assert tested.lines() == [
        ["p", "a", "b"],
        ["b", cells["b", "a"], "-"],
        ["c", cells["c", "a"], cells["c", "b"]],
    ]
    heading = "test auc, mean over sites: one-way ANOVA F(2, 6) = 21, p = 0.002"
    assert tested.heading("test") == heading
    table, *_ = lines_of_tests([tested], "test", [])
    assert isinstance(table, Table)
    assert table.title == heading
    assert [column.header for column in table.columns] == ["p", "a", "b"]
    assert list(table.columns[1].cells) == [cells["b", "a"], cells["c", "a"]]
    assert markdown_tests([tested], "test", ["one", "two"]) == (
        f"\n{heading}\n\n| p | a | b |\n| --- | --- | --- |\n| b | {cells['b', 'a']} | - |\n"
        f"| c | {cells['c', 'a']} | {cells['c', 'b']} |\n\n- one\n- two\n"
    )
    assert markdown_tests([], "test", []) == ""


def test_as_csv_each_test_has_p_before_and_after_correction() -> None:
    header, anova, first, *others = significance_csv(
        [significance("auc", THREE, False)]
    ).splitlines()
    assert header == "metric,test,experiment,compared with,statistic,p,p corrected"
    # F = 21 on (2, 6): p = (1 + 7)^-3; b against a: t = 1 / sqrt(2 / 3) on 4 degrees, of which p is
    # 1 - 1.5 x + 0.5 x^3 of x = t / sqrt(4 + t^2); times 3 pairs
    assert anova == "auc,ANOVA,all,all,21,0.00195312,0.00195312"
    assert first == "auc,t,b,a,1.22474,0.287864,0.863592"
    assert [line.split(",")[2:4] for line in others] == [["c", "a"], ["c", "b"]]
    same = {name: by_seed(0.7, 0.7) for name in "ab"}
    empty = significance_csv([significance("auc", same, False)]).splitlines()[1:]
    assert empty == ["auc,ANOVA,all,all,,,", "auc,t,b,a,,,"]


def test_without_any_spread_there_is_no_test_and_a_reason() -> None:
    same = {name: by_seed(0.7, 0.7, 0.7) for name in ("a", "b")} | {"c": by_seed(0.1, 0.1, 0.1)}
    tested = significance("auc", same, paired=False)
    assert tested.anova == Outcome(None, why="no value varies over seeds")
    assert tested.lines()[1:] == [["b", "n/a", "-"], ["c", "n/a", "n/a"]]
    assert tested.reasons()[0] == "n/a, b against a: neither varies over seeds"
    assert len(tested.reasons()) == 3
    assert "ANOVA n/a: no value varies over seeds" in tested.heading("test")
    assert "n/a, c against b" in markdown_tests([tested], "test", [])


def test_rounding_is_no_spread() -> None:
    a, b = by_seed(0.1 + 0.2, 0.3), by_seed(0.7, 0.1 * 7)
    assert a[0] != a[1]
    assert two_sided("b", "a", {"a": a, "b": b}, paired=False).p is None
    shifted = {"a": by_seed(0.1, 0.2, 0.3), "b": by_seed(0.1 + 0.6, 0.2 + 0.6, 0.3 + 0.6)}
    assert two_sided("b", "a", shifted, paired=True) == Outcome(
        None, why="the difference is the same for every seed"
    )
    assert two_sided("b", "a", shifted, paired=False).p is not None


def test_one_experiment_that_no_seed_changes_is_tested_against_one_that_varies() -> None:
    samples = {"a": by_seed(2.0, 2.0, 2.0), "b": by_seed(*C)}
    found = two_sided("b", "a", samples, paired=False)
    assert found.p == pytest.approx(2 * stats.t.sf(5 / (0.5 * 2 / 3) ** 0.5, 4))
    assert one_way({"a": [2.0, 2.0, 2.0], "b": C}).p == pytest.approx(found.p)
    assert two_sided("b", "a", samples, paired=True).p is not None


def test_a_metric_that_an_experiment_lacks_leaves_its_cells_empty() -> None:
    samples = THREE | {"b": {}, "c": {2: 6.0}}
    tested = significance("auc", samples, paired=False)
    assert tested.anova.why == "fewer than two seeds of b, c have this metric"
    assert tested.pairs["c", "a"].why == "fewer than two seeds of c have this metric"
    assert {found.p for found in tested.pairs.values()} == {None}


def test_pairs_need_the_same_seeds() -> None:
    samples = {"a": by_seed(*A), "b": {0: 2.0, 1: 3.0}}
    assert significance("auc", samples, paired=False).anova.p is not None
    with pytest.raises(SettingError) as caught:
        significance("auc", samples, paired=True)
    assert str(caught.value) == (
        "--paired needs metric 'auc' for the same seeds, but 'a' has it for seeds 0, 1, 2 and "
        "'b' has it for seeds 0, 1: remove '--paired' or this metric"
    )


def test_notes_say_what_seeds_vary_and_what_is_corrected_for() -> None:
    tested = significance("auc", THREE, paired=False)
    told = " ".join(notes(tested, 3, paired=False, same_split=True))
    assert "t-tests over 3 seeds, multiplied by the number of pairs, 3 (Bonferroni" in told
    assert "which these tests ignore; '--paired'" in told
    assert "but not the split, so p says nothing about other patients" in told
    told = " ".join(notes(tested, 3, paired=True, same_split=False))
    assert "paired t-tests, by seed, over 3 seeds" in told
    assert "'--paired'" not in told
    assert "and the split; training data overlap between splits, so p is too small" in told
    (*_, told) = notes(tested, 3, paired=True, same_split=None)
    assert told.endswith("these sites do not report whether the split varies too")
