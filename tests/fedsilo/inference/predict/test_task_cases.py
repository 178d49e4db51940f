"""Pages of cases for numbers, findings and times, and what reports say of these tasks."""

import re
from pathlib import Path

import numpy as np
import pytest

import fedsilo
from fedsilo.core.files.locations import Places
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.tables.heart import HEART_SYNTHETIC_PULSE
from fedsilo.inference.predict import case_details
from fedsilo.runs.finished_run import FinishedRun
from tests.support.data_folders import SITES, save_picture

SMALL: dict[str, Value] = {
    "rounds": 1,
    "train.local-steps": 2,
    "train.mc-passes": 0,
    "network.width": 4,
    "machine.device": "cpu",
    "privacy.sums-min-count": 3,
}
COUNT = 24  # images of a site


def write_times(folder: Path) -> None:
    """Write two sites' images with manifests of times and events; half of them have the event."""
    sites = ", ".join(f"{site}: {site}.csv" for site in SITES)
    (folder / "images.yaml").write_text(
        f"sites: {{{sites}}}\ntask: survival\nevent: relapse\nimage-size: 16\n"
    )
    rng = np.random.default_rng(0)
    for site in SITES:
        lines = ["path,time,event"]
        for number in range(COUNT):
            save_picture(folder / f"{site}{number}.png", rng)
            lines.append(f"{site}{number}.png,{1 + number},{number % 2}")
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")


def write_findings(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for site in SITES:
        x = rng.integers(0, 255, (COUNT, 1, 16, 16)).astype(np.uint8)
        y = rng.integers(0, 2, (COUNT, 2))
        np.savez(folder / f"{site}.npz", x=x, y=y, classes=np.array(["nodule", "mass"]))


# Kind of run -> its settings, and what writes its data
RUNS = {
    "numbers": ({"task": "regression", "dataset": "heart-synthetic-pulse"}, lambda _: None),
    "times": ({"task": "survival", "dataset": "survival-synthetic"}, lambda _: None),
    "images": ({"task": "survival", "dataset": "images"}, write_times),
    "findings": ({"task": "multi-label", "dataset": "arrays"}, write_findings),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp(request.param)
    settings, write = RUNS[request.param]
    write(folder)
    found = fedsilo.simulate(
        "fedavg",
        settings={**SMALL, **settings, "data.dir": str(folder)},
        out=folder / "runs",
        name=request.param,
        engine="inline",
        no_pictures=True,
    )
    return FinishedRun.open(found.path)


def site_of(run: FinishedRun) -> str:
    return next(iter(run.silos))


def test_each_case_has_its_answer_and_what_it_rests_on(
    run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_details, "PICTURES", 2)
    html = tmp_path / "page.html"
    found = fedsilo.predict(run.path, site=site_of(run), split="test", html=html)
    page = re.sub(r'src="data:[^"]*"', 'src="data:"', html.read_text())
    cases = page.split("<article")[1:]
    assert len(cases) == len(found.frame())
    assert "nan" not in page
    if run.path.name in ("numbers", "times"):
        assert page.count("with the contribution of each to") == len(cases)
    else:
        assert page.count('src="data:"') == 2
    if run.task == "survival":
        assert not {"predicted", "truth"} & set(found.document["columns"])
        risks = found.frame()["risk"]
        ratios = [float(text) for text in re.findall(r"hazard is ([\d.]+) times", page)]
        assert max(ratios) / min(ratios) == pytest.approx(np.exp(risks.max() - risks.min()), 0.1)
        assert "without the event at " in cases[0]
    bars = {"numbers": 1, "findings": 2}
    if run.path.name in bars:
        assert {case.count('<svg class="bar"') for case in cases} == {bars[run.path.name]}


@pytest.mark.parametrize("run", ["numbers"], indirect=True)
def test_what_each_column_adds_sums_to_the_number(run: FinishedRun) -> None:
    model = run.model(site_of(run))
    found = fedsilo.predict(run.path, site=site_of(run), split="test")
    reasons = case_details.reasons_of(model, found, [0])
    zeros = model.silo.test.inputs[:1] * 0
    mean = model.probabilities([zeros], "test")[0, 0].item()
    expected = found.probabilities[0, 0].item() - mean
    assert sum(reasons.adds[0].values()) == pytest.approx(expected, abs=1e-3)


def test_reports_and_the_card_speak_of_the_task_and_not_of_classes(
    run: FinishedRun, tmp_path: Path
) -> None:
    pages = [fedsilo.card(run.path, out=tmp_path / "card.md").read_text()]
    for reader in ("clinic", "research"):
        (path,) = fedsilo.report(run.path, tmp_path / f"{reader}.html", reader=reader)
        pages.append(path.read_text())
    for page in pages:
        assert not re.search(r"accuracy|sensitivity|--by", page)


@pytest.mark.parametrize("run", ["images"], indirect=True)
def test_a_manifest_with_times_is_new_cases_for_monitor_and_predict(run: FinishedRun) -> None:
    manifest = Path(run.settings.common.data_dir) / f"{site_of(run)}.csv"
    checked = fedsilo.monitor(run.path, data=manifest, site=site_of(run))
    assert [check.name for check in checked.checks] == [
        "distribution of brightness",
        "distribution of contrast",
    ]
    assert not checked.alarms
    predicted = fedsilo.predict(run.path, manifest=manifest, site=site_of(run), answer_all=True)
    assert len(predicted.frame()) == COUNT


@pytest.mark.parametrize("run", ["numbers"], indirect=True)
def test_monitor_compares_the_error_of_numbers_with_the_runs(
    run: FinishedRun, tmp_path: Path
) -> None:
    schema = HEART_SYNTHETIC_PULSE.schema(Places(None, tmp_path))
    lines, _ = HEART_SYNTHETIC_PULSE.lines_of(site_of(run), schema, Places(None, tmp_path))
    for name, shift in (("same.csv", 0), ("shifted.csv", 40)):
        rows = [",".join([*cells[:-1], str(int(cells[-1]) + shift)]) for _, cells in lines]
        (tmp_path / name).write_text("\n".join([",".join(schema.column_names()), *rows]) + "\n")
    same = fedsilo.monitor(run.path, data=tmp_path / "same.csv", site=site_of(run))
    assert [check.alarm for check in same.checks if check.name.startswith("MAE")] == [False]
    shifted = fedsilo.monitor(run.path, data=tmp_path / "shifted.csv", site=site_of(run))
    assert [check.name[:3] for check in shifted.alarms] == ["MAE"]


@pytest.mark.soak
@pytest.mark.parametrize("run", ["images", "numbers"], indirect=True)
def test_a_model_of_times_or_numbers_is_exported(run: FinishedRun) -> None:
    exported = fedsilo.export(run.path)
    assert (exported.folder / "model.pt2").is_file()
    assert exported.difference < 1e-4
