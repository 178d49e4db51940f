"""Runs of a comparison as jobs of Slurm, with submitit.

A thread of this process waits for each job. Data, caches and the folder of runs must have the same
paths on the machines of the jobs.
"""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedsilo.models.contract.errors import FedsiloError, RunFailedError, SettingError, needs_extra
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import parse_assignment

Outcome = TypeVar("Outcome")
SLURM = "slurm"
_MOST = 64  # jobs in the queue at once
_LINE = 300  # characters of a job's own words


@dataclass(frozen=True)
class Slurm:
    """Where runs go: Slurm's parameters as submitit names them."""

    # ``timeout_min``, ``slurm_partition``, ``cpus_per_task``, ``mem_gb`` and so on
    parameters: Mapping[str, Value] = field(default_factory=dict)
    cluster: str = SLURM  # submitit's executor; ``local`` runs jobs as processes of this machine


Jobs = int | Slurm


def read_jobs(text: str, parameters: list[str]) -> Jobs:
    """Return what ``--jobs`` and ``--slurm`` ask for.

    Raises:
        SettingError: neither a number nor ``slurm``, or parameters without it.
    """
    if text == SLURM:
        if unset := [one for one in parameters if "=" not in one]:
            raise SettingError(f"--slurm {unset[0]}: write KEY=VALUE, for example mem_gb=4")
        pairs = map(parse_assignment, parameters)
        return Slurm({key.replace("-", "_"): value for key, value in pairs})
    if parameters:
        raise SettingError(f"--slurm belongs to --jobs slurm, and --jobs is {text}")
    if not re.fullmatch(r"\d{1,6}", text):
        raise SettingError(f"--jobs is {text!r}; it must be a number of at least 0, or slurm")
    return int(text)


class SlurmPool(ThreadPoolExecutor):
    """A pool whose work is done by jobs; cancelling it cancels jobs in the queue too.

    Raises:
        SettingError: submitit or Slurm is not installed, or has no such parameter.
    """

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        super().__init__(_MOST)
        self._jobs: list[Any] = []
        self._executor = _executor(slurm, folder)

    def submit(self, work: Callable[..., Outcome], /, *args: Any, **kwargs: Any) -> Future[Outcome]:
        """Hand ``work`` to the queue."""
        return super().submit(self._by_job, work, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the pool, with ``cancel_futures`` also jobs that wait or run."""
        if cancel_futures:
            for job in self._jobs:
                with suppress(Exception):  # it has ended, or Slurm is gone
                    job.cancel()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)

    def _by_job(self, work: Callable[..., Outcome], *args: Any, **kwargs: Any) -> Outcome:
        job = self._executor.submit(_outcome_or_reason, work, *args, **kwargs)
        self._jobs.append(job)
        if error := job.exception():
            traceback = str(error).partition("You can check")[0]  # submitit adds what follows
            lines = [line for line in traceback.splitlines() if line.strip(" -")]
            said = (lines or ["no reason given"])[-1][:_LINE]
            raise RunFailedError(
                f"job {job.job_id} of Slurm failed: {said}; its log is {job.paths.stderr}. "
                "Finished runs stay: run this again"
            )
        outcome, reason = job.result()
        if reason:
            raise RunFailedError(reason)
        done: Outcome = outcome
        return done


def _outcome_or_reason(
    work: Callable[..., Outcome], *args: Any, **kwargs: Any
) -> tuple[Outcome | None, str | None]:
    """Return the work's outcome, or its error as one line, which a traceback would hide."""
    try:
        return work(*args, **kwargs), None
    except FedsiloError as error:
        return None, str(error)


def _executor(slurm: Slurm, folder: Path) -> Any:
    with needs_extra("--jobs slurm", "slurm", "leave it out"):
        import submitit
    try:
        executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=slurm.cluster)
        executor.update_parameters(name="fedsilo", **slurm.parameters)
    except (RuntimeError, ValueError, TypeError, NameError) as error:
        reason = " ".join(str(error).split())[:_LINE]
        raise SettingError(
            f"--jobs slurm cannot be used here: {reason}; see docs/cluster.md"
        ) from None
    return executor
