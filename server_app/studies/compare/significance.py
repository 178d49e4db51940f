"""Whether experiments differ by more than their seeds do: ANOVA, then t-tests of all pairs.

As in Fed-Align-CL's table V: one-way ANOVA over the runs of each method, then two-sided Student
t-tests of all pairs with Bonferroni's correction.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.records.summary import print_table
from fedsilo.server_app.studies.compare.tables import markdown_table

_ROUNDING = 1e-12  # relative: a spread below it is no spread

Samples = Mapping[str, Mapping[int, float]]  # experiment -> seed -> figure


@dataclass(frozen=True)
class Outcome:
    """A test's statistic and p value; where it cannot be made ``p`` is None and ``why`` says why.

    ``freedom`` are an F test's degrees of freedom, ``uncorrected`` is the p value before any
    correction for the number of pairs.
    """

    p: float | None
    statistic: float | None = None
    why: str = ""
    freedom: tuple[int, int] = (0, 0)
    uncorrected: float | None = None

    def cell(self) -> str:
        """Return the p value for people."""
        return "n/a" if self.p is None else f"{self.p:.2e}"


@dataclass(frozen=True)
class Tested:
    """The tests of one metric; ``pairs`` holds (later, earlier) experiment -> corrected outcome."""

    metric: str
    experiments: tuple[str, ...]
    anova: Outcome
    pairs: Mapping[tuple[str, str], Outcome]

    def heading(self, split: str) -> str:
        """Return the ANOVA in a line."""
        anova = self.anova
        if anova.p is None:
            return f"{split} {self.metric}, mean over sites: one-way ANOVA n/a: {anova.why}"
        freedom = ", ".join(map(str, anova.freedom))
        return (
            f"{split} {self.metric}, mean over sites: one-way ANOVA F({freedom}) = "
            f"{anova.statistic:.3g}, p = {anova.cell()}"
        )

    def lines(self) -> list[list[str]]:
        """Return the triangle of p values: column titles, then a line per later experiment."""
        first, *later = self.experiments
        columns = [first, *later[:-1]]
        cells = {pair: outcome.cell() for pair, outcome in self.pairs.items()}
        body = [[name, *(cells.get((name, other), "-") for other in columns)] for name in later]
        return [["p", *columns], *body]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per test, the ANOVA's first; a p value that cannot be had is None."""
        anova = {"test": "ANOVA", "experiment": "all", "compared with": "all"}
        rows: list[tuple[dict[str, str], Outcome]] = [(anova, self.anova)]
        for (later, earlier), outcome in self.pairs.items():
            rows.append(({"test": "t", "experiment": later, "compared with": earlier}, outcome))
        return [
            {
                "metric": self.metric,
                **labels,
                "statistic": outcome.statistic,
                "p": outcome.uncorrected,
                "p corrected": outcome.p,
            }
            for labels, outcome in rows
        ]

    def reasons(self) -> list[str]:
        """Return why pairs could not be tested, a line each."""
        return [
            f"n/a, {later} against {earlier}: {outcome.why}"
            for (later, earlier), outcome in self.pairs.items()
            if outcome.p is None
        ]


def significance(metric: str, samples: Samples, paired: bool) -> Tested:
    """Return the tests of ``metric`` over two or more experiments.

    Args:
        metric: its name.
        samples: of each experiment the figure of every seed that has one.
        paired: whether t-tests are of the differences by seed.

    Raises:
        SettingError: it is to be paired, and not all experiments have the same seeds.
    """
    names = tuple(samples)
    if paired:
        _refuse_other_seeds(metric, samples)
    pairs = [(later, earlier) for earlier, later in itertools.combinations(names, 2)]
    return Tested(
        metric,
        names,
        one_way({name: list(by_seed.values()) for name, by_seed in samples.items()}),
        {pair: _corrected(two_sided(*pair, samples, paired), len(pairs)) for pair in pairs},
    )


def one_way(samples: Mapping[str, Sequence[float]]) -> Outcome:
    """Return one-way ANOVA: whether the experiments' means differ by more than seeds scatter."""
    from scipy import stats

    if why := _too_few(samples):
        return Outcome(None, why=why)
    if all(_constant(values) for values in samples.values()):
        return Outcome(None, why="no figure varies over seeds")
    result = _quietly(lambda: stats.f_oneway(*samples.values()))
    between = len(samples) - 1
    within = sum(map(len, samples.values())) - len(samples)
    return _outcome(result, (between, within))


def two_sided(later: str, earlier: str, samples: Samples, paired: bool) -> Outcome:
    """Return the two-sided t-test of two experiments, as yet without correction."""
    from scipy import stats

    seeds = sorted(samples[later])
    chosen = {name: list(samples[name].values()) for name in (later, earlier)}
    if why := _too_few(chosen):
        return Outcome(None, why=why)
    if paired:
        ones, others = ([samples[name][seed] for seed in seeds] for name in (later, earlier))
        differences = [a - b for a, b in zip(ones, others, strict=True)]
        if _constant(differences, max(map(abs, [*ones, *others]))):
            return Outcome(None, why="the difference is the same for every seed")
        result = _quietly(lambda: stats.ttest_rel(ones, others))
    else:
        if all(_constant(values) for values in chosen.values()):
            return Outcome(None, why="neither varies over seeds")
        result = _quietly(lambda: stats.ttest_ind(*chosen.values()))
    return _outcome(result)


def _outcome(result: Any, freedom: tuple[int, int] = (0, 0)) -> Outcome:
    p, statistic = float(result.pvalue), float(result.statistic)
    if math.isnan(p):
        return Outcome(None, why="the figures leave it undefined")
    return Outcome(p, statistic, freedom=freedom, uncorrected=p)


def _corrected(outcome: Outcome, pairs: int) -> Outcome:
    """Return the outcome with Bonferroni's p value."""
    return outcome if outcome.p is None else replace(outcome, p=min(1.0, outcome.p * pairs))


def _too_few(samples: Mapping[str, Sequence[float]]) -> str:
    few = [name for name, values in samples.items() if len(values) < 2]
    return f"fewer than two seeds of {', '.join(few)} have this metric" if few else ""


def _constant(values: Sequence[float], scale: float = 0.0) -> bool:
    """Tell whether values, computed from numbers as large as ``scale``, are all the same."""
    largest = max(scale, *map(abs, values))
    return max(values) - min(values) <= _ROUNDING * largest


def _quietly(test: Callable[[], Any]) -> Any:
    """Make a test without scipy's warnings: what they are of is told in words, or does no harm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return test()


def notes(tested: Tested, seeds: int, paired: bool, same_split: bool) -> list[str]:
    """Return what a reader of the p values must know, a line each."""
    kind = "paired t-tests, by seed," if paired else "t-tests"
    lines = [
        f"p: two-sided {kind} over {seeds} seeds, times {len(tested.pairs)} pairs (Bonferroni; "
        "several metrics are not corrected for)"
    ]
    if not paired:
        lines.append(
            "runs of one seed share split and initial weights, which these tests ignore; "
            "'--paired' tests differences by seed"
        )
    if same_split:
        lines.append(
            "seeds vary initial weights and the order of batches, not the split: p tells nothing "
            "of other patients"
        )
    else:
        lines.append("seeds vary initial weights, the order of batches, and the split")
    return lines


def check_tests(
    data_sets: Mapping[str, str], *, tests: str | None, paired: bool, seeds: int
) -> None:
    """Refuse what cannot be tested, before anything runs.

    Args:
        data_sets: experiment -> data set.
        tests: metrics that are to be tested; None or empty: none.
        paired: whether t-tests are of the differences by seed.
        seeds: how many there are.

    Raises:
        SettingError: there are too few experiments or seeds, or they are on different data.
    """
    if not tests:
        if paired:
            raise SettingError("--paired means nothing without --tests: name metrics to test")
        return
    if len(data_sets) < 2:
        raise SettingError(
            "--tests holds experiments against one another: name at least two different ones"
        )
    if seeds < 2:
        raise SettingError(
            f"--tests is of the spread over seeds, and --seeds is {seeds}: at least 2 are needed"
        )
    first, *others = data_sets
    for other in others:
        if data_sets[other] != data_sets[first]:
            raise SettingError(
                f"--tests: experiment '{other}' is on data set '{data_sets[other]}' and '{first}' "
                f"on '{data_sets[first]}': name experiments of one data set"
            )


def _refuse_other_seeds(metric: str, samples: Samples) -> None:
    first, *others = samples
    for other in others:
        if samples[other].keys() != samples[first].keys():
            parts = [
                f"'{name}' has it of seeds {', '.join(map(str, sorted(samples[name]))) or 'none'}"
                for name in (first, other)
            ]
            raise SettingError(
                f"--paired: metric '{metric}' is not there for the same seeds, "
                f"{' and '.join(parts)}: leave out '--paired' or this metric"
            )


def triangle(tested: Tested, split: str) -> Table:
    """Return the triangle of p values for a terminal."""
    columns, *lines = tested.lines()
    table = Table(title=tested.heading(split), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for line in lines:
        table.add_row(*line)
    return table


def print_tests(
    console: Console, tested: Sequence[Tested], split: str, remarks: Sequence[str]
) -> None:
    """Print each metric's ANOVA and triangle, why cells are empty, and ``remarks`` below all."""
    for test in tested:
        print_table(console, triangle(test, split))
        for reason in test.reasons():
            console.print(reason, highlight=False, soft_wrap=True, markup=False)
    for line in remarks:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def markdown_tests(tested: Sequence[Tested], split: str, remarks: Sequence[str]) -> str:
    """Return what ``print_tests`` prints as Markdown; nothing where nothing is tested."""
    parts = []
    for test in tested:
        columns, *lines = test.lines()
        parts += [f"{test.heading(split)}\n", markdown_table(columns, lines)]
        parts += [f"- {reason}\n" for reason in test.reasons()]
    parts += ["".join(f"- {line}\n" for line in remarks)] if remarks else []
    return "".join(f"\n{part}" for part in parts)


def significance_csv(tested: Sequence[Tested]) -> str:
    """Return the tests as CSV, a row each, figures of six digits; empty where there is none."""
    rows = [row for test in tested for row in test.records()]
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6g", lineterminator="\n")
