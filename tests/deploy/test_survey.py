"""Surveys of real data by hospitals as processes: heart disease, and skin lesions of HAM10000."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.main import main
from fedsilo.deployment.deployment import Deployment, read_deployment
from tests.support.deployed import ended_with_tests

SITE_FILE = """
methods: ["*"]
datasets: [heart, isic2019]
records: ["survey/*"]
"""
Up = Callable[[str, tuple[str, ...]], Deployment]


@pytest.fixture
def up(tmp_path: Path, real_data: Path) -> Iterator[Up]:
    """Return a function that brings up hospitals with the real data and a site file each."""
    if os.environ.get("FEDSILO_DEPLOY") != "1":
        pytest.skip("takes minutes: make test-deploy")
    folder, rules = tmp_path / "deployment", tmp_path / "site.yaml"

    def start(experiment: str, sites: tuple[str, ...]) -> Deployment:
        rules.write_text(SITE_FILE)
        named = [part for site in sites for part in ("--site", site)]
        told = ("--data-dir", str(real_data), "--node-config", f'site-file="{rules}"')
        cache = ("--node-config", f'cache-dir="{os.environ["FEDSILO_CACHE"]}"')
        assert (
            main(["deploy", "up", experiment, *named, "--deployment", str(folder), *told, *cache])
            == 0
        )
        return read_deployment(folder)

    with ended_with_tests(folder):
        yield start
    assert main(["deploy", "down", "--deployment", str(folder)]) == 0


def _survey(deployment: Deployment, experiment: str, name: str, *more: str) -> dict[str, Any]:
    told = ("--deployment", str(deployment.folder), "--name", name, *more)
    assert main(["survey", experiment, *told]) == 0
    assert (deployment.runs / name / "survey.html").stat().st_size > 10_000
    document: dict[str, Any] = json.loads((deployment.runs / name / "survey.json").read_text())
    return document


def test_four_hospitals_hearts_and_the_same_answer_again(up: Up) -> None:
    hospitals = ("cleveland", "hungary", "switzerland", "va")
    deployment = up("fedavg-heart", hospitals)
    first = _survey(deployment, "fedavg-heart", "first")
    assert list(first["sites"]) == list(hospitals)
    assert first["refused"] == []
    cleveland = first["sites"]["cleveland"]
    assert cleveland["samples"] == {"train": 199, "test": 104}
    assert cleveland["about"]["simulated"] is False
    assert first["sites"]["hungary"]["left-out"]["missing"]["chol"] == 23
    assert first["sites"]["switzerland"]["labels"]["train"] == [None, None]
    again = _survey(deployment, "fedavg-heart", "again", "--set", "privacy.sums-min-count=1")
    assert again["sites"] == first["sites"]
    (deployment.folder.parent / "site.yaml").write_text(SITE_FILE.replace("survey/*", "config/*"))
    told = ("--deployment", str(deployment.folder), "--name", "closed")
    assert main(["survey", "fedavg-heart", *told]) == 1
    assert not (deployment.runs / "closed").exists()


def test_four_centres_of_ham10000(up: Up, real_data: Path) -> None:
    centres = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    deployment = up("fedavg-isic2019", centres)
    data = ("--set", f"data.dir={real_data}", "--set", "data.image-size=32")
    found = _survey(deployment, "fedavg-isic2019", "skin", *data)
    assert list(found["sites"]) == sorted(centres)
    for site in found["sites"].values():
        assert [one["name"] for one in site["about"]["features"]][2:] == ["red", "green", "blue"]
        assert set(site["files"]) == {"width", "height", "bits a pixel"}
        counts = [count for cells in site["files"].values() for count in cells]
        assert all(count is None or count >= 10 for count in counts)
        low, high = site["file-percentiles"]["width"]
        assert 100 < low <= high < 10_000
        assert site["file-percentiles"]["bits a pixel"] == [24, 24]
    assert found["distances"]["train"]["features"][0]["distance"] > 0.1
