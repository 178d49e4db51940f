"""The open rows of the papers' claims, with twenty seeds in place of five.

    python -m benchmarks.open_rows --csv open-rows.csv --page open-rows.md --set data.dir=DATA

Each question names experiments of simulation.yaml. Their settings were chosen before, on validation
data with one or two seeds, and stay as they are. A finished run is a line of the file, with its
seed, a digest of its settings and data, and the processor. It is not run again, so the command can
be stopped at any time and goes on where it was. The seeds are the outer loop, so at any time all
experiments have about as many.
"""

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.ranking.runs import settings_digest
from fedsilo.comparison.significance import significance
from fedsilo.comparison.tables import deviation, markdown_table, mean
from fedsilo.comparison.trials import run_and_forget
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import FedsiloError, SettingError, error_line
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.datasets.registry import data_fingerprint
from fedsilo.engines.planning import plan_run
from fedsilo.server_app.config.settings import RunSettings, resolve

SEEDS = 20
_CONTIGUOUS = ("machine.memory-format=contiguous",)  # as the five seeds before


@dataclass(frozen=True)
class Question:
    """A claim that five seeds left open.

    Attributes:
        title: the question, for people.
        metric: the test metric that decides, a mean over sites.
        experiments: names in simulation.yaml; each is compared with the first one.
        changes: settings over the experiments', as ``key=value``.
    """

    title: str
    metric: str
    experiments: tuple[str, ...]
    changes: tuple[str, ...] = ()


QUESTIONS = (
    Question(
        "Is PICSR more accurate than FedAvg on rotated digits?",
        "accuracy",
        ("fedavg-digits-tuned", "picsr-digits-tuned", "ensemble-digits-tuned"),
    ),
    Question(
        "Has UEFL's tuned variant less entropy than FedAvg on Fashion-MNIST?",
        "entropy",
        ("fedavg-best-fmnist-small", "uefl-best-fmnist-small-segments-4"),
        _CONTIGUOUS,
    ),
    Question(
        "Is FedEFM's tuned variant more accurate than FedAvg where no label is shared?",
        "accuracy",
        ("fedavg-best-unseen", "fedefm-best-unseen", "fedefm-letter-unseen"),
        _CONTIGUOUS,
    ),
)


@dataclass(frozen=True)
class SeedRun:
    """One finished run; its metrics are test means over sites."""

    experiment: str
    seed: int
    accuracy: float
    entropy: float
    loss: float
    seconds: float
    processor: str
    run: str  # a digest of settings and data


def read_runs(path: Path) -> list[SeedRun]:
    """Read all runs of a file; an empty list if there is no file.

    Raises:
        SettingError: the file has other columns, or a line in it is damaged.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    runs = []
    for number, line in enumerate(lines, 2):
        try:
            runs.append(SeedRun(**{f.name: f.type(line[f.name]) for f in fields(SeedRun)}))  # type: ignore[operator]
        except (KeyError, TypeError, ValueError):
            raise SettingError(
                f"{path}, line {number} is no run of 'benchmarks.open_rows': delete it, and it is "
                "run again"
            ) from None
    return runs


def run_missing(
    path: Path, questions: Sequence[Question], seeds: int, changes: Sequence[str]
) -> Iterator[SeedRun]:
    """Run what the file lacks, seed by seed; append each run to the file, and yield it.

    Args:
        path: the CSV file.
        questions: the questions whose experiments are run.
        seeds: the number of seeds, from 0.
        changes: settings over all experiments', as ``key=value``, such as the data folder.

    Raises:
        SettingError: the file has a run with other settings or data.
    """
    known = {(run.experiment, run.seed): run for run in read_runs(path)}
    for seed in range(seeds):
        for question in questions:
            for name in question.experiments:
                sources = RunSources(changes=(*question.changes, *changes))
                base, _ = plan_run(name, sources)
                settings = resolve({**base.as_mapping(), "seed": seed, "run.name": ""})
                digest = settings_digest(settings, data_fingerprint(base.common))
                earlier = known.get((name, seed))
                if earlier is None:
                    yield _append(path, _measure(name, seed, settings, digest))
                elif earlier.run != digest:
                    raise SettingError(
                        f"{path} has a run of '{name}', seed {seed}, with other settings or data: "
                        "name another --csv, or delete its line"
                    )


def _measure(name: str, seed: int, settings: RunSettings, digest: str) -> SeedRun:
    with run_and_forget(settings) as run:
        summary = run.summary
        means = summary["mean"]
        numbers = [round(means[key], 6) for key in ("accuracy", "entropy", "loss")]
        seconds, processor = summary["seconds"]["total"], summary["processor"]
    return SeedRun(name, seed, *numbers, seconds, processor, digest)


def _append(path: Path, run: SeedRun) -> SeedRun:
    """Write the whole file again, so that a kill leaves either all lines or those before."""
    lines = [*read_runs(path), run]
    names = [entry.name for entry in fields(SeedRun)]
    rows = [",".join(names)]
    for line in lines:
        rows.append(",".join(str(asdict(line)[name]) for name in names))
    write_atomically(path, "\n".join(rows) + "\n")
    return run


def values_of(
    question: Question, runs: Sequence[SeedRun], seeds: int
) -> dict[str, dict[int, float]]:
    """Return the metric by experiment and seed, of the seeds that all experiments have."""
    found: dict[str, dict[int, float]] = {name: {} for name in question.experiments}
    for run in runs:
        if run.experiment in found and run.seed < seeds:
            found[run.experiment][run.seed] = getattr(run, question.metric)
    common = set.intersection(*(set(by_seed) for by_seed in found.values()))
    return {
        name: {seed: by_seed[seed] for seed in sorted(common)} for name, by_seed in found.items()
    }


@dataclass(frozen=True)
class ResultRow:
    """The result of an experiment over the seeds that all experiments of its question have.

    Attributes:
        question: the question's title.
        experiment: the experiment's name.
        metric: the test metric, a mean over sites.
        seeds: the number of seeds.
        mean: the metric's mean over seeds.
        sd: its standard deviation over seeds.
        p: the corrected p value against the question's first experiment; None for the first itself.
    """

    question: str
    experiment: str
    metric: str
    seeds: int
    mean: float
    sd: float
    p: float | None


def result_rows(question: Question, runs: Sequence[SeedRun]) -> list[ResultRow]:
    """Return a row for each experiment of a question; empty with fewer than two common seeds."""
    values = values_of(question, runs, SEEDS)
    first = question.experiments[0]
    if len(values[first]) < 2:
        return []
    tested = significance(question.metric, values, paired=True)
    rows = []
    for name, by_seed in values.items():
        numbers = list(by_seed.values())
        p = None
        if name != first:
            p = tested.pairs[name, first].p
        rows.append(
            ResultRow(
                question.title,
                name,
                question.metric,
                len(numbers),
                mean(numbers),
                deviation(numbers),
                p,
            )
        )
    return rows


def table_path(csv_path: Path) -> Path:
    """Return the path of the file of means, which stands beside the file of all runs."""
    return csv_path.with_name(f"{csv_path.stem}-table.csv")


def table_text(runs: Sequence[SeedRun]) -> str:
    """Return the rows of all questions as CSV; an experiment without a p value has an empty one."""
    names = [entry.name for entry in fields(ResultRow)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for question in QUESTIONS:
        for row in result_rows(question, runs):
            writer.writerow([getattr(row, name) for name in names])
    return text.getvalue()


def page_text(csv_name: str, runs: Sequence[SeedRun]) -> str:
    """Return the page as Markdown: the state and the result of each question."""
    lines = ["# Open rows with twenty seeds", ""]
    where = "No run is finished yet."
    if runs:
        table = table_path(Path(csv_name)).name
        where = f"All runs are in [{csv_name}]({csv_name}), their means in [{table}]({table})."
    lines += [
        "Five seeds left some claims of the papers open. Their experiments run again here with the "
        f"settings of before and seeds 0 to {SEEDS - 1}.",
        f"{where} The p values are of t-tests paired by seed, multiplied by the number of pairs.",
        "",
        "```sh",
        "python -m benchmarks.open_rows --csv open-rows.csv --page open-rows.md "
        "--set data.dir=DATA    # goes on where it was stopped",
        "```",
    ]
    for question in QUESTIONS:
        lines += ["", f"## {question.title}", "", *_question_lines(question, runs)]
    processors = ", ".join(sorted({run.processor for run in runs}))
    if processors:
        lines += ["", f"Processor: {processors}."]
    return "\n".join(lines) + "\n"


def _question_lines(question: Question, runs: Sequence[SeedRun]) -> Iterator[str]:
    count = len(values_of(question, runs, SEEDS)[question.experiments[0]])
    yield f"State: {count} of {SEEDS} seeds finished."
    found = result_rows(question, runs)
    if not found:
        return
    rows = [["experiment", question.metric, f"p, against {question.experiments[0]}"]]
    for row in found:
        rows.append([row.experiment, f"{row.mean:.3f} ± {row.sd:.3f}", _p_cell(row.p)])
    yield ""
    yield markdown_table(rows).rstrip()


def _p_cell(p: float | None) -> str:
    """Return a p value with three decimals, or with two digits if it is below 0.001."""
    if p is None:
        return ""
    if p < 0.001:
        return f"{p:.1e}"
    return f"{p:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print a line per run, and write the page."""
    parser = argparse.ArgumentParser("python -m benchmarks.open_rows", description=__doc__)
    parser.add_argument("--csv", type=Path, default=Path("open-rows.csv"), help="file of all runs")
    parser.add_argument("--page", type=Path, help="also write a page, and the means")
    parser.add_argument("--only", type=int, choices=range(1, len(QUESTIONS) + 1), help="a question")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--show-only", action="store_true", help="run nothing")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args(arguments)
    questions = QUESTIONS
    if given.only:
        questions = QUESTIONS[given.only - 1 : given.only]
    try:
        if not given.show_only:
            for run in run_missing(given.csv, questions, given.seeds, given.set):
                print(f"{run.experiment}, seed {run.seed}: {run.accuracy:.3f}", flush=True)
        runs = read_runs(given.csv)
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    if given.page:
        write_atomically(given.page, page_text(given.csv.name, runs))
        write_atomically(table_path(given.csv), table_text(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
