"""Runs many trials at once, except those that already have a summary.

A trial is a short run with the inline engine in a worker process. Only its summary is kept, in
``<folder>/<key>.json``, with a digest of its metrics. The key is a hash of everything that decides
the result, so a trial whose file exists is not run again.
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
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

from fedsilo.client_app.worker.polling import end_with
from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.io.text_files import file_fault
from fedsilo.datasets.registry import silo_names
from fedsilo.models.contract.errors import (
    FedsiloError,
    RunDirectoryError,
    RunFailedError,
    SiteError,
)
from fedsilo.models.contract.methods import load_plugin_files
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.plugs import stated_digests
from fedsilo.models.contract.settings_schema import Value
from fedsilo.models.contract.versions import git_revision
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.forms import Summary, check
from fedsilo.server_app.run.terminal import make_console
from fedsilo.server_app.studies.compare.pooled import pooled_figure
from fedsilo.server_app.studies.compare.slurm import Jobs, Slurm, SlurmPool
from fedsilo.server_app.studies.finished_run import FinishedRun

Missing = TypeVar("Missing")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Trial:
    """One run: its settings, a label that tells it from others, and a digest of its data."""

    settings: RunSettings
    label: Mapping[str, Value]
    data: str

    def key(self) -> str:
        """Return the stem of its summary's file, which also depends on fedsilo's revision."""
        text = json.dumps([self.settings.decisive(), self.data, git_revision()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def trial_settings(values: Mapping[str, Value]) -> RunSettings:
    """Build the settings of a trial: only the last round is measured, unless it may stop early."""
    stops = values["server.early-stopping-metric"] != "none"
    seldom = {} if stops else {"server.evaluate-every": 0}
    return resolve({**values, **seldom, "run.name": ""})


FAILED = "failed"  # in place of a summary's content: why there is none


_Work = tuple[Trial, Path]  # a trial and the file of its summary, sent to a worker process
_Failure = tuple[str, str]  # the code of an error, and what it says


def runs_at_once(jobs: int, threads: int = 1) -> int:
    """Return the number of runs at once: ``jobs``, or if that is 0, one per ``threads`` cores."""
    return jobs or max(1, (os.cpu_count() or 1) // threads)


def run_missing(
    pool: Executor,
    work: Callable[[Missing], Outcome],
    missing: Sequence[Missing],
    ended: Callable[[Missing, Outcome], None],
) -> None:
    """Run all missing work in a pool, and call ``ended`` after each; its exception ends all.

    Raises:
        RunFailedError: a worker process died.
        Exception: raised by ``work`` or ``ended``; started runs finish, but no other begins.
    """
    started = [(run, pool.submit(work, run)) for run in missing]
    run_of = {future: run for run, future in started}
    try:
        for future in as_completed(run_of):
            ended(run_of[future], future.result())
    except BrokenProcessPool:
        raise RunFailedError(
            "a worker process died, perhaps for lack of memory: run this again with fewer --jobs; "
            "finished trials are kept"
        ) from None
    except BaseException:  # Ctrl-C too must cancel the waiting runs
        pool.shutdown(cancel_futures=True)
        raise


def run_groups(
    groups: Sequence[Sequence[Trial]], folder: Path, jobs: Jobs, go_on: bool = False
) -> list[list[dict[str, Any]]]:
    """Run groups of trials side by side and return their summaries, as ``run_trials`` does."""
    trials = [trial for group in groups for trial in group]
    summaries = iter(run_trials(trials, folder, jobs, go_on))
    return [[next(summaries) for _ in group] for group in groups]


def run_trials(
    trials: Sequence[Trial], folder: Path, jobs: Jobs, go_on: bool = False
) -> list[dict[str, Any]]:
    """Run the trials that have no summary, and return all summaries in the order of ``trials``.

    With ``go_on``, the other trials continue after a trial failed, for example because it diverged.
    The failed trial's summary has only the key ``FAILED``, with the reason. No file is kept of it,
    so it runs again next time.

    Raises:
        FedsiloError: a trial failed without ``go_on``, or could not begin. Finished trials are kept
            and used again.
    """
    paths = [folder / f"{trial.key()}.json" for trial in trials]
    waiting = {path: trial for path, trial in zip(paths, trials, strict=True) if not path.is_file()}
    missing = [(trial, path) for path, trial in waiting.items()]
    console = make_console()
    with (
        Progress(console=console, disable=not console.is_terminal) as bar,
        _pool(jobs, folder, max(len(missing), 1)) as pool,
    ):
        task = bar.add_task("runs", total=len(missing))
        failures: dict[Path, str] = {}

        def note_end(work: _Work, failure: _Failure | None) -> None:
            trial, path = work
            if failure:
                code, failures[path] = failure
                if not go_on or code != SiteError.code:
                    raise RunFailedError(f"trial {dict(trial.label)} failed: {failures[path]}")
            bar.advance(task)

        # A Slurm job must not end with this command, but a worker process must
        run_missing(pool, _run if isinstance(jobs, int) else _run_quietly, missing, note_end)
    return [
        {FAILED: failures[path]} if path in failures else _read_summary(path) | {"file": path.name}
        for path in paths
    ]


def _read_summary(path: Path) -> dict[str, Any]:
    """Read the kept summary of a trial.

    Raises:
        RunDirectoryError: the file is damaged, or no search has written it.
    """
    if fault := file_fault(path):  # a pipe would be waited for
        raise RunDirectoryError(f"{path} {fault}: remove it, and the trial is run again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path} is damaged ({one_line(error, 100)}): remove it, and the trial is run again"
        ) from None
    check(Summary, content, str(path))
    return dict(content)


def _pool(jobs: Jobs, folder: Path, runs: int) -> Executor:
    if isinstance(jobs, Slurm):
        return SlurmPool(jobs, folder)
    # A forked process would lack PyTorch's threads and could hang
    context = multiprocessing.get_context("spawn")
    parallel = min(runs_at_once(jobs), runs)
    return ProcessPoolExecutor(
        parallel, mp_context=context, initializer=_begin_worker, initargs=(os.getpid(),)
    )


def _begin_worker(command: int) -> None:
    """Make a worker ignore Ctrl-C and end with the command, even if that is killed.

    The signal for the end is not SIGTERM, because a pool uses SIGTERM to end workers at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
    end_with(command, signal.SIGUSR1)


def _run(work: _Work) -> _Failure | None:
    """Run a trial as ``_run_quietly`` does; end this process if the command has ended."""
    try:
        return _run_quietly(work)
    except SystemExit:
        os._exit(1)  # the pool would treat the exception as a failed trial and continue


def _run_quietly(work: _Work) -> _Failure | None:
    """Run a trial and write its summary; return its failure, or None."""
    trial, path = work
    try:
        common = trial.settings.common
        # A spawned process starts without the plugins of its parent
        load_plugin_files(common.plugin, stated_digests(common.plugin_digests))
        with run_and_forget(trial.settings) as run:
            # Two trials have equal digests only if their settings make no difference: metrics.csv
            # has all digits and no times
            digest = hashlib.sha256((run.path / "metrics.csv").read_bytes()).hexdigest()
            summary = {**run.summary, "digest": digest}
            summary["mean"] |= pooled_figure(run, "test")
            summary["validation"]["mean"] |= pooled_figure(run, "val")
            write_atomically(path, json.dumps(summary))
    except FedsiloError as error:
        return error.code, str(error)
    return None


@contextlib.contextmanager
def run_and_forget(settings: RunSettings) -> Iterator[FinishedRun]:
    """Run settings in this process without output, in a folder that is removed at the end.

    Raises:
        FedsiloError: the run failed.
    """
    from fedsilo.server_app.run.inline_engine import run_inline

    with tempfile.TemporaryDirectory(prefix="fedsilo-trial-") as out:
        common = replace(settings.common, out=out, run_name="trial", resume=False)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            directory = run_inline(replace(settings, common=common), len(silo_names(common)))
        yield FinishedRun(directory.path)
