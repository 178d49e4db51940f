"""Runs trials and runs as Slurm jobs, with submitit.

A thread of this process waits for each job. Data, caches and the folder of runs must have the same
paths on all machines.
"""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedsilo.core.errors import RunFailedError, SettingError, needs_extra
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import parse_pair

Outcome = TypeVar("Outcome")
SLURM = "slurm"
_MOST = 64  # largest number of jobs in the queue at once
_LINE = 300  # characters; a job's error text is cut to this length


@dataclass(frozen=True)
class Slurm:
    """The parameters of Slurm for all jobs, as submitit names them."""

    # ``timeout_min``, ``slurm_partition``, ``cpus_per_task``, ``mem_gb`` and so on
    parameters: Mapping[str, Value] = field(default_factory=dict)
    cluster: str = SLURM  # submitit's executor; ``local`` runs jobs as processes of this machine


Jobs = int | Slurm


def read_jobs(text: str, parameters: list[str]) -> Jobs:
    """Parse the options ``--jobs`` and ``--slurm`` of a command.

    Args:
        text: the value of ``--jobs``. It is ``slurm`` or the number of runs at once, with 0 for one
            run per core.
        parameters: the values of ``--slurm``, each as KEY=VALUE.

    Returns:
        The number of runs or, for ``slurm``, the parameters. Hyphens in their keys become
        underscores.

    Raises:
        SettingError: ``text`` is neither ``slurm`` nor a whole number of at most six digits, a
            parameter is not KEY=VALUE, or there are parameters without ``--jobs slurm``.
    """
    if text == SLURM:
        values = {}
        for parameter in parameters:
            if "=" not in parameter:
                raise SettingError(f"--slurm {parameter}: write KEY=VALUE, for example mem_gb=4")
            key, value = parse_pair(parameter)
            values[key.replace("-", "_")] = value
        return Slurm(values)
    if parameters:
        raise SettingError(f"--slurm needs --jobs slurm, but --jobs is {text}: change one of them")
    if not re.fullmatch(r"\d{1,6}", text):
        raise SettingError(f"--jobs must be a number, at least 0, or slurm, but is {text!r}")
    return int(text)


class SlurmPool(ThreadPoolExecutor):
    """A pool that runs its work as Slurm jobs; cancelling the pool also cancels queued jobs.

    Raises:
        SettingError: submitit or Slurm is not installed, or a parameter is unknown.
    """

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        super().__init__(_MOST)
        self._jobs: list[Any] = []
        self._executor = _executor(slurm, folder)

    def submit(self, work: Callable[..., Outcome], /, *args: Any, **kwargs: Any) -> Future[Outcome]:
        """Submit ``work`` as a Slurm job, and return the future of its result.

        If the job fails, the future raises a RunFailedError.
        """
        return super().submit(self._by_job, work, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the pool. If ``wait`` is True, return only when all its work has ended.

        With ``cancel_futures``, the pool's queued and running Slurm jobs are cancelled. Work that
        has not been sent to Slurm is dropped.
        """
        if cancel_futures:
            for job in self._jobs:
                with suppress(Exception):  # the job may have ended, or Slurm may be unreachable
                    job.cancel()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)

    def _by_job(self, work: Callable[..., Outcome], *args: Any, **kwargs: Any) -> Outcome:
        """Run ``work`` as a Slurm job, and return its result.

        The calling thread waits until the job has ended.

        Raises:
            RunFailedError: the job failed. The message has the last line of the job's traceback and
                the path of its log.
        """
        job = self._executor.submit(work, *args, **kwargs)
        self._jobs.append(job)
        # Blocks this thread until the job has ended
        error = job.exception()
        if error:
            traceback = str(error).partition("You can check")[0]  # submitit appends advice
            lines = [line for line in traceback.splitlines() if line.strip(" -")]
            reason = (lines or ["no reason given"])[-1][:_LINE]
            raise RunFailedError(
                f"Slurm job {job.job_id} failed: {reason}; read its log {job.paths.stderr}, then "
                "run this command again: finished runs are kept"
            )
        outcome: Outcome = job.result()
        return outcome


def _executor(slurm: Slurm, folder: Path) -> Any:
    """Create submitit's executor, which runs functions as Slurm jobs.

    The logs of the jobs are in the folder ``slurm`` below ``folder``.

    Raises:
        SettingError: submitit or Slurm is not installed, or a parameter in ``slurm`` is unknown.
    """
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
