"""Table 1 of the PICSR paper: who publishes what, and for which runs."""

from typing import Any

import pytest

from fedsilo.core.methods import settings_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.runs.published.published_numbers import Numbers, paper, published_numbers

HOSPITALS = ("cleveland", "hungary", "switzerland", "va")
COLUMNS = ("Local", "Ensemble", "FedAvg", "FedAvg+FT", "FedProx", "PICSR")


def published(method: str, sites: tuple[str, ...] = HOSPITALS, **common: Any) -> Numbers:
    settings = CommonSettings(**{"method": method, "dataset": "heart"} | common)
    values = as_mapping(settings) | as_mapping(settings_class(method)())
    return published_numbers(values, sites).numbers


# Papers have the mean as a percentage of two digits; FedAvg+FT's 82.825 is printed as 82.83.
@pytest.mark.parametrize(
    ("method", "column", "mean", "cleveland", "va"),
    [
        ("local", "Local", 80.49, (77.31, 0.77), (76.89, 2.27)),
        ("ensemble", "Ensemble", 79.43, (79.81, 1.92), (77.78, 3.14)),
        ("fedavg", "FedAvg", 81.50, (75.77, 1.96), (80.44, 1.66)),
        ("fedavg-ft", "FedAvg+FT", 82.83, (77.12, 0.38), (81.78, 0.89)),
        ("fedprox", "FedProx", 81.47, (76.92, 0.61), (81.33, 1.09)),
        ("picsr", "PICSR", 82.81, (77.88, 2.11), (82.67, 1.66)),
    ],
)
def test_each_method_has_its_own_column_and_the_mean_of_four(
    method: str,
    column: str,
    mean: float,
    cleveland: tuple[float, float],
    va: tuple[float, float],
) -> None:
    found = published(method)
    (row,) = (row for row in paper("picsr").rows if row.name == column)
    assert {site: found[site] for site in HOSPITALS} == row.numbers_by_part()
    assert list(found) == [*HOSPITALS, "all"]
    for site, (accuracy, sd) in (("cleveland", cleveland), ("va", va)):
        assert found[site]["accuracy"] == pytest.approx(accuracy / 100)
        assert found[site]["accuracy-sd"] == pytest.approx(sd / 100)
    assert 100 * found["all"]["accuracy"] == pytest.approx(mean, abs=0.0051)
    assert found["all"]["accuracy"] == pytest.approx(
        sum(found[site]["accuracy"] for site in HOSPITALS) / 4
    )


# Accuracies are means of five runs over so many test patients.
@pytest.mark.parametrize(
    ("site", "patients"),
    [("cleveland", 104), ("hungary", 89), ("switzerland", 16), ("va", 45)],
)
@pytest.mark.parametrize("column", COLUMNS)
def test_numbers_are_shares_of_the_test_patients_over_five_runs(
    column: str, site: str, patients: int
) -> None:
    (found,) = (row.numbers_by_part() for row in paper("picsr").rows if row.name == column)
    right = found[site]["accuracy"] * 5 * patients
    assert right == pytest.approx(round(right), abs=0.5e-4 * 5 * patients + 1e-9)


@pytest.mark.parametrize("method", ["local", "ensemble", "fedavg", "fedavg-ft", "fedprox", "picsr"])
@pytest.mark.parametrize(
    "common",
    [{"test_folds": 5}, {"val_folds": 5}, {"use_test": False}, {"dataset": "heart-synthetic"}],
)
def test_run_of_another_split_or_other_patients_has_no_numbers(
    method: str, common: dict[str, Any]
) -> None:
    assert published(method, **common) == {}


@pytest.mark.parametrize("missing", HOSPITALS)
def test_run_of_fewer_hospitals_has_no_numbers(missing: str) -> None:
    there = tuple(name for name in HOSPITALS if name != missing)
    assert published("picsr", there) == {}


def test_run_of_one_more_hospital_has_no_numbers() -> None:
    assert published("picsr", (*HOSPITALS, "st.mary")) == {}


@pytest.mark.parametrize("method", ["uefl", "mix", "moon", "fedavgm", "fedadam"])
def test_method_that_is_not_in_the_table_has_no_numbers(method: str) -> None:
    assert published(method) == {}
