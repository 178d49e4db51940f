"""Runs of other tasks than classification, from a table or arrays to the run directory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedsilo
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.methods import METHODS, settings_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION
from fedsilo.datasets.images.arrays import ARRAYS
from fedsilo.datasets.images.manifests import IMAGES
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.tables.table_data_set import TABLE
from fedsilo.engines.inline_engine import run_inline
from fedsilo.engines.process_engine import run_with_processes
from fedsilo.inference.export.export import TOLERANCE, open_program
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.data_folders import save_picture
from tests.support.errors import refuses

PULSE: dict[str, Value] = {
    "method": "fedavg",
    "task": REGRESSION,
    "dataset": "heart-synthetic-pulse",
    "rounds": 2,
    "train.local-steps": 2,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}
SCHEMA = """
columns: [{name: age}]
label: {column: days, task: regression, unit: days}
sites: {north: north.csv}
test-share: 0.0
"""


def _settings(folder: Path) -> RunSettings:
    return resolve({**PULSE, "run.out": str(folder), "run.name": "run"})


def _files(directory: RunDirectory) -> list[bytes]:
    return [(directory.path / name).read_bytes() for name in ("metrics.csv", "model.safetensors")]


def test_a_regression_has_the_same_bits_by_both_engines(tmp_path: Path) -> None:
    inline = run_inline(_settings(tmp_path / "inline"), 4)
    resources = {"num-supernodes": 4, "client-resources-num-cpus": 1}
    processes = run_with_processes(_settings(tmp_path / "processes"), resources)
    assert _files(inline) == _files(processes)
    run = FinishedRun(inline.path)
    assert run.task == REGRESSION
    assert run.class_names() == ["thalach (beats per minute)"]
    assert {"mae", "rmse", "r2", "loss"} == run.summary["mean"].keys()
    assert not any("accuracy" in row["metric"] for row in run.metric_rows)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_needs_classes_is_refused_for_numbers(method: str) -> None:
    own = settings_class(method)
    assert bool(own.tasks) == bool(own.why_tasks)
    if own.tasks != (CLASSIFICATION,):
        return
    with pytest.raises(SettingError) as refused:
        resolve({**PULSE, "method": method})
    assert refused.value.code == "setting"
    assert f"'{method}'" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"), [("task", "classification"), ("train.loss", "evidential")]
)
def test_a_task_that_contradicts_the_data_is_refused(key: str, value: str) -> None:
    with pytest.raises(SettingError, match=key):
        resolve({**PULSE, key: value})


def table(folder: Path, *days: str) -> Places:
    (folder / "schema.yaml").write_text(SCHEMA)
    lines = [f"{60 + number},{text}" for number, text in enumerate(days)]
    (folder / "north.csv").write_text("\n".join(["age,days", *lines]))
    return Places(folder, folder / "cache")


def test_a_tables_outcome_is_a_number_and_rows_without_it_are_left_out(tmp_path: Path) -> None:
    silo = TABLE.load("north", CommonSettings(dataset="table"), table(tmp_path, "1", "?", "2.5"))
    assert silo.train.labels.tolist() == [1.0, 2.5]
    assert (silo.task, silo.dropped, silo.classes) == (REGRESSION, 1, ("days (days)",))
    assert silo.column_values().shape == (2, 2)


@pytest.mark.parametrize("text", ["soon", "inf", "1e99"])
def test_an_outcome_that_is_no_number_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="line 3, column 'days'"):
        TABLE.load("north", CommonSettings(dataset="table"), table(tmp_path, "1", text, "2"))


@pytest.mark.parametrize(("last", "notes"), [("2", 1), ("3", 0)])
def test_a_constant_outcome_is_said_in_the_sites_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: str, notes: int
) -> None:
    places = table(tmp_path, "2", "2", last)
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema.read_text().replace("north", tmp_path.name))
    (tmp_path / "north.csv").rename(tmp_path / f"{tmp_path.name}.csv")
    TABLE.load(tmp_path.name, CommonSettings(dataset="table"), places)
    assert sum("'train'" in record.getMessage() for record in caplog.records) == notes


def arrays(folder: Path, y: object) -> Places:
    x = np.random.default_rng(0).integers(0, 255, (6, 1, 16, 16)).astype(np.uint8)
    np.savez(folder / "north.npz", x=x, y=np.asarray(y), classes=np.array(["nodule", "effusion"]))
    return Places(folder, folder / "cache")


def test_arrays_have_several_findings(tmp_path: Path) -> None:
    common = CommonSettings(dataset="arrays", task=MULTI_LABEL)
    silo = ARRAYS.load("north", common, arrays(tmp_path, [[0, 1], [1, 1], [0, 0]] * 2))
    assert silo.train.labels.shape[1] == silo.shape.outputs == 2
    assert silo.task == MULTI_LABEL
    with pytest.raises(DataError, match="effusion"):
        ARRAYS.load("north", common, arrays(tmp_path, [[0, 2], [1, 1], [0, 0]] * 2))


@pytest.mark.parametrize(("cell", "place"), [("2", "line 3, column 'nodule'"), ("1", "")])
def test_a_manifest_has_several_findings(tmp_path: Path, cell: str, place: str) -> None:
    names = [f"{number}.png" for number in range(6)]
    rng = np.random.default_rng(0)
    for name in names:
        save_picture(tmp_path / name, rng)
    rows = [f"{name},{cell if name == '1.png' else 0},1" for name in names]
    (tmp_path / "north.csv").write_text("\n".join(["path,nodule,effusion", *rows]))
    declared = "sites: {north: north.csv}\ntask: multi-label\nfindings: [nodule, effusion]\n"
    (tmp_path / "images.yaml").write_text(f"{declared}image-size: 16\n")
    places = Places(tmp_path, tmp_path / "cache")
    common = CommonSettings(dataset="images", task=MULTI_LABEL)
    if place:
        with pytest.raises(DataError, match=place):
            IMAGES.load("north", common, places)
        return
    silo = IMAGES.load("north", common, places)
    assert silo.train.labels.sum(dim=0).tolist()[1] == len(silo.train)
    assert silo.classes == ("nodule", "effusion")


@pytest.fixture(scope="module", params=["survival-synthetic", "heart-synthetic-pulse"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a task whose answers are no class probabilities."""
    (task,) = data_set(request.param).tasks
    values = PULSE | {"dataset": request.param, "task": task, "rounds": 1}
    out = tmp_path_factory.mktemp(task)
    return run_inline(resolve({**values, "run.out": str(out), "run.name": "run"}), 4).path


@pytest.mark.parametrize(
    ("command", "look"),
    [
        ("explain", lambda run, site: fedsilo.explain(run, site=site)),
        ("calibrate", lambda run, site: fedsilo.calibrate(run, site)),
        ("--by", lambda run, site: fedsilo.report(run, "x.html", reader="clinic", by=["age"])),
        ("--coverage", lambda run, site: fedsilo.predict(run, split="test", coverage=0.9)),
    ],
)
def test_what_needs_class_probabilities_is_refused_for_other_answers(
    finished: Path, command: str, look: Callable[[Path, str], object]
) -> None:
    site = next(iter(FinishedRun(finished).silos))
    with refuses(SettingError, command, str(finished), "fedsilo predict"):
        look(finished, site)


def test_a_program_to_export_answers_what_the_task_predicts(finished: Path) -> None:
    run = FinishedRun(finished)
    program = open_program(run.model(next(iter(run.silos))))
    with torch.no_grad():
        assert program.difference(program.module(program.vectors)) < TOLERANCE
    assert program.interface()["outputs"]["name"] == program.task.output_name


@pytest.mark.parametrize("finished", ["survival-synthetic"], indirect=True)
def test_a_case_unlike_the_training_samples_has_no_answer(finished: Path, tmp_path: Path) -> None:
    site = next(iter(FinishedRun(finished).silos))
    cases = tmp_path / "cases.csv"
    rows = [{"age": 60, "stage": 1, "nodes": nodes, "treated": 0} for nodes in (1, 60)]
    pd.DataFrame(rows).to_csv(cases, index=False)
    frame = fedsilo.predict(finished, site=site, table=cases).frame()
    assert frame["risk"].isna().tolist() == [False, True]
    frame = fedsilo.predict(finished, site=site, table=cases, answer_all=True).frame()
    assert not frame["risk"].isna().any()
