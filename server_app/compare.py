"""``fedsilo compare``: experiments over seeds, mean and standard deviation, beside the papers'.

A run lies in ``<out>/<experiment>-seed<n>``. One that is finished with the same settings is read
and not run again; one that was cut short is resumed.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from datasets.storage import write_atomically
from models.errors import FedsiloError, RunDirectoryError
from server_app.bars import make_console
from server_app.config import RunSettings, differences, resolve, run_values
from server_app.planning import planned
from server_app.run_directory import RunDirectory

METRICS = ("accuracy", "entropy")
HEADER = ("experiment", "method", "group", "metric", "mean", "sd", "seeds", "published")


@dataclass(frozen=True)
class Row:
    """One figure of the comparison; ``group`` is a site, a distribution or ``all``."""

    experiment: str
    method: str
    group: str
    metric: str
    mean: float
    sd: float
    seeds: int
    published: float | None

    def cell(self) -> str:
        """Return mean and standard deviation for people; a single seed has none."""
        return f"{self.mean:.3f}" + (f" ± {self.sd:.3f}" if self.seeds > 1 else "")


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
        sites = len(self.directory.read_json("silos.json"))
        if sites != self.sites:
            other = f"{sites} sites took part there and {self.sites} are asked for here"
        if other:
            raise RunDirectoryError(
                f"{self.directory.path} holds a run with other settings: {other}; "
                "choose another --out or remove it"
            )
        return (self.directory.path / "summary.json").is_file()

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
    console = make_console()
    _run_all([job for job in jobs if not job.finished()], _parallel(jobs, options.jobs), console)
    rows = [
        row
        for name in names
        for row in experiment_rows(
            name,
            [
                of_split(job.directory.read_json("summary.json"), options.split)
                for job in jobs
                if job.experiment == name
            ],
        )
    ]
    console.print(comparison_table(rows, options.split))
    if options.csv:
        write_atomically(options.csv, csv_text(rows))
    if options.markdown:
        write_atomically(options.markdown, markdown_text(rows, options.split))


def _job(experiment: str, seed: int, options: argparse.Namespace) -> Job:
    settings, resources = planned(
        experiment, options, seed=seed, **{"run-name": f"{experiment}-seed{seed}"}
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
    for text in options.changes:
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


def of_split(summary: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Return ``summary`` with the figures of ``split``: test as they stand, or val.

    Choices between settings are made on validation figures; the papers published no such.
    """
    if split == "test":
        return dict(summary)
    return {**summary, **summary["validation"], "published": None}


def experiment_rows(experiment: str, summaries: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of one experiment from its seeds' summaries: distributions, then all."""
    first = summaries[0]
    groups = [*first["distributions"], "all"]
    published = first["published"] or {}
    found = []
    for group in groups:
        for metric in METRICS:
            values = [_value(summary, group, metric) for summary in summaries]
            sd = statistics.stdev(values) if len(values) > 1 else 0.0
            found.append(
                Row(
                    experiment,
                    first["method"],
                    group,
                    metric,
                    statistics.mean(values),
                    sd,
                    len(values),
                    published.get(group, {}).get(metric),
                )
            )
    return found


def _value(summary: Mapping[str, Any], group: str, metric: str) -> float:
    values = summary["mean"] if group == "all" else summary["distributions"][group]
    return float(values[metric])


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return one line per experiment and group: each metric's cell and its published number."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        line = lines.setdefault((row.experiment, row.group), [row.experiment, row.group])
        line += [row.cell(), "" if row.published is None else f"{row.published:.3f}"]
    return list(lines.values())


def _columns(split: str) -> list[str]:
    figures = [text for metric in METRICS for text in (f"{split} {metric}", "published")]
    return ["experiment", "group", *figures]


def comparison_table(rows: Sequence[Row], split: str = "test") -> Table:
    """Return the comparison for a terminal."""
    seeds = max(row.seeds for row in rows)
    table = Table(title=f"mean ± sd over {seeds} seeds", title_justify="left")
    for number, column in enumerate(_columns(split)):
        table.add_column(column, justify="left" if number < 2 else "right")
    for line in _lines(rows):
        table.add_row(*line, end_section=line[1] == "all")
    return table


def markdown_text(rows: Sequence[Row], split: str = "test") -> str:
    """Return the comparison as a Markdown table."""
    columns = _columns(split)
    lines = [columns, ["---"] * len(columns), *_lines(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_text(rows: Sequence[Row]) -> str:
    """Return the comparison as tidy CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow(
            [
                row.experiment,
                row.method,
                row.group,
                row.metric,
                f"{row.mean:.6f}",
                f"{row.sd:.6f}",
                row.seeds,
                "" if row.published is None else row.published,
            ]
        )
    return text.getvalue()
