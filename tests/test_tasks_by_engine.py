"""Every task by every engine, and after a resume: the same bytes."""

import shutil
from pathlib import Path

import pytest

import fedsilo
from fedsilo.core.settings_schema import Value
from fedsilo.core.tasks import CLASSIFICATION, TASKS
from fedsilo.server_app.records.run_directory import RunDirectory

# The data set of each task that ships, and what makes it small
DATA: dict[str, dict[str, Value]] = {
    "regression": {"dataset": "heart-synthetic-pulse"},
    "survival": {"dataset": "survival-synthetic"},
    "multi-label": {"dataset": "chest-phantom", "network.width": 4},
    "segmentation": {"dataset": "vessels-synthetic", "data.image-size": 16, "network.width": 4},
}
SMALL: dict[str, Value] = {
    "rounds": 2,
    "train.local-steps": 2,
    "train.batch-size": 8,
    "privacy.sums-min-count": 1,
    "machine.device": "cpu",
}
FILES = ("metrics.csv", "model.safetensors")


def simulate(task: str, out: Path, engine: str, method: str = "ditto") -> RunDirectory:
    settings: dict[str, Value] = {**SMALL, **DATA[task], "task": task}
    run = fedsilo.simulate(
        method, settings=settings, engine=engine, out=out, name="run", no_pictures=True
    )
    return RunDirectory(run.path)


def content(run: RunDirectory) -> list[bytes]:
    """Return the metrics, the model and each site's private state."""
    states = sorted(path for path in (run.path / "sites").rglob("*") if path.is_file())
    assert states
    return [(run.path / name).read_bytes() for name in FILES] + [p.read_bytes() for p in states]


def test_each_task_is_tried() -> None:
    assert DATA.keys() | {CLASSIFICATION} == TASKS.keys()


@pytest.mark.soak
@pytest.mark.parametrize("task", DATA)
def test_engines_and_a_resume_give_the_same_bytes(task: str, tmp_path: Path) -> None:
    run = simulate(task, tmp_path / "inline", "inline")
    assert (run.path / "metrics.csv").read_text().count("\n") > 10
    for engine in ("processes", "ray"):
        assert content(simulate(task, tmp_path / engine, engine)) == content(run), engine
    begun = tmp_path / "begun" / "run"
    shutil.copytree(run.path, begun)
    for name in ("summary.json", "model.safetensors"):
        (begun / name).unlink()
    sorted((begun / "checkpoints").iterdir())[-1].unlink()
    fedsilo.resume(begun)
    assert content(RunDirectory(begun)) == content(run)
