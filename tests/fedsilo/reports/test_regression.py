"""A finished regression as tables, from documents of which every number can be checked by hand."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from fedsilo.core.errors import RunDirectoryError
from fedsilo.reports.regression import Regression, format_effect, format_p
from tests.support.errors import refuses

# log(2), and an error whose 95 % interval is a factor of 2 in both directions
LOG2, ERROR = 0.6931471805599453, 0.35365297914
AGE = {
    "name": "age",
    "estimate": LOG2,
    "standard-error": ERROR,
    "statistic": 1.96,
    "p": 0.0499958,
    "low": 0.0,
    "high": 2 * LOG2,
    "ratio-estimate": 2.0,
    "ratio-low": 1.0,
    "ratio-high": 4.0,
}
OWN = {key: AGE[key] for key in ("estimate", "standard-error", "statistic", "p")}
LOGISTIC: dict[str, Any] = {
    "family": "logistic",
    "dataset": "hearts",
    "outcome": "died",
    "patients": 30,
    "hospitals": ["north", "south"],
    "log-likelihood": -12.5,
    "aic": 29.0,
    "rounds": 4,
    "trust": "server",
    "coefficients": [AGE],
    "heterogeneity": [
        {
            "name": "age",
            "sites": {"north": OWN, "south": OWN},
            "count": 2,
            "fixed": LOG2,
            "fixed-error": ERROR,
            "random": LOG2,
            "random-error": ERROR,
            "i-squared": 0.25,
            "p": 0.0001,
        },
        # Only one hospital has a fit of its own here, so nothing is compared
        {"name": "dose", "sites": {"north": OWN}},
    ],
    "sites-without-fit": ["east"],
}


def _regression(**changes: Any) -> Regression:
    return Regression(Path(), {**LOGISTIC, **changes})


def _cells(table: Table | str) -> dict[str, list[str]]:
    """Return a table's cells by the heading of their column."""
    assert isinstance(table, Table)
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def test_a_logistic_regression_has_odds_ratios_and_the_differences_of_hospitals() -> None:
    table, measures, differences, lacking = _regression().lines()
    assert _cells(table) == {
        "": ["age"],
        "coefficient": ["0.69315"],
        "std. error": ["0.3537"],
        "odds ratio": ["2.0000"],
        "95 % CI of odds ratio": ["1.0000 to 4.0000"],
        "z": ["1.96"],
        "p": ["0.050"],
    }
    for number in ("30 patients", "2 hospitals", "-12.500", "29.00", "4 rounds", "'server'"):
        assert number in str(measures)
    assert _cells(differences) == {
        "": ["age"],
        "hospitals": ["2"],
        "fixed effect": ["2.0000 (1.0000 to 4.0000)"],
        "random effects": ["2.0000 (1.0000 to 4.0000)"],
        "I²": ["25 %"],
        "p of Q": ["<0.001"],
    }
    assert "east" in str(lacking)


def test_a_linear_regression_has_coefficients_and_no_ratios() -> None:
    regression = _regression(family="linear", heterogeneity=[], **{"sites-without-fit": []})
    assert regression.ratio == ""
    table, _ = regression.lines()
    assert list(_cells(table)) == ["", "coefficient", "std. error", "95 % CI", "t", "p"]
    assert _cells(table)["95 % CI"] == ["0 to 1.3863"]
    middle, low, high = regression.effect(1.0, 2.0)
    assert (middle, round(low, 2), round(high, 2)) == (1.0, -2.92, 4.92)


def test_a_cox_regression_names_time_events_and_ties() -> None:
    table, measures, *_ = _regression(family="cox", time="months", events=7, ties="efron").lines()
    assert isinstance(table, Table)
    assert "months to died" in str(table.title)
    assert "hazard ratio" in _cells(table)
    assert "7 events" in str(measures)
    assert "Efron" in str(measures)


def test_a_ratio_too_large_for_a_float_stays_a_number() -> None:
    assert _regression().effect(1e6, 1.0)[0] == pytest.approx(1.0142320547350045e304)


def test_csv_and_latex_have_the_pooled_and_each_hospitals_own_coefficients(tmp_path: Path) -> None:
    regression = _regression()
    regression.write(tmp_path / "fit.csv", None)
    assert [path.name for path in tmp_path.iterdir()] == ["fit.csv"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "fit.csv").read_text())))
    named = [(row["hospital"], row["name"]) for row in rows]
    assert named == [("all", "age"), ("north", "age"), ("south", "age"), ("north", "dose")]
    assert {float(row["estimate"]) for row in rows} == {LOG2}
    regression.write(None, tmp_path / "fit.tex")
    latex = (tmp_path / "fit.tex").read_text()
    assert r"95 \% CI" in latex
    assert "1.0000 to 4.0000" in latex


def test_a_run_is_read_by_its_document_and_one_without_it_is_refused(tmp_path: Path) -> None:
    with refuses(RunDirectoryError, tmp_path, "fit.json"):
        Regression.read(tmp_path)
    (tmp_path / "fit.json").write_text("{")
    with refuses(RunDirectoryError, tmp_path, "fit.json"):
        Regression.read(tmp_path)
    (tmp_path / "fit.json").write_text(json.dumps(LOGISTIC))
    assert Regression.read(tmp_path).coefficients == [AGE]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1000"),
        (99.99, "99.9900"),
        (0.05, "0.05"),
        (12345.0, "1.234e+04"),
        (-2.0, "-2.0000"),
    ],
)
def test_an_effect_has_four_decimals_or_four_digits(value: float, text: str) -> None:
    assert format_effect(value) == text


def test_a_small_p_is_a_bound() -> None:
    assert (format_p(0.00099), format_p(0.001)) == ("<0.001", "0.001")
