"""A paper's numbers next to a run's, if the run is in the setting that the paper measured.

Each YAML file here holds a paper's tables. ``names`` maps the paper's name of a method to the
settings of a run with that method. ``conditions`` lists the settings and sites that a run must have
for a row to be shown; a block with ``name`` or ``dataset`` applies to those rows only, and a row's
own ``settings`` override all blocks. A run of the paper's method on its data that does not meet the
conditions gets no number, and ``unlike`` describes the differences.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedsilo.core.files.yaml_text import read_own_yaml
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, defaults

Numbers = dict[str, dict[str, float]]

_FOLDER = Path(__file__).parent
_MOST_PHRASES = 4
PAPERS = ("flamby", "picsr", "fedevprompt", "fedaligncl", "uefl")


@dataclass(frozen=True)
class Published:
    """The numbers that a paper has for a run, or the reason why none applies."""

    # Distribution, site or "all" -> metric -> value; empty if there are none
    numbers: Numbers = field(default_factory=dict)
    # The differences from the paper's setting, if they are the only reason for no numbers
    unlike: str = ""


@dataclass(frozen=True)
class Conditions:
    """The settings, files and sites that a run must have for a row to be shown."""

    # Key -> the values that it may have; a key that the run lacks is not a condition
    settings: Mapping[str, Collection[Value]]
    # Key -> the least value that it may have
    at_least: Mapping[str, float] = field(default_factory=dict)
    files: Collection[str] = ()  # keys that must name a file
    sites: Collection[str] = ()  # the sites that must take part, and no others; any if empty

    def departures(self, values: Mapping[str, Value], sites: Iterable[str] = ()) -> list[str]:
        """Return a phrase for each difference of a run from the conditions; none if it meets them.

        ``values`` are all settings of the run.
        """
        other = [
            f"'{key}' is {values[key]!r}, but must be {' or '.join(map(repr, allowed))}"
            for key, allowed in self.settings.items()
            if key in values and values[key] not in allowed
        ]
        less = [
            f"'{key}' is {values[key]}, but must be at least {least:g}"
            for key, least in self.at_least.items()
            if key in values and float(values[key]) < least
        ]
        absent = [f"'{key}' names no file" for key in self.files if not values[key]]
        return [*self._other_sites({*sites}), *other, *less, *absent]

    def _other_sites(self, sites: set[str]) -> list[str]:
        missing, extra = sorted({*self.sites} - sites), sites - {*self.sites}
        if not self.sites or not (missing or extra):
            return []
        without = [f"without {', '.join(missing)}"] if missing else []
        more = [f"with {len(extra)} more than in the paper"] if extra else []
        return [f"the sites are {' and '.join(without + more)}"]


@dataclass(frozen=True)
class Row:
    """One method's numbers in one setting, as a table prints them."""

    table: int | str  # its number in the paper
    name: str  # the method, in the paper's words
    dataset: str  # the name of the data set in a run's settings
    settings: Mapping[str, Value]  # the settings that this row varies
    conditions: Conditions  # the conditions on a run, ``settings`` included
    metrics: Sequence[str]  # the columns of ``lines``
    parts: Sequence[str]  # the sites, distributions or "all" that each line is for
    # A line of numbers per part; None where none is printed
    lines: Sequence[Sequence[float | None]]
    # Part -> the parts of which it is the mean, where the paper prints none
    means: Mapping[str, Sequence[str]]
    digits: int | None  # decimals of such a mean

    def printed(self) -> Numbers:
        """Return the numbers of this row: part -> metric -> number."""
        printed: Numbers = {}
        for part, line in zip(self.parts, self.lines, strict=True):
            cells = zip(self.metrics, line, strict=True)
            printed[part] = {metric: number for metric, number in cells if number is not None}
        return printed

    def with_means(self, printed: Numbers) -> Numbers:
        """Add the means of ``means``: parts in alphabetical order, then the means."""
        parts = {part: printed[part] for part in sorted(printed) if part != "all"}
        means = {
            part: self._mean([printed[member] for member in members])
            for part, members in self.means.items()
        }
        groups = [*means, *(["all"] if "all" in printed and "all" not in means else [])]
        return parts | {part: means.get(part, {}) | printed.get(part, {}) for part in groups}

    def _mean(self, members: Sequence[Mapping[str, float]]) -> dict[str, float]:
        means = {
            metric: sum(member[metric] for member in members) / len(members)
            for metric in members[0]
            if all(metric in member for member in members) and not metric.endswith("-sd")
        }
        if self.digits is None:
            return means
        return {metric: round(mean, self.digits) for metric, mean in means.items()}


@dataclass(frozen=True)
class Paper:
    """A paper's tables, and the settings that make a run of each of its methods."""

    names: Mapping[str, Sequence[Mapping[str, Value]]]
    rows: Sequence[Row]

    def rows_of(self, settings: Mapping[str, Value]) -> list[Row]:
        """Return the rows for a run's method and data set.

        The method is the first of ``names`` whose settings the run has.
        """
        names = (
            name
            for name, runs in self.names.items()
            if any(run.items() <= settings.items() for run in runs)
        )
        wanted = next(names, ""), settings["dataset"]
        return [row for row in self.rows if (row.name, row.dataset) == wanted]


def published_numbers(settings: Mapping[str, Value], sites: Iterable[str]) -> Published:
    """Find the papers' numbers for a run with these settings, all given, at these sites."""
    sites = list(sites)
    rows = [row for name in PAPERS for row in paper(name).rows_of(settings)]
    differing = [row.conditions.departures(settings, sites) for row in rows]
    met = [row for row, differs in zip(rows, differing, strict=True) if not differs]
    if met:
        return Published(met[0].with_means(_merge_rows(met)))
    return Published(unlike=in_words(min(differing, key=len, default=[])))


def in_words(differing: Sequence[str]) -> str:
    """Join the first four differences in one line, and count the rest."""
    more = len(differing) - _MOST_PHRASES
    return "; ".join([*differing[:_MOST_PHRASES], *([f"{more} more"] if more > 0 else [])])


@cache
def paper(name: str) -> Paper:
    """Read the tables of ``name``.yaml."""
    content: dict[str, Any] = read_own_yaml(_FOLDER / f"{name}.yaml")
    rows = [_row(content, table, row) for table in content["tables"] for row in table["rows"]]
    return Paper(content["names"], rows)


def _row(content: Mapping[str, Any], table: Mapping[str, Any], own: Mapping[str, Any]) -> Row:
    """Build a row of a table; keys of the table hold for all its rows, unless a row has its own."""
    row = {"means": {}, **table, **own}
    settings = table.get("settings", {}) | own.get("settings", {})
    scale = 100 if row.get("percent") else 1
    return Row(
        **{key: row[key] for key in ("table", "name", "dataset", "metrics", "parts", "means")},
        settings=settings,
        conditions=_conditions(content["conditions"], row, settings),
        lines=[[None if n is None else n / scale for n in line] for line in row["numbers"]],
        digits=content.get("mean-digits"),
    )


def _conditions(
    blocks: Iterable[Mapping[str, Any]], row: Mapping[str, Any], settings: Mapping[str, Value]
) -> Conditions:
    """Merge the conditions of all blocks that apply to a row; the row's settings come last."""
    usual = defaults(CommonSettings)
    allowed: dict[str, Any] = {}
    at_least: dict[str, float] = {}
    files, sites = [], []
    for block in blocks:
        if any(key in block and row[key] not in block[key] for key in ("name", "dataset")):
            continue
        named = block.get("defaults", [])
        allowed |= {key: value for key, value in usual.items() if key in named}
        allowed |= block.get("settings", {})
        at_least |= block.get("at-least", {})
        files += block.get("files", [])
        sites += block.get("sites", [])
    listed = {k: v if isinstance(v, list) else [v] for k, v in {**allowed, **settings}.items()}
    return Conditions(listed, at_least, files, sites)


def _merge_rows(rows: Sequence[Row]) -> Numbers:
    """Merge rows: the first row's numbers, plus metrics of later rows with the same accuracies."""
    first, *others = (row.printed() for row in rows)
    joined = first
    for other in others:
        if all(ns.get("accuracy") == first[part].get("accuracy") for part, ns in other.items()):
            joined = {part: other.get(part, {}) | numbers for part, numbers in joined.items()}
    return joined
