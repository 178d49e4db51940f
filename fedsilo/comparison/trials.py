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
    """Run ``work`` for each item in a pool, and call ``ended`` whenever an item ends.

    ``work`` must be picklable. ``ended`` is called in this process with the item and its outcome,
    in the order in which items end. After an error, waiting items are cancelled and the error is
    raised.

    Raises:
        RunFailedError: a worker process died.
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
    """Run groups of trials in one pool of processes, and return their summaries group by group.

    Trials with a summary in ``folder`` are not run again. ``jobs`` is the number of runs at once, 0
    for all cores, or Slurm's parameters.

    Raises:
        FedsiloError: a trial failed. With ``go_on``, failed training at a site does not count.
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

    ``jobs`` is the number of runs at once, 0 for all cores, or Slurm's parameters. With ``go_on``,
    a trial whose training failed has only the key ``FAILED``, with the reason.

    Raises:
        FedsiloError: a trial failed in any other case. Finished trials are kept.
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
        RunDirectoryError: the file cannot be read, is not valid JSON, or is not a summary.
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

        Python's pool calls this method when work is submitted and when a process ends. If each
        process makes only one run, none is started without a waiting run.
        """
        # Without a waiting run, a successor of a process would be started for nothing
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

    If ``jobs`` has Slurm's parameters, the pool uses Slurm, with logs below ``folder``. Otherwise,
    it has as many processes as ``workers`` says. A process is replaced after ``runs_per_worker``
    runs, or never for None.
    """
    if isinstance(jobs, Slurm):
        return SlurmPool(jobs, folder)
    return WorkerPool(workers, runs_per_worker)


def _begin_worker(command: int) -> None:
    """Prepare a new worker process: discard its output, and end it when the command ends.

    ``command`` is the process id of the command that started the worker. A Ctrl-C that comes before
    a run is held back until the run begins.
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

    A Ctrl-C interrupts the work, also one that came before it began. If the file ``stop`` exists,
    KeyboardInterrupt is raised in place of the work.
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

    The summary also gets a digest of all metrics, and the balanced accuracy over all samples. The
    result is None or, after a failure, its code and text.
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
