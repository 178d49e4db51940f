"""Open rows with more seeds: what is run, what a kill leaves, and what the page says."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import open_rows
from benchmarks.open_rows import (
    QUESTIONS,
    SeedRun,
    page_text,
    read_runs,
    result_rows,
    table_text,
    values_of,
)
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.engines.planning import planned_settings
from fedsilo.server_app.config.settings import RunSettings

PICSR = QUESTIONS[0]
FEDAVG, TUNED, ENSEMBLE = PICSR.experiments


def run(experiment: str, seed: int, accuracy: float) -> SeedRun:
    return SeedRun(experiment, seed, accuracy, 0.5, 0.25, 1.5, "one (AVX2)", "abc")


def test_every_experiment_is_one_of_the_simulation_file() -> None:
    for question in QUESTIONS:
        for name in question.experiments:
            planned_settings(name, RunSources(changes=question.changes))  # raises if unknown


def test_seeds_are_the_outer_loop_and_a_kill_loses_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun = tmp_path / "rows.csv", []

    def measure(name: str, seed: int, settings: RunSettings, digest: str) -> SeedRun:
        begun.append((name, seed))
        if len(begun) == 4:
            raise KeyboardInterrupt
        return replace(run(name, seed, 0.5), run=digest)

    monkeypatch.setattr(open_rows, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        list(open_rows.run_missing(path, [PICSR], 2, []))
    assert begun == [(FEDAVG, 0), (TUNED, 0), (ENSEMBLE, 0), (FEDAVG, 1)]
    before = read_runs(path)
    assert len(before) == 3
    list(open_rows.run_missing(path, [PICSR], 2, []))
    assert begun[4:] == [(FEDAVG, 1), (TUNED, 1), (ENSEMBLE, 1)]
    assert read_runs(path)[:3] == before
    with pytest.raises(SettingError, match="other settings or data"):
        list(open_rows.run_missing(path, [PICSR], 2, ["rounds=3"]))


def test_only_seeds_that_all_experiments_have_are_compared() -> None:
    runs = [run(FEDAVG, seed, 0.7 + 0.01 * seed) for seed in range(4)]
    runs += [run(TUNED, seed, 0.8 - 0.01 * seed) for seed in range(3)]
    runs += [run(ENSEMBLE, seed, 0.75) for seed in (0, 2)]
    values = values_of(PICSR, runs, 20)
    assert values[FEDAVG] == pytest.approx({0: 0.70, 2: 0.72})
    assert values[ENSEMBLE] == {0: 0.75, 2: 0.75}
    fedavg, tuned, ensemble = result_rows(PICSR, runs)
    assert (fedavg.seeds, fedavg.mean, fedavg.p) == (2, pytest.approx(0.71), None)
    assert ensemble.sd == pytest.approx(0, abs=1e-9)
    assert tuned.p is not None
    assert len(table_text(runs).splitlines()) == 4
    assert "State: 2 of 20 seeds finished." in page_text("rows.csv", runs)
    assert "State: 0 of 20 seeds finished." in page_text("rows.csv", [])


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("experiment,seed\nx,y\n")
    with pytest.raises(SettingError, match="line 2"):
        read_runs(path)
    assert read_runs(tmp_path / "none.csv") == []
