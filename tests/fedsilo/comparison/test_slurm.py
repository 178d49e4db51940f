"""Runs as jobs: submitit's local executor stands for Slurm, the rest is the same code."""

import os
from pathlib import Path

import pytest

from fedsilo.comparison.slurm import Slurm, SlurmPool, read_jobs
from fedsilo.comparison.trials import Trial, run_missing, run_trials
from fedsilo.core.errors import RunFailedError, SettingError
from fedsilo.server_app.config.settings import resolve

LOCAL = Slurm({"timeout_min": 5}, cluster="local")
TABLE = {
    "method": "local",
    "dataset": "heart-synthetic",
    "rounds": 1,
    "train.local-steps": 1,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}


def test_jobs_are_a_number_or_slurm_with_its_parameters() -> None:
    assert (read_jobs("0", []), read_jobs("4", [])) == (0, 4)
    told = ["slurm-partition=gpu", "timeout_min=60", "mem_gb=4.5"]
    expected = {"slurm_partition": "gpu", "timeout_min": 60, "mem_gb": 4.5}
    assert read_jobs("slurm", told) == Slurm(expected)


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "", "9999999"])
def test_other_jobs_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--jobs must be a number, at least 0, or slurm"):
        read_jobs(text, [])


def _process(number: int) -> tuple[int, int]:
    return number, os.getpid()


def _falling(number: int) -> int:
    raise ZeroDivisionError(f"number {number}")


def test_each_run_is_a_job_of_its_own(tmp_path: Path) -> None:
    ended: dict[int, int] = {}

    def told(_: int, outcome: tuple[int, int]) -> None:
        ended[outcome[0]] = outcome[1]

    with SlurmPool(LOCAL, tmp_path) as pool:
        run_missing(pool, _process, [1, 2], told)
    assert ended.keys() == {1, 2}
    assert len({os.getpid(), *ended.values()}) == 3
    assert list(tmp_path.glob("slurm/*_log.out"))


def test_a_job_that_fails_is_told_with_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFailedError, match=r"ZeroDivisionError: number 1; read its log .*slurm"),
        SlurmPool(LOCAL, tmp_path) as pool,
    ):
        run_missing(pool, _falling, [1], lambda *_: None)


@pytest.mark.soak
def test_trials_by_jobs_are_those_of_this_machine(tmp_path: Path) -> None:
    trials = [Trial(resolve(TABLE | {"seed": 1}), {"seed": 1}, "data")]
    by_job = run_trials(trials, tmp_path / "jobs", LOCAL)
    here = run_trials(trials, tmp_path / "here", 1)
    assert by_job[0]["mean"] == here[0]["mean"]
    before = sorted((tmp_path / "jobs" / "slurm").iterdir())
    run_trials(trials, tmp_path / "jobs", LOCAL)
    assert sorted((tmp_path / "jobs" / "slurm").iterdir()) == before, "what is there is not run"


def test_where_there_is_no_slurm_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--jobs slurm cannot be used here: .*cluster.md"):
        SlurmPool(Slurm(), tmp_path)


def test_a_parameter_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot be used here: .*partitoin"):
        SlurmPool(Slurm({"partitoin": "gpu"}, cluster="local"), tmp_path)
