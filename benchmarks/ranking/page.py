"""The page of a benchmark, generated from its rows: tables, sentences, and what was not run."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.ranking.config import Benchmark
from benchmarks.ranking.ranks import (
    Ranking,
    equals,
    ranking,
    relative_costs,
    results_table,
)
from benchmarks.ranking.rows import Rows
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
    def results(self) -> pd.DataFrame:
        """A row per experiment and method that is complete."""
        return results_table(self.rows.rows, self.benchmark.seeds)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The mean test metric in percent by method and experiment, in the benchmark's order.

        Means are rounded as the page shows them, so that equal means in the table share a rank.
        """
        wide = self.results.pivot(index="method", columns="experiment", values="mean")
        return wide[[name for name in self.values if name in wide]].map(
            lambda mean: float(_percent(mean))
        )

    @property
    def unranked(self) -> list[str]:
        """The methods that have no rank among the others."""
        return [method for method, own in self.benchmark.methods.items() if own.unranked]

    @cached_property
    def rankings(self) -> dict[str, Ranking]:
        """The ranking over all settings that most methods have been through, and over images."""
        names = [str(name) for name in self.metrics]
        through = [n for n in names if len(self.lacking(n)) < len(METHODS) / 2] or names
        metrics = self.metrics[through].drop(self.unranked, errors="ignore")
        images = [n for n in through if not data_set(str(self.values[n]["dataset"])).is_table]
        found = {"all settings": ranking(metrics)}
        return found | ({"images": ranking(metrics[images])} if images else {})

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
        """Return the methods that have neither run here nor said why not."""
        rows = [row for row in self.rows.rows if row.experiment == experiment]
        done = {row.method for row in rows if row.note}
        done |= set(self.results.loc[self.results["experiment"] == experiment, "method"])
        return [method for method in METHODS if method not in done]

    def lines(self) -> Iterator[str]:
        """Yield the average ranks, and what is missing."""
        for title, one in self.rankings.items() if len(self.results) else ():
            ranks = ", ".join(f"{title_of(name)} {rank:.2f}" for name, rank in one.ranks.items())
            yield f"average ranks, {title}: {ranks}"
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
            write_picture(Path(f"{stem}-ranks.png"), draw_ranks(self.rankings))
            ranked = self.results[~self.results["method"].isin(self.unranked)]
            write_picture(Path(f"{stem}-costs.png"), draw_costs(ranked))
            write_atomically(page, page_text(self, page))
        if readme:
            write_atomically(readme, with_last_column(readme.read_text(encoding="utf-8"), self))


def ranks_table(found: Benchmarked) -> pd.DataFrame:
    """Return a row per method and ranking: average ranks, their tests, and costs over FedAvg's."""
    costs = relative_costs(found.results)
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
        for title, one in found.rankings.items()
        for method in found.order
    )


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
        finding=_finding(found.rankings["all settings"]),
        tests=list(friedman_lines(found.rankings)),
        equals=equals(found.rows.rows, found.benchmark.seeds),
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
    yield ["", *(f"rank, {title}" for title in found.rankings), *found.metrics, "bytes", "seconds"]
    for method in found.order:
        texts = [*found.ranks_of(method), *(cell(str(name), method) for name in found.metrics)]
        cost = costs.get(method)
        spent = [f"{cost['bytes']:.2f}", f"{cost['seconds']:.1f}"] if cost else ["-", "-"]
        yield [title_of(method), *texts, *spent]


def _finding(one: Ranking) -> str:
    if one.statistic is None or one.p is None or one.p < 0.05:
        return "The table gives the methods' average ranks."
    first = next(iter(one.ranks))
    return (
        f"No method is certainly better than another here (Friedman's test, p = {one.p:.3f}). "
        f"{title_of(first)} has the best average rank, {one.ranks[first]:.1f} of "
        f"{len(one.ranks)} methods."
    )


def friedman_lines(rankings: Mapping[str, Ranking]) -> Iterator[str]:
    """Yield what Friedman's test says of each ranking."""
    for title, one in rankings.items():
        start = f"Over {title} ({one.settings}), {len(one.ranks)} methods are ranked"
        if one.statistic is None or one.p is None or one.difference is None:
            yield f"{start}: too few for a test."
            continue
        p = "p is below a thousandth" if one.p < 1e-3 else f"p = {one.p:.3f}"
        first, *others = one.ranks
        worse = [title_of(m) for m in others if one.ranks[m] > one.ranks[first] + one.difference]
        yield (
            f"{start}: Friedman's chi-squared is {one.statistic:.1f}, {p}. Average ranks differ at "
            f"5 % if by more than {one.difference:.1f} (Nemenyi). So {title_of(first)}, the first, "
            f"is better than {', '.join(worse) or 'no other'}."
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
    order.
    """
    lines = []
    for line in readme.split("\n"):
        first, *cells = line.strip("| ").split(" | ")
        named = [name for name in _METHOD.findall(first) if name in METHODS]
        if named and len(cells) == _CELLS:
            text = "; ".join(" / ".join(found.ranks_of(name)) for name in named)
            line = f"| {' | '.join([first, *cells[:-1], f'[{text}](../results/benchmark.md)'])} |"
        lines.append(line)
    return "\n".join(lines)
