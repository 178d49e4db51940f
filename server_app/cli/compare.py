"""``compare``, ``tune`` and ``crossvalidate``: many runs, one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.server_app.cli.options import (
    COMPARE,
    ChangesOption,
    ConfigOption,
    CsvOption,
    Engine,
    ExperimentArgument,
    ExperimentsArgument,
    FileOption,
    JobsOption,
    MarkdownOption,
    MeasuredSplit,
    OutOption,
    SlurmOption,
    SupernodesOption,
    example,
    refuse_below,
)
from fedsilo.server_app.cli.printing import progress_printer

_InlineFirst = Annotated[
    Engine,
    typer.Option(
        "--engine",
        show_default=False,
        help="ray: by 'flwr run'; inline: in this process (default inline)",
    ),
]
_Seeds = Annotated[
    int, typer.Option("--seeds", show_default=False, help="number of seeds (default 3)")
]
_Trials = Annotated[
    int | None,
    typer.Option(
        "--trials",
        show_default=False,
        help="points of the grid to try (default: the simulation file's); the same for all methods",
    ),
]
_FoldsOfASeed = Annotated[
    int | None,
    typer.Option(
        "--folds",
        show_default=False,
        help="validation folds of each seed's shuffling (default: the simulation file's)",
    ),
]
_SeedsOfAPoint = Annotated[
    int | None,
    typer.Option(
        "--seeds", show_default=False, help="seeds of a point (default: the simulation file's)"
    ),
]
_Split = Annotated[
    MeasuredSplit,
    typer.Option(
        "--split",
        show_default=False,
        help="val: figures of the validation data, to choose settings by",
    ),
]
_OwnSplits = Annotated[
    bool, typer.Option("--splits", help="let each seed draw a split of its own (fold-seed)")
]
_Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics", metavar="M,...", help="names or patterns of metrics (default: the data set's)"
    ),
]
_Median = Annotated[
    bool, typer.Option("--median", help="median and range over seeds, not mean and sd")
]
_Tests = Annotated[
    str | None,
    typer.Option(
        "--tests", metavar="M,...", help="metrics of which to test whether experiments differ"
    ),
]
_Paired = Annotated[bool, typer.Option("--paired", help="test the differences by seed")]
_TableCsv = Annotated[
    Path | None,
    typer.Option(
        "--csv", help="also write the table as CSV, and the tests beside it as <its name>-tests.csv"
    ),
]
_TableMarkdown = Annotated[
    Path | None, typer.Option("--markdown", help="also write table and tests as Markdown")
]
_Folds = Annotated[
    int, typer.Option("--folds", show_default=False, help="folds of each site (default 5)")
]
_Repeats = Annotated[
    int, typer.Option("--repeats", show_default=False, help="shufflings (default 5)")
]


def add_commands(app: typer.Typer) -> None:
    """Add ``compare``, ``tune`` and ``crossvalidate``."""
    app.command(
        "compare",
        help="run experiments over seeds, print a table",
        epilog=example("compare fedavg-heart local-heart --seeds 3 --markdown table.md"),
        rich_help_panel=COMPARE,
    )(_compare)
    app.command(
        "tune",
        help="choose an experiment's settings on training data",
        epilog=example("tune local-heart --trials 4"),
        rich_help_panel=COMPARE,
    )(_tune)
    app.command(
        "crossvalidate",
        help="repeated cross-validation over each site",
        epilog=example("crossvalidate picsr-heart fedavg-heart --folds 5 --repeats 5"),
        rich_help_panel=COMPARE,
    )(_crossvalidate)


def _compare(
    experiments: ExperimentsArgument,
    *,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    engine: _InlineFirst = "inline",
    supernodes: SupernodesOption = None,
    seeds: _Seeds = 3,
    jobs: JobsOption = "0",
    slurm: SlurmOption,
    split: _Split = "test",
    splits: _OwnSplits = False,
    metrics: _Metrics = None,
    median: _Median = False,
    tests: _Tests = None,
    paired: _Paired = False,
    csv: _TableCsv = None,
    markdown: _TableMarkdown = None,
) -> None:
    from fedsilo.datasets.io.atomic_files import write_atomically
    from fedsilo.server_app.records.summary import print_table
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.compare.over_seeds import ComparisonOptions, SeedRuns, compare
    from fedsilo.server_app.studies.compare.significance import print_tests, significance_csv
    from fedsilo.server_app.studies.compare.slurm import read_jobs
    from fedsilo.server_app.studies.compare.tables import comparison_csv, comparison_table

    refuse_below(1, "seeds", seeds)
    console = make_console()
    comparison = compare(
        experiments,
        SeedRuns(
            sources=RunSources(file=file, config=config, changes=tuple(changes), out=out),
            engine=engine,
            supernodes=supernodes,
            seeds=seeds,
            own_splits=splits,
        ),
        ComparisonOptions(split=split, metrics=metrics, tests=tests, paired=paired),
        jobs=read_jobs(jobs, slurm),
        tell=progress_printer(console),
    )
    print_table(console, comparison_table(comparison.results, split, median))
    print_tests(console, comparison.tested, split, comparison.notes)
    if csv:
        write_atomically(csv, comparison_csv(comparison.results))
        if comparison.tested:
            beside = csv.with_name(f"{csv.stem}-tests{csv.suffix}")
            write_atomically(beside, significance_csv(comparison.tested))
    if markdown:
        write_atomically(markdown, comparison.markdown(median))


def _tune(
    experiment: ExperimentArgument,
    *,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    trials: _Trials = None,
    folds: _FoldsOfASeed = None,
    seeds: _SeedsOfAPoint = None,
    jobs: JobsOption = "0",
    slurm: SlurmOption,
) -> None:
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.compare.slurm import read_jobs
    from fedsilo.server_app.studies.compare.tune import ranking_table, tune

    for option, number, fewest in (("trials", trials, 1), ("folds", folds, 2), ("seeds", seeds, 1)):
        refuse_below(fewest, option, fewest if number is None else number)
    console = make_console()
    tuned = tune(
        experiment,
        RunSources(file=file, config=config, changes=tuple(changes), out=out),
        trials=trials,
        folds=folds,
        seeds=seeds,
        jobs=read_jobs(jobs, slurm),
        tell=progress_printer(console),
    )
    chosen = ", ".join(f"{k}: {json.dumps(v)}" for k, v in tuned.ranked[0].settings.items())
    console.print(ranking_table(tuned))
    console.print(tuned.document["why"], highlight=False)
    console.print(f"for simulation.yaml: {{{chosen}}}", highlight=False, markup=False)
    console.print(f"written to {tuned.folder}", highlight=False, soft_wrap=True)


def _crossvalidate(
    experiments: ExperimentsArgument,
    *,
    folds: _Folds = 5,
    repeats: _Repeats = 5,
    csv: CsvOption = None,
    markdown: MarkdownOption = None,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    jobs: JobsOption = "0",
    slurm: SlurmOption,
) -> None:
    from fedsilo.datasets.io.atomic_files import write_atomically
    from fedsilo.server_app.records.summary import print_table
    from fedsilo.server_app.run.planning import RunSources
    from fedsilo.server_app.run.progress_bars import make_console
    from fedsilo.server_app.studies.compare.crossvalidate import (
        crossvalidate,
        markdown_text,
        metric_table,
    )
    from fedsilo.server_app.studies.compare.slurm import read_jobs
    from fedsilo.server_app.studies.compare.tables import csv_text

    refuse_below(2, "folds", folds)
    refuse_below(1, "repeats", repeats)
    console = make_console()
    result = crossvalidate(
        experiments,
        RunSources(file=file, config=config, changes=tuple(changes), out=out),
        folds=folds,
        repeats=repeats,
        jobs=read_jobs(jobs, slurm),
        tell=progress_printer(console),
    )
    for metric in result.metrics:
        print_table(console, metric_table(result.intervals, metric))
    if csv:
        write_atomically(csv, csv_text(result.intervals))
    if markdown:
        write_atomically(markdown, markdown_text(result.intervals, result.metrics))
