"""Tests whether experiments differ by more than their seeds: ANOVA, then t-tests of all pairs.

As in table V of Fed-Align-CL: one-way ANOVA over the runs of each method, then two-sided Student
t-tests of all pairs with Bonferroni's correction.
"""

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.table import Table

from fedsilo.comparison.tables import markdown_table, p_equation, p_text, rich_table
from fedsilo.core.errors import SettingError

_ROUNDING = 1e-12  # relative spread below which values count as equal up to rounding

Samples = Mapping[str, Mapping[int, float]]  # experiment -> seed -> metric


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: its statistic and p value.

    If no test is possible, ``p`` is None and ``why`` has the reason. ``freedom`` has the two
    degrees of freedom of an F test. ``uncorrected`` is the p value before the correction for the
    number of pairs.
    """

    p: float | None
    statistic: float | None = None
    why: str = ""
    freedom: tuple[int, int] = (0, 0)
    uncorrected: float | None = None

    def cell(self) -> str:
        """Return the p value as ``p_text`` formats it, or "n/a"."""
        if self.p is None:
            return "n/a"
        return p_text(self.p)


@dataclass(frozen=True)
class Tested:
    """The tests of one metric: the ANOVA, and a t-test for each pair of experiments.

    ``pairs`` maps (later experiment, earlier experiment) to the outcome, corrected for the number
    of pairs. ``paired`` tells whether the t-tests compare the values seed by seed.
    """

    metric: str
    experiments: tuple[str, ...]
    anova: Outcome
    pairs: Mapping[tuple[str, str], Outcome]
    paired: bool = False

    def heading(self, split: str) -> str:
        """Summarise the ANOVA in one line: F, degrees of freedom and p.

        If there is no p value, the line has "n/a" and the reason instead. The line begins with
        ``split`` (``test`` or ``val``) and the metric.
        """
        anova = self.anova
        start = f"{split} {self.metric}, mean over sites: one-way ANOVA"
        if anova.p is None:
            return f"{start} n/a: {anova.why}"
        freedom = ", ".join(map(str, anova.freedom))
        return f"{start} F({freedom}) = {anova.statistic:.3g}, {p_equation(anova.p)}"

    def kind(self) -> str:
        """Describe the t-tests and their correction in one phrase.

        The phrase says that the t-tests are two-sided, whether they are paired by seed, and that p
        values are multiplied by the number of pairs (Bonferroni).
        """
        paired = ""
        if self.paired:
            paired = "paired by seed, "
        return (
            f"p values of two-sided t-tests, {paired}multiplied by the number of pairs, "
            f"{len(self.pairs)} (Bonferroni)"
        )

    def lines(self) -> list[list[str]]:
        """Format the p values of the pairs as a triangle of cells.

        The first row has the column titles: "p" and all experiments but the last. Every other row
        begins with the name of an experiment, from the second to the last. A cell has the p value
        of the row's experiment against the column's, or "n/a" without a p value. A cell without a
        pair is "-".
        """
        columns, later = self.experiments[:-1], self.experiments[1:]
        lines = [["p", *columns]]
        for name in later:
            line = [name]
            for other in columns:
                cell = "-"
                if (name, other) in self.pairs:
                    cell = self.pairs[name, other].cell()
                line.append(cell)
            lines.append(line)
        return lines

    def records(self) -> list[dict[str, Any]]:
        """List the tests as records, the ANOVA first, then the t-test of each pair.

        A record maps the titles of CSV columns to values: the metric, the kind of the test ("ANOVA"
        or "t"), the two experiments ("all" for the ANOVA), the statistic, and the p value before
        and after Bonferroni's correction. For the ANOVA both p values are the same. A missing
        statistic or p value is None.
        """
        named = [("ANOVA", "all", "all", self.anova)]
        for (later, earlier), outcome in self.pairs.items():
            named.append(("t", later, earlier, outcome))
        records = []
        for test, experiment, other, outcome in named:
            record = {
                "metric": self.metric,
                "test": test,
                "experiment": experiment,
                "compared with": other,
                "statistic": outcome.statistic,
                "p": outcome.uncorrected,
                "p corrected": outcome.p,
            }
            records.append(record)
        return records

    def reasons(self) -> list[str]:
        """Return a line for each pair without a p value, with both experiments and the reason."""
        reasons = []
        for (later, earlier), outcome in self.pairs.items():
            if outcome.p is None:
                reasons.append(f"n/a, {later} against {earlier}: {outcome.why}")
        return reasons


def significance(metric: str, samples: Samples, paired: bool) -> Tested:
    """Test whether the values of a metric differ between two or more experiments.

    A one-way ANOVA compares all experiments. Two-sided t-tests compare each pair. Their p values
    are multiplied by the number of pairs (Bonferroni), up to 1. If a test is impossible, its
    outcome has the reason in place of a p value.

    Args:
        metric: the name of the metric.
        samples: experiment -> seed -> value.
        paired: whether the t-tests compare the values seed by seed.

    Returns:
        The outcomes of the ANOVA and of the t-tests. The key of a t-test is the pair of names, the
        experiment that comes later in ``samples`` first.

    Raises:
        SettingError: ``paired`` is True, but the experiments have values for different seeds.
    """
    names = tuple(samples)
    if paired:
        _refuse_other_seeds(metric, samples)
    pairs = list(itertools.combinations(names, 2))
    corrected = {}
    for earlier, later in pairs:
        outcome = two_sided(later, earlier, samples, paired)
        if outcome.p is not None:
            # Bonferroni's correction, because one p of many is small by chance
            outcome = replace(outcome, p=min(1.0, outcome.p * len(pairs)))
        # The later experiment comes first, as in "new method - baseline"
        corrected[later, earlier] = outcome
    values = {}
    for name, by_seed in samples.items():
        values[name] = list(by_seed.values())
    anova = one_way(values)
    return Tested(metric, names, anova, corrected, paired)


def one_way(samples: Mapping[str, Sequence[float]]) -> Outcome:
    """Run a one-way ANOVA, which tests whether the means of experiments differ by more than chance.

    ``samples`` maps each experiment to its values, one per seed. The outcome has a reason in place
    of a p value in two cases:

    - An experiment has fewer than two values.
    - The values of each experiment are all equal.
    """
    from scipy import stats

    why = _too_few(samples)
    if why:
        return Outcome(None, why=why)
    if all(map(_constant, samples.values())):
        return Outcome(None, why="no value varies over seeds")
    # Degrees of freedom: k - 1 between k experiments, N - k within them
    within = sum(map(len, samples.values())) - len(samples)
    return _outcome(lambda: stats.f_oneway(*samples.values()), (len(samples) - 1, within))


def two_sided(later: str, earlier: str, samples: Samples, paired: bool) -> Outcome:
    """Run Student's two-sided t-test of two experiments, and return the uncorrected p value.

    With ``paired``, the differences ``later`` - ``earlier`` are tested seed by seed. Otherwise the
    values are treated as independent, with equal variances.

    The outcome has a reason in place of a p value if an experiment has fewer than two values, or if
    the tested values or differences do not vary over seeds.

    Args:
        later: the name of an experiment.
        earlier: the name of the experiment with which it is compared.
        samples: experiment -> seed -> value. With ``paired``, both experiments have the same seeds.
        paired: whether to compare the values seed by seed.
    """
    from scipy import stats

    chosen = {later: list(samples[later].values()), earlier: list(samples[earlier].values())}
    why = _too_few(chosen)
    if why:
        return Outcome(None, why=why)
    if not paired:
        if all(map(_constant, chosen.values())):
            return Outcome(None, why="neither varies over seeds")
        return _outcome(lambda: stats.ttest_ind(*chosen.values()))
    # Sorted seeds, so that both values of a pair are from the same seed
    seeds = sorted(samples[later])
    ones = [samples[later][seed] for seed in seeds]
    others = [samples[earlier][seed] for seed in seeds]
    differences = list(map(operator.sub, ones, others))
    # Equal differences of large numbers differ by rounding, which grows with the numbers
    if _constant(differences, max(map(abs, [*ones, *others]))):
        return Outcome(None, why="the difference is the same for every seed")
    return _outcome(lambda: stats.ttest_rel(ones, others))


def _outcome(test: Callable[[], Any], freedom: tuple[int, int] = (0, 0)) -> Outcome:
    """Run one of scipy's tests, and return its statistic and p value as an outcome.

    Python's warnings are suppressed. If the p value is undefined (NaN), the outcome has neither a
    statistic nor a p value, and ``why`` says that the values leave the test undefined.

    Args:
        test: a function without arguments that runs the test and returns scipy's result.
        freedom: the two degrees of freedom of an F test, which the outcome records. (0, 0) for
            other tests.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = test()
    p, statistic = float(result.pvalue), float(result.statistic)
    if math.isnan(p):
        return Outcome(None, why="these values leave the test undefined")
    return Outcome(p, statistic, freedom=freedom, uncorrected=p)


def _too_few(samples: Mapping[str, Sequence[float]]) -> str | None:
    """Explain why experiments cannot be tested; None if each has at least two values.

    ``samples`` maps each experiment to its values, one per seed. The text names the experiments
    with fewer than two values.
    """
    few = []
    for name, values in samples.items():
        if len(values) < 2:
            few.append(name)
    if not few:
        return None
    return f"fewer than two seeds of {', '.join(few)} have this metric"


def _constant(values: Sequence[float], scale: float = 0.0) -> bool:
    """Tell whether all values are equal up to the rounding of numbers as large as ``scale``."""
    largest = max(scale, *map(abs, values))
    return max(values) - min(values) <= _ROUNDING * largest


def notes(tested: Tested, seeds: int, paired: bool, same_split: bool | None) -> list[str]:
    """List the remarks that a reader of the p values needs, one line each.

    The first line explains the t-tests and the factor for the number of pairs. Unless the tests are
    paired, a line that advises ``--paired`` follows. The last line says whether the split of the
    data varies with the seed, and how this makes p misleading. If this is unknown, the last line
    says so.

    Args:
        tested: the tests of one metric. Only their number of pairs is used.
        seeds: the number of seeds.
        paired: whether the t-tests compare seed by seed.
        same_split: whether all seeds share one split. None if the sites do not report it.
    """
    kind = "t-tests"
    if paired:
        kind = "paired t-tests, by seed,"
    lines = [
        f"p: two-sided {kind} over {seeds} seeds, multiplied by the number of pairs, "
        f"{len(tested.pairs)} (Bonferroni); not corrected for several metrics"
    ]
    if not paired:
        lines.append(
            "runs with the same seed share split and initial weights, which these tests ignore; "
            "'--paired' tests the differences seed by seed"
        )
    vary = "seeds vary initial weights and the order of batches"
    of_split = {
        True: ", but not the split, so p says nothing about other patients",
        False: ", and the split; training data overlap between splits, so p is too small",
        None: "; these sites do not report whether the split varies too",
    }
    return [*lines, vary + of_split[same_split]]


def check_tests(
    data_sets: Mapping[str, str], *, tests: str | None, paired: bool, seeds: int
) -> None:
    """Check before any run that the requested significance tests are possible.

    Args:
        data_sets: experiment -> its data set.
        tests: the option ``--tests``, which names metrics. None or empty for no tests.
        paired: whether the t-tests compare seed by seed.
        seeds: the number of seeds.

    Raises:
        SettingError: in one of these cases:

            - ``paired`` is True, but no tests are requested.
            - Tests are requested for fewer than two experiments, or for fewer than two seeds.
            - Tests are requested for experiments on different data sets.
    """
    first, *others = data_sets
    if not tests:
        if paired:
            raise SettingError("--paired has no effect without --tests: name metrics to test")
        return
    if not others:
        raise SettingError(
            "--tests compares experiments with one another: name at least two different ones"
        )
    if seeds < 2:
        raise SettingError(f"--tests needs at least 2 seeds, but --seeds is {seeds}: raise --seeds")
    for other in others:
        if data_sets[other] != data_sets[first]:
            raise SettingError(
                f"--tests: experiment '{other}' uses data set '{data_sets[other]}', but '{first}' "
                f"uses '{data_sets[first]}': name experiments on one data set"
            )


def _refuse_other_seeds(metric: str, samples: Samples) -> None:
    """Check that all experiments have values of the metric for the same seeds as the first.

    Raises:
        SettingError: an experiment has values for other seeds. The message lists its seeds and
            those of the first experiment.
    """
    first, *others = samples
    for other in others:
        if samples[other].keys() != samples[first].keys():
            parts = []
            for name in (first, other):
                seeds = ", ".join(map(str, sorted(samples[name])))
                parts.append(f"'{name}' has it for seeds {seeds or 'none'}")
            raise SettingError(
                f"--paired needs metric '{metric}' for the same seeds, but "
                f"{' and '.join(parts)}: remove '--paired' or this metric"
            )


def lines_of_tests(
    tested: Sequence[Tested], split: str, remarks: Sequence[str]
) -> Iterator[Table | str]:
    """Yield the tests of metrics as tables and lines for a terminal.

    Each metric has a table with the p values of all pairs of experiments. The table's title has
    ``split`` (``test`` or ``val``), the metric and the ANOVA's result. Below the table, there is a
    line for each missing p value, with the reason. The ``remarks`` follow after the last metric.
    """
    for test in tested:
        yield rich_table(test.heading(split), test.lines())
        yield from test.reasons()
    yield from remarks


def markdown_tests(tested: Sequence[Tested], split: str, remarks: Sequence[str]) -> str:
    """Format the tests of metrics as Markdown.

    Each metric has a line with the ANOVA's result, a table of the p values of all pairs of
    experiments, and a list of the reasons for missing p values. A list of the ``remarks`` follows
    after the last metric. If there are neither tests nor remarks, the text is empty.
    """
    parts = []
    for test in tested:
        parts += [f"{test.heading(split)}\n", markdown_table(test.lines())]
        parts += [f"- {reason}\n" for reason in test.reasons()]
    if remarks:
        parts.append("".join(f"- {remark}\n" for remark in remarks))
    return "".join(f"\n{part}" for part in parts)


def significance_csv(tested: Sequence[Tested]) -> str:
    """Build the text of a CSV file with one row for each significance test.

    The rows are grouped by metric: first the ANOVA, then the t-test of each pair.
    ``Tested.records`` describes the columns. Numbers have six significant digits.
    """
    rows = []
    for test in tested:
        rows += test.records()
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6g", lineterminator="\n")
