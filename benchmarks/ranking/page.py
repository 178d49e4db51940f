"""The page of a benchmark, generated from its rows: tables, sentences, and what was not run."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.ranking.config import Benchmark
from benchmarks.ranking.findings import (
    NO_PAIRS,
    Chosen,
    Progress,
    against_fedavg,
    null_pair_line,
    rank_over_seeds,
    size_line,
)
from benchmarks.ranking.pilots import Size, read_pilots, sizes
from benchmarks.ranking.ranks import (
    Ranking,
    chosen_runs,
    equals,
    ranking,
    relative_costs,
    results_table,
)
from benchmarks.ranking.rows import Row, Rows, best_point
from fedsilo.comparison.tables import csv_text, markdown_table
from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.methods import METHODS, title_of
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import data_set

_CELLS = 3  # of docs/methods/README.md's table, after a row's methods
_METHOD = re.compile(r"`([\w-]+)`")


@dataclass(frozen=True)
class Benchmarked:
    """A benchmark that has run, perhaps in part; ``values`` are each experiment's settings."""

    section: str
    benchmark: Benchmark
    rows: Rows
    values: Mapping[str, Mapping[str, Value]]

    @cached_property
    def chosen(self) -> Chosen:
        """The runs at the chosen point, of each experiment and method that is complete."""
        return chosen_runs(self.rows.rows, self.benchmark.seeds, self.benchmark.trial_seeds)

    @cached_property
    def results(self) -> pd.DataFrame:
        """A row per experiment and method that is complete."""
        return results_table(self.chosen)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The mean test metric in percent by method and experiment, in the benchmark's order.

        Means are rounded as the page shows them, so that equal means in the table share a rank.
        """
        wide = self.results.pivot(index="method", columns="experiment", values="mean")
        return wide[[name for name in self.values if name in wide]].map(
            lambda mean: float(_percent(mean))
        )

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """The size of each experiment, by the pilots next to the file of runs."""
        path = self.rows.path
        return sizes(read_pilots(path.with_name(f"{path.stem}-pilots.csv")))

    @property
    def unranked(self) -> list[str]:
        """The methods that have no rank among the others."""
        return [method for method, own in self.benchmark.methods.items() if own.unranked]

    @cached_property
    def finished(self) -> list[str]:
        """The experiments that every method has been through, in the benchmark's order."""
        names = [str(name) for name in self.metrics]
        return [name for name in names if self.progress(name).complete]

    @cached_property
    def over_seeds(self) -> dict[str, Ranking]:
        """The ranking over the seeds of each experiment, of the methods that have all seeds."""
        found = {}
        for name in map(str, self.metrics):
            found[name] = rank_over_seeds(self.chosen, name, self.unranked)
        return found

    @cached_property
    def rankings(self) -> dict[str, Ranking]:
        """The rankings by which the page orders methods.

        With two finished experiments or more these are a ranking over all of them, and one over
        those of images. With one experiment it is the ranking over its seeds. While no experiment
        is finished, methods are ranked over what there is.
        """
        if len(self.finished) == 1:
            (name,) = self.finished
            return {f"seeds of {name}": self.over_seeds[name]}
        metrics = self.metrics.drop(self.unranked, errors="ignore")
        if not self.finished:
            return {"methods so far": ranking(metrics)}
        through, metrics = self.finished, metrics[self.finished]
        found = {"all settings": ranking(metrics)}
        images = [n for n in through if not data_set(str(self.values[n]["dataset"])).is_table]
        if images:
            found["images"] = ranking(metrics[images])
        return found

    @cached_property
    def order(self) -> list[str]:
        """The methods by average rank over all settings, then over images, then the others."""
        names = [name for one in self.rankings.values() for name in one.ranks]
        return list(dict.fromkeys([*names, *map(str, self.metrics.index)]))

    def ranks_of(self, method: str) -> list[str]:
        """Return a method's average rank in each of the rankings, as text."""
        ranks = [one.ranks.get(method) for one in self.rankings.values()]
        return ["-" if rank is None else f"{rank:.1f}" for rank in ranks]

    def lacking(self, experiment: str) -> list[str]:
        """Return the methods that have neither finished here nor failed nor said why not."""
        rows: dict[str, list[Row]] = {method: [] for method in METHODS}
        for row in self.rows.rows:
            if row.experiment == experiment:
                rows[row.method].append(row)
        return [
            m for m in METHODS if (experiment, m) not in self.chosen and not self._ended(rows[m])
        ]

    def _ended(self, rows: Sequence[Row]) -> bool:
        """Tell whether a method without a result has ended: it was refused, or a run failed."""
        if any(row.note and not row.run for row in rows):
            return True
        wanted = len(self.benchmark.rates) * self.benchmark.trial_seeds
        trials = [row for row in rows if row.run and (row.seed or 0) < self.benchmark.trial_seeds]
        best = best_point(rows, self.benchmark.trial_seeds)
        return len(trials) == wanted and any(row.note for row in rows if row.point == best)

    def progress(self, experiment: str) -> Progress:
        """Count what has run of an experiment, and what will have run at its end."""
        finished = sum(name == experiment for name, _ in self.chosen)
        others = len(METHODS) - finished - len(self.lacking(experiment))
        runs = [row for row in self.rows.rows if row.experiment == experiment and row.run]
        expected = self.benchmark.runs * (len(METHODS) - others)
        seeds = self.benchmark.seeds
        return Progress(experiment, finished, others, len(METHODS), seeds, len(runs), expected)

    def lines(self) -> Iterator[str]:
        """Yield the average ranks, and what is missing."""
        for title, one in self.rankings.items() if len(self.results) else ():
            ranks = ", ".join(f"{title_of(name)} {rank:.2f}" for name, rank in one.ranks.items())
            yield f"average ranks, {title}: {ranks}"
        for name in self.benchmark.experiments:
            yield self.progress(name).line()
        yield from missing_lines(self)

    def write(self, page: Path | None, readme: Path | None) -> None:
        """Write the page with tables and pictures in its folder, and a README's last column.

        Raises:
            SettingError: no method is complete.
        """
        from benchmarks.ranking.pictures import draw_costs, draw_ranks
        from fedsilo.pictures.picture_files import write_picture

        if (page or readme) and self.results.empty:
            raise SettingError("no method has all its runs: there is nothing to write a page of")
        if page:
            stem = page.with_suffix("")
            write_atomically(Path(f"{stem}-table.csv"), csv_text(self.results))
            write_atomically(Path(f"{stem}-ranks.csv"), csv_text(ranks_table(self)))
            if self.sizes:
                write_atomically(Path(f"{stem}-sizes.csv"), csv_text(sizes_table(self.sizes)))
            write_picture(Path(f"{stem}-ranks.png"), draw_ranks(self.rankings))
            ranked = self.results[~self.results["method"].isin(self.unranked)]
            write_picture(Path(f"{stem}-costs.png"), draw_costs(ranked))
            write_atomically(page, page_text(self, page))
        if readme:
            write_atomically(readme, with_last_column(readme.read_text(encoding="utf-8"), self))


def ranks_table(found: Benchmarked) -> pd.DataFrame:
    """Return a row per method and ranking: average ranks, their tests, and costs over FedAvg's."""
    costs = relative_costs(found.results)
    over_seeds = {f"seeds of {name}": one for name, one in found.over_seeds.items()}
    return pd.DataFrame(
        {
            "ranked over": title,
            "method": method,
            "average rank": one.ranks.get(method),
            "chi-squared": one.statistic,
            "p": one.p,
            "critical difference": one.difference,
            **costs.get(method, {}),
        }
        for title, one in {**found.rankings, **over_seeds}.items()
        for method in found.order
    )


def sizes_table(found: Mapping[str, Size]) -> pd.DataFrame:
    """Return a row per experiment: FedAvg's validation metric, its plateau, chance and seeds."""
    return pd.DataFrame({"experiment": name, **vars(size)} for name, size in found.items())


def page_text(found: Benchmarked, page: Path) -> str:
    """Return the page as Markdown."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters["title_of"] = title_of
    half = 50 * (found.results["high"] - found.results["low"])  # of intervals, in points
    medians = half.groupby(found.results["experiment"]).median()
    widths = (f"`{name}` {medians.loc[str(name)]:.1f} points" for name in found.metrics)
    rates, chosen = found.benchmark.rates, found.results["rate"]
    return templates.get_template("benchmark.md.j2").render(
        found=found,
        csv=os.path.relpath(found.rows.path, page.parent),
        page=page,
        metrics=markdown_table(list(_metric_lines(found))),
        widths=", ".join(widths),
        finding=_finding(found),
        state=[found.progress(name).line() for name in found.benchmark.experiments],
        tests=list(_test_lines(found)),
        nulls=list(_null_lines(found)),
        sizes=[size_line(name, size) for name, size in found.sizes.items()],
        equals=equals(found.chosen),
        runs=sum(bool(row.run) for row in found.rows.rows),
        minutes=round(sum(row.seconds or 0 for row in found.rows.rows) / 60),
        processors=", ".join(sorted({row.processor for row in found.rows.rows} - {""})),
        edges=int(chosen.isin([min(rates), max(rates)]).sum()),
        missing=list(missing_lines(found)),
    )


def _percent(mean: float) -> str:
    """Format a mean as the page shows it: percent with one decimal."""
    return f"{100 * mean:.1f}"


def _metric_lines(found: Benchmarked) -> Iterator[list[str]]:
    cells = {(row.experiment, row.method): row for row in found.results.itertuples()}

    def cell(experiment: str, method: str) -> str:
        row: Any = cells.get((experiment, method))
        return _percent(row.mean) if row else "-"

    costs = relative_costs(found.results)
    titles = [f"rank, {title}" for title in found.rankings]
    yield ["", *titles, *found.metrics, "bytes", "samples"]
    for method in found.order:
        texts = [*found.ranks_of(method), *(cell(str(name), method) for name in found.metrics)]
        cost = costs.get(method)
        spent = ["-", "-"]
        if cost:
            spent = [f"{cost['bytes']:.2f}", f"{cost['samples']:.2f}"]
        yield [title_of(method), *texts, *spent]


def _finding(found: Benchmarked) -> str:
    """Say in a sentence or two what the finished experiments show of FedAvg and the others."""
    if not found.finished:
        return "No setting is finished: the table has the methods that are, and ranks mean little."
    names = ", ".join(f"`{name}`" for name in found.finished)
    start = f"Finished: {names}. "
    one = next(iter(found.rankings.values()))
    if one.statistic is None or one.p is None:
        return f"{start}There are too few methods or settings for a test."
    first = title_of(next(iter(one.ranks)))
    if not one.is_significant:
        return (
            f"{start}No method is certainly better than another (Friedman's test, p = {one.p:.3f})."
            f" {first} has the best average rank."
        )
    return f"{start}Methods differ by more than chance there; {first} has the best average rank."


def _test_lines(found: Benchmarked) -> Iterator[str]:
    """Yield the tests over settings, if there are several, then those over each one's seeds."""
    if len(found.finished) > 1:
        yield from friedman_lines(found.rankings)
    for name, one in found.over_seeds.items():
        if name not in found.finished:
            yield f"`{name}` is not finished; this is of the methods so far, and may change."
        yield from against_fedavg(one, name)


def _null_lines(found: Benchmarked) -> Iterator[str]:
    for name in found.metrics:
        line = null_pair_line(found.chosen, str(name))
        if line:
            yield line


def friedman_lines(rankings: Mapping[str, Ranking]) -> Iterator[str]:
    """Yield what Friedman's test says of each ranking."""
    for title, one in rankings.items():
        start = f"Over {title} ({one.settings}), {len(one.ranks)} methods are ranked"
        if one.statistic is None or one.p is None or one.difference is None:
            yield f"{start}: too few for a test."
            continue
        p = "p is below a thousandth" if one.p < 1e-3 else f"p = {one.p:.3f}"
        start = f"{start}: Friedman's chi-squared is {one.statistic:.1f}, {p}."
        if not one.is_significant:
            yield f"{start} {NO_PAIRS}"
            continue
        first, *others = one.ranks
        worse = [title_of(m) for m in others if one.ranks[m] > one.ranks[first] + one.difference]
        yield (
            f"{start} Average ranks differ at 5 % if by more than {one.difference:.1f} (Nemenyi). "
            f"So {title_of(first)}, the first, is better than {', '.join(worse) or 'no other'}."
        )


def missing_lines(found: Benchmarked) -> Iterator[str]:
    """Yield a line per reason why methods were not run, and per experiment with runs to come."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in found.rows.rows:
        if row.note:
            reasons.setdefault((row.method, row.note), {})[f"`{row.experiment}`"] = None
    for (method, note), experiments in reasons.items():
        yield f"{title_of(method)} on {', '.join(experiments)}: {note}"
    for name in found.benchmark.experiments:
        if lacking := found.lacking(name):
            names = ", ".join(map(title_of, lacking))
            names = "all methods" if len(lacking) == len(METHODS) else names
            yield f"not yet on `{name}`: {names}"


def with_last_column(readme: str, found: Benchmarked) -> str:
    """Return a README whose table of methods has their average ranks in its last column.

    A row's first cell names its methods; their ranks, over each of the rankings, follow in that
    order. While no experiment is finished, the text is "not yet".
    """
    lines = []
    for line in readme.split("\n"):
        first, *cells = line.strip("| ").split(" | ")
        named = [name for name in _METHOD.findall(first) if name in METHODS]
        if named and len(cells) == _CELLS:
            text = "not yet"
            if found.finished:
                text = "; ".join(" / ".join(found.ranks_of(name)) for name in named)
            line = f"| {' | '.join([first, *cells[:-1], f'[{text}](../results/benchmark.md)'])} |"
        lines.append(line)
    return "\n".join(lines)
