"""docs/privacy.md: its epsilons are the accountant's, its table of methods is the code's."""

import re
from pathlib import Path

import pytest

from fedsilo.core.methods import METHODS, why_not_private
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import defaults, keys_in
from fedsilo.models.privacy.accountant import epsilon

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "privacy.md").read_text()
ROWS = [
    [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", PAGE, re.M)
]
STEPS = (100, 300, 1000, 3000)
EPSILONS = [[float(cell) for cell in row] for row in ROWS if re.fullmatch(r"[0-9.]+", row[0])]


@pytest.mark.parametrize("row", EPSILONS, ids=lambda row: f"q={row[0]:g}-z={row[1]:g}")
def test_the_table_of_epsilons_is_what_the_accountant_says(row: list[float]) -> None:
    rate, noise, *found = row
    wanted = [float(f"{epsilon({(noise, rate): steps}, 1e-5):.3g}") for steps in STEPS]
    assert found == wanted


def test_the_methods_that_are_refused_are_listed_with_their_reasons() -> None:
    listed = {row[0].strip("`"): row[1] for row in ROWS if row[0].strip("`") in METHODS}
    reasons = {name: why_not_private(name) for name in METHODS}
    assert listed == {name: f"it {reason}" for name, reason in reasons.items() if reason}


def test_each_setting_of_privacy_is_there_with_its_default() -> None:
    usual = defaults(CommonSettings)
    listed = {row[0].strip("`"): row[2] for row in ROWS if len(row) == 3 and "`" in row[0]}
    keys = {key for key in keys_in(CommonSettings, "privacy") if key in listed}
    assert keys == set(keys_in(CommonSettings, "privacy")) - {
        "privacy.trust",
        "privacy.sums-min-count",
    }
    assert all(float(listed[key]) == usual[key] for key in keys)
