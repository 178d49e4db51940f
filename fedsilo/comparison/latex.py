"""A comparison as LaTeX for a paper: a table of means with intervals, and a table of p values.

The tables need the package booktabs. Rows and columns have the order of the terminal's table. The
caption says what the numbers are and what all rows had in common.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsilo.comparison.budgets import MARK, Budgets
from fedsilo.comparison.results import CONSTANT
from fedsilo.comparison.significance import Tested
from fedsilo.comparison.tables import KEY, over_seeds, published_cell, spread_cell
from fedsilo.core.errors import SettingError
from fedsilo.core.metric_names import best_direction, metric_range
from fedsilo.core.one_line import format_count, terminal_text
from fedsilo.core.versions import FEDSILO
from fedsilo.models.measures.intervals import of_mean

# Means that are equal with this number of decimals are equally good
_DECIMALS = 3
_ESCAPES = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # LaTeX would take a '[' at the start of a row for an option of the row before
    "[": "{[}",
    "±": r"$\pm$",
}


def escape_latex(text: str) -> str:
    """Escape a string so that LaTeX shows it as it is, on one line.

    Line breaks and repeated spaces become one space. Each character that cannot be printed becomes
    the replacement character U+FFFD.
    """
    line = " ".join(terminal_text(text).split())
    return "".join(_ESCAPES.get(sign, sign) for sign in line)


# The last Latin letter that pdfLaTeX's usual fonts have
_LATIN = 0x17F
_OTHER_SCRIPTS = (
    "% pdfLaTeX lacks some of these letters: use LuaLaTeX or XeLaTeX with a font that has them"
)


def latex_text(
    results: pd.DataFrame,
    split: str,
    tested: Sequence[Tested],
    budgets: Budgets,
    median: bool = False,
) -> str:
    """Build the LaTeX tables of a comparison: one of results, and one of p values per test.

    The text starts with a comment that names the LaTeX package that the tables need. If pdfLaTeX's
    usual fonts lack letters of the text, such as Greek ones, another comment names compilers that
    have them.

    Args:
        results: the tidy results (a row per value). Experiments with unequal budgets are marked
            here.
        split: ``test`` or ``val``.
        tested: the tests, one for each tested metric.
        budgets: the budget of each experiment.
        median: whether to show median and range over seeds in place of mean, deviation and
            interval.

    Raises:
        SettingError: no metric has values of two experiments at the same group of sites. The
            baseline that always predicts one class does not count as an experiment.
    """
    _refuse_incomparable(results)
    table = _ResultsTable(budgets.mark_unequal(results), split, budgets, median)
    parts = [
        f"% written by fedsilo {FEDSILO}; the preamble needs \\usepackage{{booktabs}}\n",
        table.text(),
    ]
    for test in tested:
        parts.append(_tests_table(test, split))
    text = "\n".join(parts)
    # pdfLaTeX stops at letters such as those of a site named in Japanese
    if any(ord(letter) > _LATIN and letter.isalpha() for letter in text):
        return f"{_OTHER_SCRIPTS}\n{text}"
    return text


def _refuse_incomparable(results: pd.DataFrame) -> None:
    own = results[results["experiment"] != CONSTANT]
    experiments = own.groupby(["group", "metric"])["experiment"].nunique()
    if experiments.empty or experiments.max() < 2:
        raise SettingError(
            "--latex writes a table that compares, but no metric has values of two experiments at "
            "one group of sites: name at least two experiments on one data set"
        )


@dataclass(frozen=True)
class _ResultsTable:
    """The table of means; the arguments are those of ``latex_text``."""

    results: pd.DataFrame
    split: str
    budgets: Budgets
    median: bool

    def text(self) -> str:
        """Build the LaTeX table of results over seeds.

        Each experiment and group of sites has a row with the values. If any of these has a
        confidence interval, a row with the intervals follows. A metric that a paper reports has a
        second column, with the paper's numbers.
        """
        spreads = over_seeds(self.results)
        metrics = list(spreads["metric"].unique())
        known = set(spreads.loc[spreads["published"].notna(), "metric"])
        columns = ["experiment", "group"]
        for metric in metrics:
            columns.append(f"{self.split} {metric}")
            if metric in known:
                columns.append("published")
        best = _find_best(spreads, self.median)
        rows = list(self._rows(spreads, metrics, known, best))
        return build_table(
            " ".join(self._caption(spreads, best)), "tab:comparison", columns, rows, 2
        )

    def _rows(
        self, spreads: pd.DataFrame, metrics: Sequence[str], known: set[str], best: set[Any]
    ) -> Iterator[list[str]]:
        """Yield the rows of cells. An empty row, which becomes a line, separates two experiments.

        Each experiment and group of sites has a row of values. If any of these has an interval, a
        row with the intervals follows. In both rows, the first two cells are for the names of the
        experiment and of the group.

        Args:
            spreads: the statistics over seeds, a row per experiment, group and metric.
            metrics: the metrics, in the order of their columns.
            known: the metrics that also have a column of a paper's numbers.
            best: the values in bold, as (experiment, group, metric).
        """
        most = spreads.groupby("experiment")["seeds"].max()
        before = ""
        groups: Any = spreads.groupby(["experiment", "group"], sort=False)
        for (experiment, group), part in groups:
            if before and before != experiment:
                yield []
            before = experiment
            found = {str(row.metric): row for row in part.itertuples()}
            upper, lower = [escape_latex(experiment), escape_latex(group)], ["", ""]
            for metric in metrics:
                row = found.get(metric)
                upper.append(self._cell(row, best, int(most[experiment])))
                lower.append(self._interval(row))
                if metric in known:
                    upper.append(_format_published(row))
                    lower.append("")
            yield upper
            if any(lower):
                yield lower

    def _cell(self, row: Any, best: set[Any], seeds: int) -> str:
        """Format a metric's value over seeds as LaTeX: mean ± deviation, or median and range.

        If some seeds of the experiment lack the metric, the cell adds how many have it, as in "(2
        of 3 seeds)".

        Args:
            row: the statistics of the metric over seeds. None if the experiment lacks the metric,
                which gives an empty cell.
            best: the values in bold, as (experiment, group, metric).
            seeds: the number of the experiment's seeds.
        """
        if row is None:
            return ""
        text = escape_latex(spread_cell(row, self.median))
        if row.seeds < seeds:
            text += f" ({row.seeds} of {seeds} seeds)"
        if (row.experiment, row.group, row.metric) in best:
            return f"\\textbf{{{text}}}"
        return text

    def _interval(self, row: Any) -> str:
        """Format the 95 % t interval of a mean over seeds as LaTeX, in small print.

        The interval is computed from the values of all seeds and clipped to the metric's range. The
        result is an empty string if there is a single seed, or if the table shows medians.

        Args:
            row: the metric's statistics over seeds. None if the experiment lacks the metric, which
                gives an empty string.
        """
        if row is None or self.median:
            return ""
        same = self.results[KEY] == [row.experiment, row.group, row.metric]
        values = self.results.loc[same.all(axis=1), "value"].tolist()
        interval = of_mean(values, *metric_range(row.metric))
        if interval is None:
            return ""
        text = f"[{interval.low:.{_DECIMALS}f}, {interval.high:.{_DECIMALS}f}]"
        return f"\\scriptsize {escape_latex(text)}"

    def _caption(self, spreads: pd.DataFrame, best: set[Any]) -> Iterator[str]:
        """Yield the caption's sentences on the meaning of the numbers and on the budgets.

        The first sentence names the data, the split, the statistics and the number of seeds. If
        there are bold values, the next sentence explains them. The remaining sentences say whether
        the experiments had equal budgets (rounds, steps, samples, network, start and tuning).
        """
        data = ", ".join(sorted({budget.dataset for budget in self.budgets.of.values()}))
        most = int(spreads["seeds"].max())
        seeds = format_count(most, "seed")
        shown = (
            f"mean $\\pm$ sample standard deviation over {seeds}; below, the 95\\,\\% confidence "
            "interval of the mean (Student's t)"
        )
        if self.median:
            shown = f"median and range over {seeds}"
        if most == 1:
            shown = "values of one seed"
        start = escape_latex(", ".join(filter(None, (data, f"{self.split} samples"))))
        yield f"{start}: {shown}."
        if best:
            yield "The best value of each group is in bold."
        for sentence in _terms(self.budgets):
            yield escape_latex(sentence)


def _terms(budgets: Budgets) -> Iterator[str]:
    """Yield the caption's sentences on whether the experiments had equal budgets.

    If some budgets are unequal, there is a sentence for each such experiment. Otherwise one
    sentence names the equal parts: rounds, steps, samples, network, start and tuning. Steps and
    samples are sums over sites, given as a range if they differ slightly. If steps are unknown,
    batch size and local steps take their place. For several data sets, the sentence has no numbers
    and no tuning. Without budgets, nothing is yielded.
    """
    if budgets.unlike():
        for said in budgets.remarks():
            yield f"{said[0].upper()}{said[1:]} (marked {MARK.strip()})."
        return
    rows = list(budgets.of.values())
    data = {budget.dataset for budget in rows}
    known = all(budget.steps for budget in rows)
    if len(data) > 1:
        work = "steps, samples" if known else "batch size, local steps"
        yield f"Rows on one data set had the same rounds, {work}, network and start."
    elif rows:
        rounds = _format_range([int(budget.given["rounds"]) for budget in rows], "round")
        work = "the same batch size and local steps"
        if known:
            steps = _format_range([budget.steps for budget in rows], "optimiser step")
            samples = _format_range([budget.samples for budget in rows], "sample")
            work = f"{steps} on {samples} over all sites"
        tuned = "untuned settings"
        if rows[0].trials:
            tuned = f"settings chosen from {rows[0].trials} tuning points"
        yield (f"All rows had {rounds}, {work}, the same network and initial weights, and {tuned}.")


def _format_range(numbers: Sequence[float], noun: str) -> str:
    """Format numbers with their noun, such as "5 rounds" or "3 to 5 rounds".

    The numbers are rounded first. If they are then all equal, only one is given. Otherwise the text
    has the smallest and the largest number.
    """
    low, high = round(min(numbers)), round(max(numbers))
    if low == high:
        return format_count(low, noun)
    return f"{low:,} to {format_count(high, noun)}"


def _format_published(row: Any) -> str:
    """Format the number that a paper reports for a metric, as LaTeX.

    ``row`` has the metric's statistics over seeds, with the paper's number and perhaps its standard
    deviation. The result is an empty string if there is no such number, or if ``row`` is None.
    """
    if row is None:
        return ""
    return escape_latex(published_cell(row))


def _find_best(spreads: pd.DataFrame, median: bool) -> set[Any]:
    """Find the best value of each group and metric, as a set of (experiment, group, metric).

    The metric decides whether high or low values are better. Values are compared after rounding to
    three decimals, so several experiments may be best. There is no best value in two cases: neither
    high nor low is better, such as for entropy, or all rounded values of the group are equal.

    Args:
        spreads: the statistics over seeds, a row per experiment, group of sites and metric.
        median: whether to compare medians in place of means.
    """
    best: set[Any] = set()
    column = "mean"
    if median:
        column = "median"
    for (_, metric), part in spreads.groupby(["group", "metric"], sort=False):
        direction = best_direction(str(metric))
        shown = part[column].round(_DECIMALS)
        if direction and shown.nunique() > 1:
            most = (direction * shown).max()
            winners = part[direction * shown == most]
            best |= set(winners[KEY].itertuples(index=False, name=None))
    return best


def _tests_table(test: Tested, split: str) -> str:
    """Build the LaTeX table of one metric's p values, with a cell for each pair of experiments.

    The cells form a triangle, because each pair occurs once. The caption names ``split``, which is
    ``test`` or ``val``, and states the result of the ANOVA over all experiments. It says that the
    pairs are compared by two-sided t-tests with Bonferroni's correction, and whether these are
    paired by seed. For each pair without a p value, the caption states the reason.
    """
    columns, *rows = test.lines()
    caption = [f"{test.heading(split)}.", f"Below, {test.kind()}."]
    caption += [f"{reason}." for reason in test.reasons()]
    cells = [[escape_latex(cell) for cell in row] for row in rows]
    text = escape_latex(" ".join(caption))
    label = "tab:p-" + re.sub(r"[^a-z0-9]+", "-", test.metric)
    return build_table(text, label, columns, cells, 1)


def build_table(
    caption: str, label: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: int
) -> str:
    r"""Build a LaTeX table in the style of the package booktabs.

    Args:
        caption: the caption, as LaTeX.
        label: the label for ``\ref``.
        columns: the titles of the columns, as plain text.
        rows: the cells of each row, as LaTeX. An empty row becomes a horizontal line.
        names: the number of columns at the left that are aligned left. All other columns are
            aligned right.
    """
    lines = [
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{caption}}}",
        f"  \\label{{{label}}}",
        f"  \\begin{{tabular}}{{{'l' * names}{'r' * (len(columns) - names)}}}",
        "    \\toprule",
        f"    {' & '.join(map(escape_latex, columns))} \\\\",
        "    \\midrule",
    ]
    for row in rows:
        line = "    \\midrule"
        if row:
            line = f"    {' & '.join(row)} \\\\"
        lines.append(line)
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    return "\n".join(lines)
