"""Runs many trials at once, except trials that already have a summary.

A trial is a short run with the inline engine in a worker process. Only its summary is kept, in
``<folder>/<key>.json``, with a digest of its metrics. The key is a hash of everything that decides
the result, so a trial whose file exists is not run again. ``make_pool`` and ``run_missing`` also
run the whole runs of a comparison.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.progress import Progress

from fedsilo.comparison.results import pooled_metric
from fedsilo.comparison.slurm import Jobs, Slurm, SlurmPool
from fedsilo.core.errors import FedsiloError, RunDirectoryError, RunFailedError, SiteError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.one_line import one_line
from fedsilo.core.processes import end_with, without_main
from fedsilo.core.settings_schema import Value
from fedsilo.core.versions import git_revision
from fedsilo.datasets.registry import silo_names
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.resources import cores
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.forms import Summary, check
from fedsilo.server_app.run.terminal import make_console

Missing = TypeVar("Missing")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Trial:
    """One run: its settings, a label that distinguishes it, and a digest of its data."""

    settings: RunSettings
    label: Mapping[str, Value]
    data: str

    def key(self) -> str:
        """Return the name of the summary's file without its extension.

        It is a hash of three things: the settings that can change the result, the digest of the
        data, and the git revision of fedsilo.
        """
        text = json.dumps([self.settings.decisive(), self.data, git_revision()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def trial_settings(values: Mapping[str, Value]) -> RunSettings:
    """Build the settings of a trial, which is a run whose directory is not kept.

    ``values`` has all settings by key. The run has no name. It is evaluated only after the last
    round, unless it uses early stopping, which needs a metric in earlier rounds.

    Raises:
        SettingError: the settings are not valid together.
    """
    own: dict[str, Value] = {**values, "run.name": ""}
    if values["server.early-stopping-metric"] == "none":
        own["server.evaluate-every"] = 0
    return resolve(own)


FAILED = "failed"  # the only key of a failed trial's summary; its value is the reason


@dataclass(frozen=True)
class Failure:
    """The error of a run in a worker process: its code, and the text for the user."""

    code: str
    text: str


@dataclass(frozen=True)
class _Work:
    """A trial for a worker process: its settings by key, and the file of its summary."""

    values: Mapping[str, Value]
    path: Path


def runs_at_once(jobs: int, threads: int = 1) -> int:
    """Return the number of runs at once: ``jobs`` or, if that is 0, one per ``threads`` cores.

    Only the cores that this process may use count, as in a container. The number is at least 1.
    """
    return jobs or max(1, cores() // threads)


def run_missing(
    pool: Executor,
    work: Callable[[Missing], Outcome],
    missing: Sequence[Missing],
    ended: Callable[[Missing, Outcome], None],
) -> None:
    """Run ``work`` for each item in a pool, and call ``ended`` each time that an item has finished.

    Args:
        pool: the pool of processes or of Slurm jobs.
        work: computes the outcome of an item. The function must be picklable.
        missing: the items, such as runs that have no result yet.
        ended: is called in this process with an item and its outcome, in the order in which items
            finish.

    Raises:
        RunFailedError: a worker process died, which also ends the pool.
        Exception: any error of ``work`` or ``ended``. Items that have not started are cancelled,
            and so are running Slurm jobs. The error is raised only after the items that already
            run in worker processes have finished. ``ended`` is not called for them.
    """
    run_of = {}
    for run in missing:
        run_of[pool.submit(work, run)] = run
    try:
        for future in as_completed(run_of):
            ended(run_of[future], future.result())
    except BrokenProcessPool:
        raise RunFailedError(
            "a worker process died, perhaps for lack of memory: run this again with fewer --jobs; "
            "finished runs are kept"
        ) from None
    except BaseException:  # Ctrl-C too must cancel the waiting runs
        pool.shutdown(cancel_futures=True)
        raise


def run_groups(
    groups: Sequence[Sequence[Trial]], folder: Path, jobs: Jobs, go_on: bool = False
) -> list[list[dict[str, Any]]]:
    """Run groups of trials in one pool of processes, and return the results group by group.

    Args:
        groups: the trials of each group. Trials with a stored summary are not run again.
        folder: the folder of the summary files.
        jobs: the number of runs at once, 0 to use all cores, or Slurm's parameters.
        go_on: whether the other trials continue after training failed at a site of one trial.

    Returns:
        For each group, the summaries of its trials in order, as ``run_trials`` returns them.

    Raises:
        FedsiloError: training failed without ``go_on``, or a trial failed for another reason.
    """
    # One pool for all groups, because a slow trial of one would idle the cores between groups
    summaries = run_trials(list(chain(*groups)), folder, jobs, go_on)
    by_group = []
    start = 0
    for group in groups:
        by_group.append(summaries[start : start + len(group)])
        start += len(group)
    return by_group


def run_trials(
    trials: Sequence[Trial], folder: Path, jobs: Jobs, go_on: bool = False
) -> list[dict[str, Any]]:
    """Run the trials that have no summary file yet, and return the summaries of all trials.

    A trial is a run of which only the summary is kept. In a terminal, a progress bar is shown.

    Args:
        trials: the trials.
        folder: the folder of the summary files.
        jobs: the number of runs at once, 0 to use all cores, or Slurm's parameters.
        go_on: whether the other trials continue after training failed at a site of one trial, for
            example because it diverged.

    Returns:
        A summary for each trial, in order, with its file's name as ``file``. The summary of a
        failed trial has only the key ``FAILED``, with the reason. A failure is not stored, so the
        trial runs again next time.

    Raises:
        FedsiloError: training failed without ``go_on``, or a trial failed for another reason.
            Finished trials are kept and used again.
    """
    paths = [folder / f"{trial.key()}.json" for trial in trials]
    missing: dict[Path, Trial] = {}
    for path, trial in zip(paths, trials, strict=True):
        if not path.is_file():
            missing[path] = trial
    console = make_console()
    workers = 0  # Slurm does not use workers on this machine
    if isinstance(jobs, int):
        threads = max((trial.settings.common.threads for trial in trials), default=1)
        workers = runs_at_once(jobs, threads)
    with (
        Progress(console=console, disable=not console.is_terminal) as bar,
        make_pool(jobs, folder, workers) as pool,
    ):
        task = bar.add_task("runs", total=len(missing))
        # Failures stay in memory, because a file would count as a finished trial next time
        failures: dict[Path, str] = {}

        def note_end(work: _Work, failure: Failure | None) -> None:
            if failure:
                failures[work.path] = failure.text
                # Only a site's failure is due to the point; other failures would stop every trial
                if not go_on or failure.code != SiteError.code:
                    label = dict(missing[work.path].label)
                    raise RunFailedError(f"trial {label} failed: {failure.text}")
            bar.advance(task)

        works = [_Work(trial.settings.as_mapping(), path) for path, trial in missing.items()]
        run_missing(pool, _run_trial, works, note_end)
    summaries: list[dict[str, Any]] = []
    for path in paths:
        if path in failures:
            summaries.append({FAILED: failures[path]})
        else:
            summaries.append(_read_summary(path) | {"file": path.name})
    return summaries


def _read_summary(path: Path) -> dict[str, Any]:
    """Read the summary of a finished trial from its JSON file.

    Raises:
        RunDirectoryError: the file cannot be read, is not valid JSON, or its content is not a
            summary. If the file is unreadable or not JSON, the message advises the user to remove
            it, so that the trial is run again.
    """
    fault = file_fault(path)  # reading a pipe would never end
    if fault:
        raise RunDirectoryError(f"{path} {fault}: remove it, and the trial is run again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path} is damaged ({one_line(error, 100)}): remove it, and the trial is run again"
        ) from None
    check(Summary, content, str(path))
    return dict(content)


class WorkerPool(ProcessPoolExecutor):
    """A pool of silent worker processes, which end with this command, even if that is killed.

    Ctrl-C interrupts the runs that have started.

    Args:
        workers: number of processes, at least 1.
        runs_per_worker: number of runs after which a process is replaced by a new one, so that the
            system gets its memory back; None for no limit.
    """

    def __init__(self, workers: int, runs_per_worker: int | None = None) -> None:
        self._one_run = runs_per_worker == 1
        self._folder = tempfile.TemporaryDirectory()
        self._stop = Path(self._folder.name, "stop")
        super().__init__(
            workers,
            # A forked process would lack PyTorch's threads and could hang
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(os.getpid(),),
            max_tasks_per_child=runs_per_worker,
        )

    def __enter__(self) -> Self:
        """Start the pool. Until its end, new processes do not import the caller's script."""
        # A spawned process would import the script, which could start the command again
        self._hiding = without_main()
        self._hiding.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        """Wait until started runs finish, and end the pool."""
        try:
            return super().__exit__(*error)
        finally:
            self._hiding.__exit__(*error)
            self._folder.cleanup()

    def _adjust_process_count(self) -> None:
        """Start a worker process if one is missing.

        Python's pool calls this method when work is submitted and when a worker process ends. If
        each process makes only one run, a process is started only if more runs are unfinished than
        there are processes. This way, the processes of the last runs have no needless successors.
        """
        if not self._one_run or len(self._pending_work_items) > len(self._processes):
            super()._adjust_process_count()

    def submit(self, work: Callable[..., Outcome], /, *args: Any, **kwargs: Any) -> Future[Outcome]:
        """Submit a call of ``work`` to the pool, and return the future of its result.

        The function, its arguments and its result are pickled.
        """
        return super().submit(_in_worker, self._stop, work, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the pool. If ``wait`` is True, return only when its last run has finished.

        With ``cancel_futures``, runs that have started still finish, and runs that have not are
        dropped.
        """
        if cancel_futures:
            # Python's pool cannot cancel the run that it has put aside for the next free process
            self._stop.touch()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)


def make_pool(
    jobs: Jobs, folder: Path, workers: int, runs_per_worker: int | None = None
) -> Executor:
    """Create the pool in which runs are computed: worker processes, or jobs of a Slurm cluster.

    Args:
        jobs: Slurm's parameters for a Slurm cluster. A number means worker processes, and
            ``workers`` says how many.
        folder: the folder below which Slurm jobs write their logs.
        workers: the number of worker processes.
        runs_per_worker: the number of runs after which a worker process is replaced, or None for no
            limit. It has no effect on Slurm jobs.
    """
    if isinstance(jobs, Slurm):
        return SlurmPool(jobs, folder)
    return WorkerPool(workers, runs_per_worker)


def _begin_worker(command: int) -> None:
    """Prepare a new worker process: discard its output, and end it when the command ends.

    ``command`` is the process id of the command that started the worker. When that process ends,
    the system sends the worker the signal SIGUSR1, and the worker exits with status 1. A Ctrl-C
    that comes before a run is held back, and interrupts the next run.
    """
    # Blocked and not ignored: a run that begins after a Ctrl-C is interrupted at once
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
    end_with(command, signal.SIGUSR1)
    # The processes that a run starts write to these descriptors too
    # Descriptors by number, because sys.stdout is None if the command started with a closed output
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _in_worker(stop: Path, work: Callable[..., Outcome], *args: Any, **kwargs: Any) -> Outcome:
    """Call ``work`` in a worker process, and return its result.

    If the file ``stop`` exists, the pool is ending. The work is then not begun, and
    KeyboardInterrupt is raised. A Ctrl-C interrupts the work. One that came earlier was held back,
    and interrupts the work as it begins. If the work raises ``SystemExit``, the worker process ends
    at once.
    """
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if stop.exists():
            raise KeyboardInterrupt
        return work(*args, **kwargs)
    except SystemExit:
        os._exit(1)  # the pool would treat the exception as a failed run and continue
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _run_trial(work: _Work) -> Failure | None:
    """Run a trial in a temporary folder, and write the summary of the run to a file.

    ``work`` has the trial's settings, and the file as ``path``. Two things are added to the
    summary:

    - ``digest``, the SHA-256 of metrics.csv, which is equal for trials with equal metrics
    - ``POOLED``, the balanced accuracy over the samples of all sites, next to the means on test and
      validation samples. It is missing if it cannot be computed.

    Returns:
        None if the trial succeeded. Otherwise the error's code and text, and no summary is written.
    """
    try:
        # The settings travel by key, because a plugin's class is unknown in a new process
        with run_and_forget(resolve(work.values)) as run:
            # Two trials have equal digests only if their settings make no difference: metrics.csv
            # has all digits and no times
            digest = hashlib.sha256((run.path / "metrics.csv").read_bytes()).hexdigest()
            summary = {**run.summary, "digest": digest}
            summary["mean"] |= pooled_metric(run, "test")
            summary["validation"]["mean"] |= pooled_metric(run, "val")
            write_atomically(work.path, json.dumps(summary))
    except FedsiloError as error:
        return Failure(error.code, str(error))
    return None


@contextlib.contextmanager
def run_and_forget(settings: RunSettings) -> Iterator[FinishedRun]:
    """Do a run in this process without printing, and yield the finished run.

    This is for a ``with`` statement. The run directory is a temporary folder, which is removed when
    the statement ends.

    Raises:
        FedsiloError: the run failed.
    """
    from fedsilo.engines.inline_engine import run_inline

    with tempfile.TemporaryDirectory(prefix="fedsilo-trial-") as out:
        common = replace(settings.common, out=out, run_name="trial", resume=False)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            directory = run_inline(replace(settings, common=common), len(silo_names(common)))
        yield FinishedRun(directory.path)
