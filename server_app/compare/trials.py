"""Many short runs at once, by the inline engine in worker processes; only summaries are kept.

A trial's summary lies in ``<folder>/<key>.json``, the key a hash of all that decides the result:
what is there is not run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from datasets.io.atomic_files import write_atomically
from datasets.registry import silo_names
from models.contract.errors import FedsiloError
from models.contract.settings_schema import Value
from server_app.config.settings import RunSettings, resolve
from server_app.records.run_directory import git_revision
from server_app.run.progress_bars import make_console


@dataclass(frozen=True)
class Trial:
    """One run: its settings, what tells it apart from others of its kind, its data's digest."""

    settings: RunSettings
    label: Mapping[str, Value]
    data: str

    def key(self) -> str:
        """Return the name of its summary's file: another version of fedsilo runs it again."""
        text = json.dumps([self.settings.decisive(), self.data, git_revision()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def run_trials(trials: Sequence[Trial], folder: Path, jobs: int) -> list[dict[str, Any]]:
    """Run what has no summary yet and return all summaries, in the order of ``trials``.

    Raises:
        FedsiloError: a run failed; the finished ones stay and are used again.
    """
    keys = [trial.key() for trial in trials]  # once: each asks git for the revision
    paths = {key: folder / f"{key}.json" for key in keys}
    waiting = {k: trial for k, trial in zip(keys, trials, strict=True) if not paths[k].is_file()}
    parallel = min(jobs or os.cpu_count() or 1, max(len(waiting), 1))
    # Not fork: torch's threads do not survive it
    context = multiprocessing.get_context("spawn")
    console = make_console()
    with (
        Progress(console=console, disable=not console.is_terminal) as bar,
        ProcessPoolExecutor(parallel, mp_context=context, initializer=_leave_interrupts) as pool,
    ):
        task = bar.add_task("runs", total=len(waiting))
        futures = {
            pool.submit(_run, trial.settings.as_mapping(), str(paths[key])): trial
            for key, trial in waiting.items()
        }
        try:
            for future in as_completed(futures):
                if told := future.result():
                    raise FedsiloError(f"trial {dict(futures[future].label)} failed: {told}")
                bar.advance(task)
        except BrokenProcessPool:
            raise FedsiloError(
                "a worker process died, for want of memory perhaps: finished trials stay; run this "
                "again with fewer --jobs"
            ) from None
        except BaseException:  # also Ctrl-C: what runs is finished, nothing new begins
            pool.shutdown(cancel_futures=True)
            raise
    return [json.loads(paths[key].read_text()) for key in keys]


def _leave_interrupts() -> None:
    """Let Ctrl-C reach the command only, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(values: Mapping[str, Value], path: str) -> str:
    """Run ``values`` quietly and write the summary; return what went wrong, empty if nothing."""
    from server_app.run.inline_engine import run_inline

    settings = resolve(values)
    with (
        tempfile.TemporaryDirectory(prefix="fedsilo-trial-") as out,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        common = dataclasses.replace(settings.common, out=out, run_name="trial", resume=False)
        settings = dataclasses.replace(settings, common=common)
        try:
            directory = run_inline(settings, len(silo_names(common)), draw=False)
        except FedsiloError as error:
            return str(error)
        write_atomically(Path(path), json.dumps(directory.read_json("summary.json")))
    return ""
