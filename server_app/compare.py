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

from datasets.registry import data_set, load_silo
from datasets.sources import find_places
from datasets.storage import write_atomically
from models.errors import DataError, FedsiloError, RunDirectoryError, SettingError
from server_app.bars import make_console
from server_app.config import RunSettings, differences, resolve, run_values
from server_app.planning import planned
from server_app.run_directory import RunDirectory
from server_app.summary import by_distribution, means

HEADER = (
    "experiment",
    "method",
    "group",
    "metric",
    "mean",
    "sd",
    "seeds",
    "published",
    "published sd",
)


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
    published: float | None = None
    published_sd: float | None = None

    def cell(self) -> str:
        """Return mean and standard deviation for people; a single seed has none."""
        return f"{self.mean:.3f}" + (f" ± {self.sd:.3f}" if self.seeds > 1 else "")

    def published_cell(self) -> str:
        """Return the paper's figure."""
        if self.published is None:
            return ""
        sd = "" if self.published_sd is None else f" ± {self.published_sd:.3f}"
        return f"{self.published:.3f}{sd}"


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
    console = make_console()
    _run_all([job for job in jobs if not job.finished()], _parallel(jobs, options.jobs), console)
    rows = [
        row for name in names for row in _rows([j for j in jobs if j.experiment == name], options)
    ]
    if not rows:
        raise SettingError(
            f"no site has {options.split} samples to compare by: set 'val-folds', or use "
            "'fedsilo tune'"
        )
    for job in {job.settings.common.dataset: job for job in jobs}.values():
        rows += constant_rows(job.directory.read_json("silos.json"), options.split)
    console.print(comparison_table(rows, options.split))
    if options.csv:
        write_atomically(options.csv, csv_text(rows))
    if options.markdown:
        write_atomically(options.markdown, markdown_text(rows, options.split))


def _rows(jobs: Sequence[Job], options: argparse.Namespace) -> list[Row]:
    summaries = [job.directory.read_json("summary.json") for job in jobs]
    first = jobs[0]
    shown = data_set(first.settings.common.dataset).headline
    chosen = [of_split(summary, options.split) for summary in summaries]
    return experiment_rows(first.experiment, chosen, shown)


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


def experiment_rows(
    experiment: str, summaries: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> list[Row]:
    """Return the rows of one experiment from its seeds' summaries: distributions, then all.

    A figure that is undefined for a group (AUC of one class) has no row.
    """
    first = summaries[0]
    groups = [*first["distributions"], "all"]
    published = first["published"] or {}
    found = []
    for group in groups:
        for metric in metrics:
            known = [_value(summary, group, metric) for summary in summaries]
            values = [value for value in known if value is not None]
            if not values:
                continue
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
                    published.get(group, {}).get(f"{metric}-sd"),
                )
            )
    return found


def _value(summary: Mapping[str, Any], group: str, metric: str) -> float | None:
    values = summary["mean"] if group == "all" else summary["distributions"][group]
    return float(values[metric]) if metric in values else None


def constant_rows(silos: Mapping[str, Any], split: str) -> list[Row]:
    """Return what answering the second of two classes every time would score, per distribution.

    A predictor that has seen nothing: what a method's accuracy is to be held against. Nothing is
    returned for more than two classes.
    """
    scores: dict[str, dict[str, float]] = {}
    for site, facts in silos.items():
        counts = facts["label_counts"][split]
        if len(counts) == 2 and sum(counts):
            scores[site] = _constant_scores(counts[1] / sum(counts))
    if not scores:
        return []
    groups = by_distribution(scores, {site: silos[site]["distribution"] for site in scores})
    return [
        Row("always positive (class 1)", "constant", group, metric, value, 0.0, 1)
        for group, found in [*groups.items(), ("all", means(scores))]
        for metric, value in found.items()
    ]


def _constant_scores(share: float) -> dict[str, float]:
    """Score "always class 1" where ``share`` of the samples are; of one class only accuracy."""
    if share in (0.0, 1.0):
        return {"accuracy": share}
    return {"accuracy": share, "balanced-accuracy": 0.5, "auc": 0.5}


def _lines(rows: Sequence[Row], split: str) -> list[list[str]]:
    """Return the column titles, then a line per experiment and group.

    A metric has a column of published figures if there are any.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    told = {row.metric for row in rows if row.published is not None}
    columns = ["experiment", "group"]
    for metric in metrics:
        columns += [f"{split} {metric}", *(["published"] if metric in told else [])]
    by_line: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_line.setdefault((row.experiment, row.group), {})[row.metric] = row
    lines = [columns]
    for (experiment, group), found in by_line.items():
        line = [experiment, group]
        for metric in metrics:
            one = found.get(metric)
            line.append(one.cell() if one else "")
            if metric in told:
                line.append(one.published_cell() if one else "")
        lines.append(line)
    return lines


def comparison_table(rows: Sequence[Row], split: str = "test") -> Table:
    """Return the comparison for a terminal."""
    seeds = max(row.seeds for row in rows)
    table = Table(title=f"mean ± sd over {seeds} seeds", title_justify="left")
    columns, *lines = _lines(rows, split)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    for line in lines:
        table.add_row(*line, end_section=line[1] == "all")
    return table


def markdown_text(rows: Sequence[Row], split: str = "test") -> str:
    """Return the comparison as a Markdown table."""
    columns, *lines = _lines(rows, split)
    lines = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_text(rows: Sequence[Row]) -> str:
    """Return the comparison as tidy CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        figures = [f"{row.mean:.6f}", f"{row.sd:.6f}", row.seeds]
        paper = ["" if v is None else v for v in (row.published, row.published_sd)]
        writer.writerow([row.experiment, row.method, row.group, row.metric, *figures, *paper])
    return text.getvalue()
