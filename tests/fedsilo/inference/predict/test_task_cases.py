"""Pages of cases for numbers, findings, times and masks, and what else these runs can do."""

import re
from pathlib import Path

import pytest

import fedsilo
from fedsilo.core.settings_schema import Value
from fedsilo.runs.finished_run import FinishedRun

SMALL: dict[str, Value] = {
    "rounds": 1,
    "train.local-steps": 2,
    "train.mc-passes": 0,
    "network.width": 4,
    "machine.device": "cpu",
    "privacy.sums-min-count": 3,
}
# Task -> its data set; two of tables and two of images
DATA = {
    "regression": "heart-synthetic-pulse",
    "survival": "survival-synthetic",
    "multi-label": "chest-phantom",
    "segmentation": "vessels-synthetic",
}


def simulate(task: str, out: Path) -> FinishedRun:
    settings = {**SMALL, "task": task, "dataset": DATA[task]}
    if task == "segmentation":
        settings["data.image-size"] = 16
    run = fedsilo.simulate(
        "fedavg", settings=settings, out=out, name=task, engine="inline", no_pictures=True
    )
    return FinishedRun.open(run.path)


@pytest.fixture(scope="module", params=DATA)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return simulate(request.param, tmp_path_factory.mktemp(request.param))


def page_of(run: FinishedRun, folder: Path) -> str:
    html, out = folder / "page.html", folder / "out"
    fedsilo.predict(run.path, site=next(iter(run.silos)), split="test", html=html, out=out)
    return html.read_text()


def test_each_task_has_its_page_of_cases(run: FinishedRun, tmp_path: Path) -> None:
    page = page_of(run, tmp_path)
    assert "Not for clinical use" in page
    assert "nan" not in re.sub(r'src="[^"]*"', "", page)
    cases = page.split("<article")[1:]
    assert cases
    if run.task in ("regression", "survival"):
        assert "with the contribution of each to" in page
    else:
        assert 'src="data:image/png;base64,' in cases[0]
    expected = {"regression": 1, "multi-label": 3, "segmentation": 1}
    if run.task in expected:
        assert cases[0].count('<svg class="bar"') == expected[run.task]
    if run.task == "survival":
        assert "without the event at 10" in cases[0]
        ratios = [float(text) for text in re.findall(r"hazard is ([\d.]+) times", page)]
        assert len(ratios) == len(cases)


def test_a_report_and_a_card_of_each_task_speak_of_it_and_not_of_accuracy(
    run: FinishedRun, tmp_path: Path
) -> None:
    card = fedsilo.card(run.path, out=tmp_path / "card.md").read_text()
    pages = [card]
    for reader in ("clinic", "research"):
        (path,) = fedsilo.report(run.path, tmp_path / f"{reader}.html", reader=reader)
        pages.append(path.read_text())
    for page in pages:
        assert "accuracy" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_monitor_compares_the_features_of_every_task(run: FinishedRun, tmp_path: Path) -> None:
    site = next(iter(run.silos))
    if run.task in ("multi-label", "segmentation"):
        return
    model = run.model(site)
    names = [name for name in model.silo.features if "=" not in name]
    assert names
