"""A figure over a setting: which runs make a line, what is drawn, what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.cli.main import main
from fedsilo.server_app.config.settings import RUN_FORMAT, resolve
from fedsilo.server_app.run.inline_engine import run_inline
from fedsilo.server_app.studies.compare.over_setting import (
    Sweep,
    SweptRun,
    draw_sweep,
    finished_runs,
    sweep_points,
)


def _run(name: str, accuracy: float, **settings: Value) -> SweptRun:
    values = resolve(settings)
    return SweptRun(Path(name), values.decisive(), {"mean": {"accuracy": accuracy}})


def test_a_line_is_an_experiment_and_a_point_its_seeds() -> None:
    runs = [
        _run("u1/a-seed0", 0.5, partition="unseen", unseen=1.0, seed=0),
        _run("u1/a-seed1", 0.7, partition="unseen", unseen=1.0, seed=1),
        _run("u0/a-seed0", 0.9, partition="unseen", unseen=0.0, seed=0),
        _run("u0/b-seed0", 0.8, method="local", partition="unseen", unseen=0.0, seed=0),
    ]
    points = sweep_points(runs, "unseen", "accuracy")
    found = Sweep("unseen", "accuracy", ["a", "b"], points)
    lines = {name: found.points_of(name) for name in found.experiments}
    assert [(p.value, p.mean, p.seeds) for p in lines["a"]] == [(0.0, 0.9, 1), (1.0, 0.6, 2)]
    assert [p.sd for p in lines["a"]] == pytest.approx([0.0, 0.02**0.5])
    assert [(p.value, p.mean, p.seeds) for p in lines["b"]] == [(0.0, 0.8, 1)]
    (bar, _) = draw_sweep(found).axes[0].containers
    assert bar.lines[0].get_ydata() == pytest.approx([0.9, 0.6])  # type: ignore[attr-defined]


def test_runs_that_differ_in_more_make_no_line() -> None:
    one = _run("u1/a-seed0", 0.5, partition="unseen", unseen=1.0)
    with pytest.raises(RunDirectoryError, match=r"u0/a-seed0 .*width is 16 there and 3 here"):
        sweep_points(
            [one, _run("u0/a-seed0", 0.9, partition="unseen", width=3)], "unseen", "accuracy"
        )
    with pytest.raises(RunDirectoryError, match="another run of 'a' has the same seed and unseen"):
        sweep_points([one, one], "unseen", "accuracy")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("unsen", "did you mean 'unseen'"),
        ("dataset", "it must be a number"),
        ("fedefm.temperature", "is not of the run"),
    ],
)
def test_a_setting_that_cannot_be_an_axis_is_refused(setting: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        sweep_points([_run("a-seed0", 0.5)], setting, "accuracy")


def test_folders_of_runs_are_looked_into_and_unfinished_runs_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory and has none"):
        finished_runs([tmp_path])
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0" / "config.toml").write_text(f"format = {RUN_FORMAT}\n")
    with pytest.raises(RunDirectoryError, match="has not ended"):
        finished_runs([tmp_path])
    (tmp_path / "a-seed0" / "summary.json").write_text("{}")
    (run,) = finished_runs([tmp_path, tmp_path / "a-seed0"])
    assert run.path == tmp_path / "a-seed0"


def test_real_runs_are_drawn(
    tmp_path: Path, tiny: Callable[..., dict[str, Value]], capsys: pytest.CaptureFixture[str]
) -> None:
    for rounds in (1, 2):
        folder = tmp_path / f"r{rounds}"
        settings = tiny("fedavg", rounds=rounds, out=str(folder), **{"run-name": "a-seed7"})
        run_inline(resolve(settings), 3)
    picture = tmp_path / "rounds.png"
    folders = [str(tmp_path / "r1"), str(tmp_path / "r2")]
    assert main(["sweep", "rounds", *folders, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "a: 0." in printed
    assert " at 1, 0." in printed
    assert main(["sweep", "rounds", *folders, "--metric", "acuracy"]) == 1
    assert "unknown metric 'acuracy'; did you mean 'accuracy'?" in capsys.readouterr().err


def test_an_experiment_without_the_metric_keeps_its_line_without_points() -> None:
    runs = [_run("a-seed0", 0.5), SweptRun(Path("b-seed0"), resolve({}).decisive(), {"mean": {}})]
    points = sweep_points(runs, "rounds", "accuracy")
    swept = Sweep("rounds", "accuracy", ["a", "b"], points)
    lines = {name: swept.points_of(name) for name in swept.experiments}
    assert len(lines["a"]) == 1
    assert lines["b"] == []
