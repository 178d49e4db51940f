"""docs/run-directory.md is a contract: it names every file, column and key that a run writes."""

import csv
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.server_app.records.run_directory import RunDirectory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-directory.md"
# Their keys are sites, metrics and distributions, or sentences that the page describes
KEYED = ("silos.json", "summary.json", "privacy.json")


@pytest.fixture(scope="module")
def named() -> set[str]:
    """Return all that the page writes as code."""
    return set(re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", PAGE.read_text()))


@pytest.fixture
def noised(
    tiny: Callable[..., dict[str, Value]], inline_run: Callable[..., RunDirectory]
) -> RunDirectory:
    """Return a finished run with pictures and differential privacy."""
    values = tiny("fedavg", rounds=1, sample_clip_norm=1.0, noise_multiplier=6.0)
    return inline_run(values, draw=True)


def _of_a_family(metric: str, named: set[str]) -> bool:
    """Tell whether the page has a name with <places> that the metric fills."""
    families = (re.sub(r"<[a-z]+>", "[^.]+", re.escape(name)) for name in named if "<" in name)
    return any(re.fullmatch(family, metric) for family in families)


def test_the_page_names_all_that_a_run_writes(noised: RunDirectory, named: set[str]) -> None:
    files = {path.name for path in noised.path.iterdir()}
    vector = {name for name in files if name.endswith(".pdf")}
    assert vector == {f"{name[:-4]}.pdf" for name in files if name.endswith(".png")}
    assert files - vector <= {name.rstrip("/") for name in named}
    for file in ("metrics.csv", "traffic.csv"):
        with (noised.path / file).open(newline="") as rows:
            assert set(next(csv.reader(rows))) <= named, file
    metrics = {row["metric"] for row in noised.read_csv("metrics.csv")}
    unnamed = {metric.removeprefix("trained-") for metric in metrics} - named
    assert [metric for metric in unnamed if not _of_a_family(metric, named)] == []
    for file in KEYED:
        document = noised.read_json(file)
        keys = next(iter(document.values())) if file == "silos.json" else document
        assert set(keys) <= named, file
    assert set(noised.read_json("privacy.json")["guarantee"]) <= named
    config = tomllib.loads((noised.path / "config.toml").read_text())
    tables = {key for key, value in config.items() if isinstance(value, dict)}
    assert tables | set(config["environment"]) - {"packages"} <= named
    ledger = json.loads((noised.path / "sites/s1a/privacy-ledger.json").read_text())
    (((noise, rate, count),),) = ledger.values()
    # A local epoch over 36 samples, 16 a step on average
    assert (noise, rate, count) == (6.0, pytest.approx(16 / 36), 3)
