"""A comparison as LaTeX: what is bold, what the caption says, and whether LaTeX takes it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedsilo.comparison.budgets import Budget, Budgets
from fedsilo.comparison.latex import escape_latex, latex_text
from fedsilo.comparison.significance import significance
from fedsilo.comparison.tables import tidy
from fedsilo.core.errors import SettingError
from fedsilo.core.metric_names import best_direction, metric_range

ODD = r"[S\üd_50%] & {St. $Mary's} ~^#<>|"


def results(**values: dict[str, list[float]]) -> pd.DataFrame:
    """Build tidy results of the group 'all': experiment -> metric -> a value per seed."""
    records: list[tuple[Any, ...]] = []
    for name, metrics in values.items():
        for metric, by_seed in metrics.items():
            for seed, value in enumerate(by_seed):
                records.append((name, name, seed, "all", metric, value, None, None))
    return tidy(records)


TWO = results(
    slow={"auc": [0.5, 0.6, 0.7], "loss": [1.0, 1.0, 1.3], "entropy": [0.1, 0.2, 0.3]},
    fast={"auc": [0.7, 0.8, 0.9], "loss": [2.0, 2.0, 2.0], "entropy": [0.4, 0.5, 0.6]},
)
BUDGET = Budget("digits", {"rounds": 4}, 3, (4, 4), 100.0, 1600.0)


def text_of(frame: pd.DataFrame, *tested: Any, **budgets: Budget) -> str:
    return latex_text(frame, "test", tested, Budgets(budgets))


def test_the_best_mean_is_bold_and_its_interval_stands_below() -> None:
    rows = text_of(TWO).splitlines()
    slow = next(row for row in rows if row.strip().startswith("slow"))
    fast = next(row for row in rows if row.strip().startswith("fast"))
    assert r"\textbf{0.800 $\pm$ 0.100}" in fast
    assert r"\textbf{1.100 $\pm$ 0.173}" in slow
    assert "0.500 $" in fast
    assert r"\textbf{0.500" not in fast, "entropy has no better direction"
    # 0.8 -+ t(0.975, 2) * 0.1 / sqrt 3 = 0.8 -+ 0.248, and no AUC is above 1
    assert "{[}0.552, 1.000]" in rows[rows.index(fast) + 1]


def test_means_that_look_equal_are_both_bold_or_neither() -> None:
    three = results(a={"auc": [0.70001]}, b={"auc": [0.7]}, c={"auc": [0.6]})
    assert text_of(three).count(r"\textbf{0.700}") == 2
    assert "bold" not in text_of(results(a={"auc": [0.70001]}, b={"auc": [0.7]}))


def test_the_caption_says_what_was_equal_or_what_was_not() -> None:
    equal = text_of(TWO, slow=BUDGET, fast=BUDGET)
    assert "4 rounds, 100 optimiser steps on 1,600 samples over all sites" in equal
    assert "3 tuning points" in equal
    other = Budget("digits", {"rounds": 4}, 0, (4, 4), 100.0, 1600.0)
    unequal = text_of(TWO, slow=BUDGET, fast=other)
    assert "All rows" not in unequal
    assert "tuned over 0 points, not 3" in unequal
    assert "fast *" in unequal


def test_a_test_is_a_table_of_its_own() -> None:
    samples = {"slow": dict(enumerate([0.5, 0.6, 0.7])), "fast": dict(enumerate([0.7, 0.8, 0.9]))}
    text = text_of(TWO, significance("auc", samples, paired=False))
    assert text.count(r"\begin{table}") == 2
    assert "fast & 0.070" in text


def test_letters_that_pdflatex_lacks_are_announced() -> None:
    values = {"auc": [0.5, 0.6]}
    assert "XeLaTeX" in text_of(results(東京=values, other=values)).splitlines()[0]
    assert "XeLaTeX" not in text_of(results(Süd=values, other=values))


def test_nothing_to_compare_is_refused() -> None:
    for frame in (results(a={"auc": [0.5]}), results(a={"auc": [0.5]}, b={"loss": [0.5]})):
        with pytest.raises(SettingError, match="--latex"):
            text_of(frame)


def test_directions_and_ranges_of_metrics() -> None:
    directions = {
        "auc": 1,
        "own-accuracy": 1,
        "trained-loss": -1,
        "loss": -1,
        "entropy": 0,
        "mine": 0,
    }
    assert {name: best_direction(name) for name in directions} == directions
    assert metric_range("balanced-accuracy-from-va") == (0.0, 1.0)
    assert metric_range("loss") == (0.0, float("inf"))
    assert metric_range("mine") == (-float("inf"), float("inf"))


def test_latex_compiles_with_names_that_it_would_read_as_commands(tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None or not _has_package("booktabs"):
        pytest.skip("no LaTeX with booktabs here: apt-get install texlive-latex-recommended")
    odd = TWO.replace("slow", ODD)
    samples = {ODD: dict(enumerate([0.5, 0.6, 0.7])), "b": dict(enumerate([0.7, 0.8, 0.9]))}
    table = text_of(odd, significance("auc", samples, paired=True), **{ODD: BUDGET, "fast": BUDGET})
    page = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    (tmp_path / "t.tex").write_text(f"{page}{table}\\end{{document}}\n")
    command = ["pdflatex", "-interaction=batchmode", "-halt-on-error", "t.tex"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 0, (tmp_path / "t.log").read_text()[-2000:]
    assert (tmp_path / "t.pdf").read_bytes().startswith(b"%PDF")


def _has_package(name: str) -> bool:
    found = subprocess.run(["kpsewhich", f"{name}.sty"], capture_output=True, check=False)
    return found.returncode == 0


def test_an_escaped_text_is_one_line() -> None:
    assert escape_latex("a\nb_c") == r"a b\_c"


def test_the_caption_says_what_one_seed_a_median_and_several_data_sets_are() -> None:
    one = results(slow={"auc": [0.5]}, fast={"auc": [0.7]})
    assert "values of one seed" in text_of(one, slow=BUDGET, fast=BUDGET)
    median = latex_text(TWO, "test", (), Budgets({"slow": BUDGET, "fast": BUDGET}), median=True)
    assert "median and range over 3 seeds" in median
    assert "scriptsize" not in median, "a median has no interval"
    other = Budget("heart", {"rounds": 4}, 3, (4, 4), 100.0, 1600.0)
    assert "Rows on one data set had the same rounds" in text_of(TWO, slow=BUDGET, fast=other)


def test_near_budgets_are_a_range_and_untuned_settings_are_named() -> None:
    one = Budget("digits", {"rounds": 4}, 0, (4, 4), 100.0, 1600.0)
    other = Budget("digits", {"rounds": 4}, 0, (4, 4), 104.0, 1600.0)
    text = text_of(TWO, slow=one, fast=other)
    assert "100 to 104 optimiser steps on 1,600 samples" in text
    assert "untuned settings" in text


def test_a_metric_that_an_experiment_lacks_is_an_empty_cell_and_fewer_seeds_are_named() -> None:
    text = text_of(
        results(slow={"auc": [0.5, 0.6], "loss": [1.0]}, fast={"auc": [0.7, 0.8]}),
        slow=BUDGET,
        fast=BUDGET,
    )
    assert "(1 of 2 seeds)" in text
    fast = next(row for row in text.splitlines() if row.strip().startswith("fast"))
    assert fast.rstrip(" \\").endswith("&")
