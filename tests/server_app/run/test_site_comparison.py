"""What a server says of columns in another unit and of equal samples, and when it says nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts, Sums
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.server_app.run.checks import DOCTOR_NOTICES, NOTICES, find_notices
from fedsilo.server_app.run.site_comparison import (
    equal_samples,
    find_unlike_columns,
    unlike_columns,
    unlike_columns_document,
)
from fedsilo.strategies.meeting.participants import Participants
from tests.support.data_folders import write_tables

HEART = CommonSettings(dataset="heart-synthetic")
FEATURES = ("age", "chol")


def _sums(*means: float, count: int = 20) -> Sums:
    """Return the sums of ``count`` values of each feature, with a deviation of a fifth."""
    known, mean = np.full(len(means), count), np.array(means)
    return Sums(known, mean * known, 1.04 * mean**2 * known)


def _met(simulated: bool = False, **sums: Sums | None) -> Participants:
    facts = {}
    for site, own in sums.items():
        facts[site] = SiteFacts(
            site, site, (2,), 2, {"train": [10, 10]}, {}, simulated, features=FEATURES, sums=own
        )
    return Participants(facts, {site: place for place, site in enumerate(facts)})


MMOL = _met(north=_sums(50, 200), south=_sums(52, 210), west=_sums(51, 5.2))


def test_a_site_in_another_unit_is_named_with_its_column_and_both_means() -> None:
    (line,) = unlike_columns(MMOL, HEART)
    for said in ("serum cholesterol (chol, mg/dl)", "west", "5.2", "200", "mmol/l"):
        assert said in line
    for notices in (NOTICES, DOCTOR_NOTICES):
        assert line in find_notices(notices, MMOL, HEART)


def test_summary_and_reports_get_the_column_and_the_site_but_no_mean() -> None:
    (entry,) = unlike_columns_document(MMOL, HEART)
    assert entry.keys() == {"column", "title", "site", "relation", "question"}
    assert (entry["column"], entry["site"]) == ("chol", "west")
    assert "5.2" not in str(entry)
    assert "200" not in str(entry)
    assert unlike_columns_document(_met(a=_sums(50, 200), b=_sums(51, 200)), HEART) == []


@pytest.mark.parametrize("trust", ["sums", "nobody"])
@pytest.mark.parametrize("simulated", [True, False])
def test_nothing_is_compared_at_other_levels_of_trust(trust: str, simulated: bool) -> None:
    common = dataclasses.replace(HEART, trust=trust)
    met = _met(simulated, north=_sums(50, 200), south=_sums(52, 210), west=_sums(51, 5.2))
    assert find_unlike_columns(met, common) == []
    facts = {}
    for site, own in met.facts.items():
        facts[site] = dataclasses.replace(own, fingerprints={"train": "a" * 64})
    assert list(equal_samples(dataclasses.replace(met, facts=facts), common)) == []


def test_without_sums_nothing_is_compared() -> None:
    assert find_unlike_columns(_met(a=None, b=None), HEART) == []


def test_a_site_below_the_floor_of_any_site_or_the_run_is_not_named() -> None:
    sums = {"a": _sums(50, 200), "b": _sums(52, 210), "small": _sums(51, 5.2, count=9)}
    assert find_unlike_columns(_met(**sums), HEART) == [], "the run's own floor is 10"
    lower = dataclasses.replace(HEART, sums_min_count=5)
    met = _met(**sums)
    assert [one.site for one in find_unlike_columns(met, lower)] == ["small"]
    facts = dict(met.facts)
    facts["small"] = dataclasses.replace(facts["small"], floor=10)
    assert find_unlike_columns(dataclasses.replace(met, facts=facts), lower) == []


def test_many_unlike_columns_are_counted() -> None:
    names = tuple(f"c{number}" for number in range(12))
    met = _met(a=_sums(*[1000.0] * 12), b=_sums(*[10.0] * 12))
    facts = {}
    for site, own in met.facts.items():
        facts[site] = dataclasses.replace(own, features=names)
    lines = list(unlike_columns(dataclasses.replace(met, facts=facts), HEART))
    assert len(lines) == 11
    assert lines[-1].startswith("2 more")


# --- Equal samples ---


@pytest.fixture
def tables(tmp_path: Path) -> CommonSettings:
    """Return the settings of two sites' tables without a row in common."""
    data = write_tables(tmp_path / "data")
    for first, site in ((0, "north"), (100, "south")):
        rows = [f"p{age},{age},a,{age % 2}" for age in range(first, first + 30)]
        (data / f"{site}.csv").write_text("\n".join(["record,age,kind,ill", *rows]) + "\n")
    return CommonSettings(
        dataset="table", data_dir=str(data), cache_dir=str(tmp_path / "cache"), sums_min_count=1
    )


def _simulated(common: CommonSettings, **changes: Any) -> Participants:
    facts = {}
    for name in silo_names(common):
        silo = load_silo(name, common)
        facts[name] = SiteFacts(
            name,
            name,
            silo.shape.input_shape,
            2,
            silo.label_counts(),
            silo.fingerprints,
            **{"simulated": True, **changes},
        )
    return Participants(facts, {name: place for place, name in enumerate(facts)})


def test_rows_of_two_simulated_sites_are_counted_and_no_site_is_named(
    tables: CommonSettings,
) -> None:
    south, north = (Path(tables.data_dir) / f"{site}.csv" for site in ("south", "north"))
    assert list(equal_samples(_simulated(tables), tables)) == []
    lines = north.read_text().splitlines()
    south.write_text("\n".join([*south.read_text().splitlines(), *lines[1:4]]) + "\n")
    (line,) = equal_samples(_simulated(tables), tables)
    assert line.startswith("3 samples")
    assert "north" not in line
    assert "south" not in line
    assert list(equal_samples(_simulated(tables, simulated=False), tables)) == []


def test_of_real_sites_only_whole_splits_are_compared(tables: CommonSettings) -> None:
    met = _simulated(tables, simulated=False)
    facts = dict(met.facts)
    same = {**facts["south"].fingerprints, "test": facts["north"].fingerprints["test"]}
    facts["south"] = dataclasses.replace(facts["south"], fingerprints=same)
    (line,) = equal_samples(dataclasses.replace(met, facts=facts), tables)
    assert line.startswith(f"{facts['south'].sizes['test']} samples")
