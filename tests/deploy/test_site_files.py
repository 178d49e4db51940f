"""What hospitals allow, as processes: asked for more, they say no, and both sides' logs say why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory

SITES = 2
SITE_FILE = """
methods: [fedavg]
datasets: [digits, mnist]
records: ["config/*", "metrics/*", "arrays/*"]
"""
NODE_CONFIG: dict[str, Value] = {"data-dir": "/there/is/no/such/folder"}
Tiny = Callable[..., dict[str, Value]]
Deployed = Callable[..., tuple[int, RunDirectory]]


def _audit(folder: Path, site: str) -> list[dict[str, Any]]:
    log = folder / "sites" / site / "state" / ".own" / site / "audit.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_each_message_of_an_allowed_run_is_in_each_hospitals_own_log(
    folder: Path, deployed: Deployed, tiny: Tiny
) -> None:
    values = tiny("fedavg", silos=SITES, rounds=1)
    code, _ = deployed(values, "allowed")
    assert code == 0
    for site in read_deployment(folder).sites:
        lines = _audit(folder, site)
        assert [line["outcome"] for line in lines] == ["answered"] * 3
        assert [line["kind"] for line in lines] == ["query.hello", "train", "evaluate"]
        assert lines[1]["records"]["metrics/num-examples"] == 1
        assert lines[1]["bytes-out"] > 1000


def test_a_method_that_no_hospital_allows_is_refused_and_both_sides_say_so(
    folder: Path, deployed: Deployed, tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    code, directory = deployed(tiny("uefl", silos=SITES), "forbidden")
    assert code == 1
    assert not (directory.path / "summary.json").exists()
    said = " ".join("".join(capfd.readouterr()).split())
    for site in read_deployment(folder).sites:
        last = _audit(folder, site)[-1]
        assert (last["method"], last["outcome"], last["records"]) == ("uefl", "refused", {})
        assert "method 'uefl'" in last["why"]
        assert last["why"] in " ".join(read_deployment(folder).log(site).read_text().split())
        named, _, reason = last["why"].partition(": ")  # sites of one reason share a line
        assert named == f"site {site}"
        assert named in said
        assert reason in said


def test_a_data_directory_that_is_not_there_is_named_at_both_sides(
    folder: Path, deployed: Deployed, tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = deployed(tiny("fedavg", silos=SITES, dataset="mnist"), "without-data")
    assert code == 1
    said = " ".join("".join(capfd.readouterr()).split())
    assert "(data-dir)/mnist" in said
    assert "/there/is/no/such/folder" not in said, "where a hospital's files lie is its own"
    for site in read_deployment(folder).sites:
        assert "(data-dir)/mnist" in _audit(folder, site)[-1]["why"]
        assert "/there/is/no/such/folder" in read_deployment(folder).log(site).read_text()
