"""Every task and two regressions, by hospitals as processes whose names are in other scripts.

Two hospitals run on the server's machine. 東京 joins by a kit, from a folder with only its own
files. All runs use one server, over TLS.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedsilo
from fedsilo.cli.main import main
from fedsilo.client_app.site.node import OWN
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.processes import app_folder, free_ports
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import image_reader
from fedsilo.deployment.deployment import Deployment, read_deployment
from fedsilo.deployment.flower_commands import list_online_sites
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.deploy.conftest import LOW, _give_seed, _toml
from tests.support.deployed import ended_with_tests
from tests.support.task_folders import DATA, write_tasks

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDSILO_DEPLOY") != "1", reason="takes minutes: make test-deploy"
)
HERE, AWAY = ("Süd", "St. Mary's"), "東京"
SITES = sorted((*HERE, AWAY))
EXPERIMENTS = {
    "regression": "fedavg-pulse",
    "multi-label": "fedavg-findings",
    "segmentation": "fedavg-vessel-masks",
    "survival": "fedavg-survival",
}
SMALL: Mapping[str, Value] = {
    "rounds": 2,
    "seed": 7,
    "train.batch-size": 8,
    "machine.device": "cpu",
    "server.aggregation": "mean",
    "privacy.sums-min-count": 1,
}
NARROW = {"network.width": 4}
# The label of the table is the time to an event, which a logistic regression does not explain
FITS = {"logistic": ("--outcome", "treated", "--set", "task=survival"), "cox": ()}
_LIMIT = 300.0  # seconds until all hospitals are online
_CONFIG = [part for key, value in LOW.items() for part in ("--node-config", _toml(key, value))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data of all hospitals."""
    return write_tasks(tmp_path_factory.mktemp("data") / "all", SITES)


@pytest.fixture(scope="module")
def deployment(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start the server, two hospitals beside it, and the third one by its kit."""
    root = tmp_path_factory.mktemp("tasks")
    folder, home = root / "deployment", root / "away"
    there = ("--deployment", str(folder))
    with ended_with_tests(root):
        started: list[subprocess.Popen[bytes]] = []
        try:
            words = ["--host", f"localhost:{free_ports(1)[0]}", "--data-dir", str(data)]
            for site in HERE:
                words += ["--site", site]
            assert main(["deploy", "up", *words, *_CONFIG, *there]) == 0
            assert main(["deploy", "add", AWAY, *there]) == 0
            (kit,) = (folder / "kits").iterdir()
            command = [sys.executable, "-m", "fedsilo.cli", "hospital", "start", str(kit)]
            command += ["--trust", "server", "--yes", "--device", "cpu", "--folder", str(home)]
            command += ["--data-dir", str(_own_files(data, root / "own")), *_CONFIG]
            log = (root / "away.log").open("wb")
            process = subprocess.Popen(command, cwd=app_folder(), stdout=log, stderr=log)
            started.append(process)
            limit = time.monotonic() + _LIMIT
            while sorted(list_online_sites(read_deployment(folder))) != SITES:
                assert time.monotonic() < limit, (root / "away.log").read_text()
                time.sleep(0.5)
            made = read_deployment(folder)
            for site, state in states(made).items():
                _give_seed(state / OWN / folder_name(site))
            yield made
        finally:
            assert main(["deploy", "down", *there]) == 0
    for process in started:
        process.wait()


def states(deployment: Deployment) -> dict[str, Path]:
    """Return the folder of each hospital's private state."""
    found = {AWAY: deployment.folder.parent / "away" / "state"}
    for site in HERE:
        found[site] = Path(str(deployment.node_config[site]["state-dir"]))
    return found


def _own_files(data: Path, own: Path) -> Path:
    """Copy what the hospital away has: the declarations that all share, and its own files."""
    own.mkdir()
    for path in data.iterdir():
        if path.suffix == ".yaml" or path.stem == AWAY:
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, own / path.name)
    return own


def _settings(task: str) -> dict[str, Value]:
    # A hospital refuses folds unless its node config allows them, and this experiment has some
    own = {"split.val-folds": 0} if task == "survival" else NARROW
    return {**SMALL, **DATA[task], **own}


def _changes(values: Mapping[str, Value]) -> list[str]:
    return [f"--set={key}={json.dumps(value)}" for key, value in values.items()]


@pytest.fixture(scope="module")
def run(deployment: Deployment) -> Callable[[str], RunDirectory]:
    """Return a function that returns a task's run on the deployment, which it starts once."""
    runs: dict[str, RunDirectory] = {}

    def of(task: str) -> RunDirectory:
        if task not in runs:
            words = ["--name", task, "--deployment", str(deployment.folder)]
            words += _changes(_settings(task))
            assert main(["deploy", "run", EXPERIMENTS[task], *words]) == 0
            runs[task] = RunDirectory(deployment.runs / task)
        return runs[task]

    return of


@pytest.mark.parametrize("task", DATA)
def test_each_task_ends_with_the_simulations_bits(
    task: str,
    run: Callable[[str], RunDirectory],
    data: Path,
    tmp_path: Path,
    same: Callable[[RunDirectory, RunDirectory], None],
) -> None:
    found = run(task)
    settings = {**_settings(task), "data.dir": str(data)}
    simulated = fedsilo.simulate(
        EXPERIMENTS[task], settings=settings, out=tmp_path, name="run", no_pictures=True
    )
    same(found, RunDirectory(simulated.path))
    assert sorted(found.read_json("silos.json")) == SITES


def write_case(task: str, own: Path, place: Path) -> tuple[str, Path]:
    """Write one new case, and return predict's name for its kind of source, and the source."""
    if task == "survival":
        place.write_text("age,dose,treated\n61.5,1.2,1\n")
        return "table", place
    place.mkdir()
    if task == "multi-label":  # arrays have no files of images
        np.save(place / "3.npy", np.asarray(Image.open(own / "3.png"))[None])
    else:
        shutil.copy(own / "3.png", place)
    return "images", place


@pytest.mark.parametrize("task", DATA)
def test_an_exported_program_and_predict_answer_one_case_alike(
    task: str, run: Callable[[str], RunDirectory], data: Path, tmp_path: Path
) -> None:
    """The hospital copies the run directory, and predicts where its data are."""
    folder = shutil.copytree(run(task).path, tmp_path / "run")
    site = SITES[0]
    found = fedsilo.export(folder, "pt2", site=site, data_dir=data)
    program: Any = torch.export.load(found.folder / "model.pt2").module()
    model = FinishedRun.open(folder).model(site, data_dir=data)
    source, case = write_case(task, data / site, tmp_path / "case")
    if task == "survival":
        inputs = torch.tensor([[61.5, 1.2, 1.0]])
    else:
        (path,) = case.iterdir()
        inputs = torch.from_numpy(image_reader(site, model.common)(path))[None]
    with torch.no_grad():
        answers = program(inputs).double()
    if task == "segmentation":
        out = tmp_path / "masks"
        masks = fedsilo.predict(folder, site=site, data_dir=data, out=out, images=case)
        (mask,) = masks.folder.glob("*.png")
        assert np.array_equal(np.asarray(Image.open(mask)), answers[0].argmax(dim=0).numpy())
        return
    given = {source: case, "answer_all": True}
    predicted = fedsilo.predict(folder, site=site, data_dir=data, **given)
    assert torch.allclose(predicted.own, answers, rtol=1e-5)


def test_a_report_of_all_tasks_names_the_hospitals(
    run: Callable[[str], RunDirectory], tmp_path: Path
) -> None:
    for task in DATA:
        page = tmp_path / f"{task}.html"
        assert main(["report", str(run(task).path), "--out", str(page)]) == 0
        text = page.read_text()
        assert all(site.replace("'", "&#39;") in text for site in SITES)


@pytest.fixture(scope="module")
def compared(deployment: Deployment) -> None:
    """Compare the keys of the hospital away and of the others, as people would by telephone."""
    folders = states(deployment)
    codes = {site: fedsilo_keys(folders[site], site)[0] for site in SITES}
    for site in HERE:
        fedsilo_keys(folders[site], site, "--compared", f"{AWAY}={codes[AWAY]}")
    marks = [word for site in HERE for word in ("--compared", f"{site}={codes[site]}")]
    fedsilo_keys(folders[AWAY], AWAY, *marks)


def fedsilo_keys(folder: Path, site: str, *words: str) -> list[str]:
    """Return the codes that ``fedsilo hospital keys`` prints, the hospital's own first."""
    command = [sys.executable, "-m", "fedsilo.cli", "hospital", "keys", str(folder), *words]
    done = subprocess.run(command, cwd=app_folder(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith(site)
    return re.findall(r"[0-9a-f]{4}(?:-[0-9a-f]{4}){7}", done.stdout)


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("family", FITS)
def test_a_fit_at_sums_is_the_simulations(
    family: str, deployment: Deployment, data: Path, tmp_path: Path
) -> None:
    words = ["fit", family, *FITS[family], "--dataset", "table", "--columns", "age,dose"]
    words += ["--trust", "sums", "--name", family]
    assert main([*words, "--deployment", str(deployment.folder)]) == 0
    assert main([*words, "--out", str(tmp_path), "--set", f"data.dir={data}"]) == 0
    found, simulated = (
        json.loads((folder / family / "fit.json").read_text())
        for folder in (deployment.runs, tmp_path)
    )
    assert found["patients"] == simulated["patients"] == 60 * len(SITES)
    for ours, theirs in zip(found["coefficients"], simulated["coefficients"], strict=True):
        assert ours["name"] == theirs["name"]
        for key in ("estimate", "standard-error"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6)
