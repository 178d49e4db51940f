"""``fedsilo compare``: experiments over seeds, mean and standard deviation, beside the papers'.

A run lies in ``<out>/<experiment>-seed<n>``. One that is finished with the same settings is read
and not run again; one that was cut short is resumed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from datasets.digits.pools import find_places
from datasets.io.atomic_files import write_atomically
from datasets.registry import data_set, load_silo
from models.contract.errors import DataError, FedsiloError, RunDirectoryError, SettingError
from models.contract.settings_schema import Value
from server_app.compare.significance import (
    Tested,
    check_tests,
    markdown_tests,
    notes,
    print_tests,
    significance,
)
from server_app.compare.tables import (
    Row,
    chosen_metrics,
    comparison_table,
    constant_rows,
    csv_text,
    experiment_rows,
    figure_of,
    markdown_text,
    of_split,
)
from server_app.config.settings import RunSettings, differences, resolve, run_values
from server_app.records.run_directory import RunDirectory
from server_app.records.summary import print_table
from server_app.run.planning import planned
from server_app.run.progress_bars import make_console

Found = Mapping[str, Mapping[int, Mapping[str, Any]]]  # experiment -> seed -> summary of the split


@dataclass(frozen=True)
class Job:
    """One run of the comparison."""

    experiment: str
    settings: RunSettings
    sites: int
    command: list[str]

    @property
    def directory(self) -> RunDirectory:
        """Where the run lies."""
        common = self.settings.common
        return RunDirectory(Path(common.out) / common.run_name)

    def finished(self) -> bool:
        """Tell whether a finished run with these settings is there.

        Raises:
            RunDirectoryError: there is a run of that name with other settings.
        """
        config = self.directory.path / "config.toml"
        if not config.is_file():
            return False
        other = differences(resolve(run_values(config)).decisive(), self.settings.decisive())
        silos = self.directory.read_json("silos.json")
        if len(silos) != self.sites:
            other = f"{len(silos)} sites took part there and {self.sites} are asked for here"
        elif not other:
            other = self._other_data(silos)
        if other:
            raise RunDirectoryError(
                f"{self.directory.path} holds a run with other settings: {other}; "
                "choose another --out or remove it"
            )
        return (self.directory.path / "summary.json").is_file()

    def _other_data(self, silos: Mapping[str, Any]) -> str:
        """Say whose data are not those of the run; nothing where there are no data to look at."""
        common = self.settings.common
        try:
            now = [load_silo(site, common) for site in silos]
        except DataError as error:
            folder = find_places(common.data_dir, common.cache_dir).data
            there = folder is not None and folder.is_dir()
            return f"the data cannot be read now ({error})" if there else ""
        unlike = [
            silo.name
            for silo in now
            if silos[silo.name]["fingerprints"] != silo.fingerprints
            or silos[silo.name].get("schema", "") != silo.schema
        ]
        return f"the data of {', '.join(unlike)} are others there" if unlike else ""

    def run(self) -> None:
        """Run or resume it in a process of its own.

        Raises:
            FedsiloError: it failed; with the run's own error line.
        """
        resume = ["--set", "resume=true"] if self.directory.path.is_dir() else []
        done = subprocess.run([*self.command, *resume], capture_output=True, text=True, check=False)
        if done.returncode:
            told = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise FedsiloError(
                f"{self.directory.path.name} failed: {told[-1].removeprefix('fedsilo: error: ')}"
            )


def compare(options: argparse.Namespace) -> None:
    """Run what is missing, then print and write the table.

    Raises:
        FedsiloError: a setting is wrong, or a run failed; finished runs stay and are used again.
    """
    names = list(dict.fromkeys(options.experiments))
    jobs = [_job(name, seed, options) for name in names for seed in range(options.seeds)]
    check_tests(options, {job.experiment: job.settings.common.dataset for job in jobs})
    console = make_console()
    _run_all([job for job in jobs if not job.finished()], _parallel(jobs, options.jobs), console)
    found = _summaries(jobs, options.split)
    rows = _rows(jobs, found, options)
    tested = _tests(found, options)
    told = notes(tested[0], options.seeds, options.paired, _same_split(jobs)) if tested else []
    print_table(console, comparison_table(rows, options.split, options.median))
    print_tests(console, tested, options.split, told)
    if options.csv:
        write_atomically(options.csv, csv_text(rows))
    if options.markdown:
        text = markdown_text(rows, options.split, options.median)
        write_atomically(options.markdown, text + markdown_tests(tested, options.split, told))


def _summaries(jobs: Sequence[Job], split: str) -> Found:
    """Return what the runs found on ``split``.

    Raises:
        SettingError: no site has samples of it.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for job in jobs:
        summary = of_split(job.directory.read_json("summary.json"), split)
        found.setdefault(job.experiment, {})[job.settings.common.seed] = summary
    if not any(summary["mean"] for runs in found.values() for summary in runs.values()):
        raise SettingError(
            f"no site has {split} samples to compare by: set 'val-folds', or use 'fedsilo tune'"
        )
    return found


def _rows(jobs: Sequence[Job], found: Found, options: argparse.Namespace) -> list[Row]:
    """Return all rows: of each experiment, then of answering one class every time."""
    every = [summary for runs in found.values() for summary in runs.values()]
    asked = chosen_metrics(options.metrics, every, "--metrics") if options.metrics else None
    data_sets = {job.experiment: job.settings.common.dataset for job in jobs}
    rows = [
        row
        for name, runs in found.items()
        for row in experiment_rows(
            name, list(runs.values()), asked or data_set(data_sets[name]).headline
        )
    ]
    for job in {job.settings.common.dataset: job for job in jobs}.values():
        rows += constant_rows(job.directory.read_json("silos.json"), options.split, asked)
    return rows


def _tests(found: Found, options: argparse.Namespace) -> list[Tested]:
    """Return the tests of each metric asked for, over the seeds that have it."""
    if not options.tests:
        return []
    every = [summary for runs in found.values() for summary in runs.values()]
    tested = []
    for metric in chosen_metrics(options.tests, every, "--tests"):
        samples: dict[str, dict[int, float]] = {name: {} for name in found}
        for name, runs in found.items():
            for seed, summary in runs.items():
                value = figure_of(summary, "all", metric)
                if value is not None:
                    samples[name][seed] = value
        tested.append(significance(metric, samples, options.paired))
    return tested


def _same_split(jobs: Sequence[Job]) -> bool:
    """Tell whether all seeds of each experiment saw the same split."""
    splits: dict[str, list[Any]] = {}
    for job in jobs:
        silos = job.directory.read_json("silos.json")
        prints = {site: facts["fingerprints"] for site, facts in silos.items()}
        splits.setdefault(job.experiment, []).append(prints)
    return all(found == seen[0] for seen in splits.values() for found in seen)


def _job(experiment: str, seed: int, options: argparse.Namespace) -> Job:
    # A split of its own needs a name of its own, or the run of another split would be taken for it
    drawn: dict[str, Value] = {"fold-seed": seed} if options.splits else {}
    name = f"{experiment}-{'split' if options.splits else 'seed'}{seed}"
    settings, resources = planned(
        experiment,
        options,  # type: ignore[arg-type]
        supernodes=options.supernodes,
        more={"seed": seed, **drawn, "run-name": name},
    )
    command = [
        sys.executable,
        "-m",
        "server_app.cli",
        "simulate",
        experiment,
        "--engine",
        options.engine,
        "--seed",
        str(seed),
        "--name",
        settings.common.run_name,
        "--out",
        settings.common.out,
    ]
    for text in [*options.changes, *(f"{key}={value}" for key, value in drawn.items())]:
        command += ["--set", text]
    if options.supernodes is not None:
        command += ["--supernodes", str(options.supernodes)]
    for flag, path in (("--config", options.config), ("--file", options.file)):
        command += [flag, str(path)] if path else []
    return Job(experiment, settings, int(resources["num-supernodes"]), command)


def _parallel(jobs: Sequence[Job], asked: int) -> int:
    threads = max(job.settings.common.threads for job in jobs)
    return asked or max(1, (os.cpu_count() or 1) // threads)


def _run_all(jobs: Sequence[Job], parallel: int, console: Console) -> None:
    if not jobs:
        return
    console.print(f"{len(jobs)} runs, {parallel} at once", highlight=False)
    with ThreadPoolExecutor(parallel) as pool:
        waiting = {pool.submit(job.run): job for job in jobs}
        try:
            for number, done in enumerate(as_completed(waiting), start=1):
                done.result()
                console.print(
                    f"{number}/{len(jobs)} {waiting[done].directory.path.name}", highlight=False
                )
        except BaseException:  # also Ctrl-C, which the children get too
            pool.shutdown(cancel_futures=True)
            raise
