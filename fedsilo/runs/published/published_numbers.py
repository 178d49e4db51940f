"""A paper's numbers next to a run's, if the run is in the setting that the paper measured.

Each YAML file here holds a paper's tables. ``names`` maps the paper's name of a method to the
settings of a run with that method. ``conditions`` lists the settings and sites that a run must have
for a row to be shown. A block with ``name`` or ``dataset`` applies only to rows of that method or
data set, and a row's own ``settings`` override all blocks. If a run has the paper's method and data
but does not meet the conditions, it gets no numbers, and ``unlike`` describes the differences.
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
        """Describe in phrases the conditions of a paper's numbers that a run does not meet.

        There is a phrase for each such setting, and one for all missing and additional sites. If
        the run meets all conditions, the list is empty. A condition on a setting that the run does
        not have counts as met. Only the keys in ``files`` must be settings of the run.

        Args:
            values: the settings of the run by key.
            sites: the names of the run's sites.
        """
        phrases = self._other_sites(set(sites))
        for key, allowed in self.settings.items():
            if key in values and values[key] not in allowed:
                choices = " or ".join(map(repr, allowed))
                phrases.append(f"'{key}' is {values[key]!r}, but must be {choices}")
        for key, least in self.at_least.items():
            if key in values and float(values[key]) < least:
                phrases.append(f"'{key}' is {values[key]}, but must be at least {least:g}")
        for key in self.files:
            if not values[key]:
                phrases.append(f"'{key}' names no file")
        return phrases

    def _other_sites(self, sites: set[str]) -> list[str]:
        """Describe how a run's sites differ from the paper's, as a list with at most one phrase.

        The phrase names the paper's sites that the run lacks, and counts the run's sites that the
        paper lacks. If the sites are the same, or if the conditions name no sites, the list is
        empty.
        """
        if not self.sites:
            return []
        missing = sorted(set(self.sites) - sites)
        extra = sites - set(self.sites)
        parts = []
        if missing:
            parts.append(f"without {', '.join(missing)}")
        if extra:
            parts.append(f"with {len(extra)} more than in the paper")
        if not parts:
            return []
        return [f"the sites are {' and '.join(parts)}"]


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
    # Part whose mean the paper does not print -> the parts to average
    means: Mapping[str, Sequence[str]]
    digits: int | None  # decimals of such a mean

    def numbers_by_part(self) -> Numbers:
        """Arrange the numbers of a row in a paper's table: part -> metric -> number.

        A part is a site, a distribution, or "all". A number that the paper does not print (None) is
        left out, so a part may have no numbers.
        """
        printed: Numbers = {}
        for part, line in zip(self.parts, self.lines, strict=True):
            cells = zip(self.metrics, line, strict=True)
            printed[part] = {metric: number for metric, number in cells if number is not None}
        return printed

    def with_means(self, printed: Numbers) -> Numbers:
        """Add the parts whose numbers are means over other parts, such as over all sites.

        ``means`` maps each such part to the parts to average. If the paper prints a metric of this
        part, the printed number is kept.

        The parts are in the order of a table's rows: the printed parts in alphabetical order, then
        the parts in ``means``. A printed "all" comes last, unless ``means`` has a part "all".

        Args:
            printed: the numbers that the paper prints: part -> metric -> number.
        """
        numbers = {part: printed[part] for part in sorted(printed) if part != "all"}
        for part, members in self.means.items():
            mean = self._mean([printed[member] for member in members])
            numbers[part] = mean | printed.get(part, {})
        # Insertion order is the order of the table's rows, and the total is its last row
        if "all" in printed and "all" not in self.means:
            numbers["all"] = printed["all"]
        return numbers

    def _mean(self, members: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Average each metric that all ``members`` have: metric -> mean.

        ``members`` has the numbers (metric -> number) of each site over which a mean is taken, or
        of each distribution, which is a group of sites with similar data. A mean is rounded to
        ``digits`` decimals. If ``digits`` is None, it is not rounded. Standard deviations (metrics
        that end with "-sd") are left out, because they cannot be averaged.
        """
        means = {}
        for metric in members[0]:
            if metric.endswith("-sd"):
                continue
            if not all(metric in member for member in members):
                continue
            mean = sum(member[metric] for member in members) / len(members)
            if self.digits is not None:
                mean = round(mean, self.digits)
            means[metric] = mean
        return means


@dataclass(frozen=True)
class Paper:
    """A paper's tables, and the settings that make a run of each of its methods."""

    names: Mapping[str, Sequence[Mapping[str, Value]]]
    rows: Sequence[Row]

    def rows_of(self, settings: Mapping[str, Value]) -> list[Row]:
        """Return the rows for a run's method and data set, whether or not their conditions hold."""
        wanted = self._name_of(settings), settings["dataset"]
        return [row for row in self.rows if (row.name, row.dataset) == wanted]

    def _name_of(self, settings: Mapping[str, Value]) -> str:
        """Return the paper's name for a run's method, or "" if the paper has no such method.

        ``names`` maps each name to one or more groups of settings. A name fits if all settings in
        one of these groups are equal to those of the run. The first name that fits is returned.
        """
        for name, runs in self.names.items():
            for run in runs:
                if run.items() <= settings.items():
                    return name
        return ""


def published_numbers(settings: Mapping[str, Value], sites: Iterable[str]) -> Published:
    """Find the numbers that a paper printed for a run with the same settings, data and sites.

    A row of a paper's table fits if it is about the run's method and data set, and if the run meets
    all conditions of the row. If several rows fit, the first one is used. The other rows only add
    metrics that it lacks, and only if their accuracies equal those of the first row.

    Args:
        settings: all settings of the run by key.
        sites: the run's sites.

    Returns:
        ``numbers`` has the numbers by part (site, distribution or "all"). If no row fits, it is
        empty, and ``unlike`` describes how the run differs from the most similar row about its
        method and data set. If there is no such row, ``unlike`` is empty.
    """
    sites = list(sites)
    met = []
    differing = []
    for name in PAPERS:
        for row in paper(name).rows_of(settings):
            departures = row.conditions.departures(settings, sites)
            if departures:
                differing.append(departures)
            else:
                met.append(row)
    if met:
        return Published(met[0].with_means(_merge_rows(met)))
    # The row with the fewest differences is the one that the user most likely meant
    return Published(unlike=in_words(min(differing, key=len, default=[])))


def in_words(differing: Sequence[str]) -> str:
    """Join the first four ``differing`` phrases with semicolons, to describe a run's differences.

    Further phrases are counted as "N more". Without any phrase, the text is empty.
    """
    phrases = [*differing[:_MOST_PHRASES]]
    more = len(differing) - _MOST_PHRASES
    if more > 0:
        phrases.append(f"{more} more")
    return "; ".join(phrases)


@cache
def paper(name: str) -> Paper:
    """Read a paper's tables, and the settings that define its methods, from ``<name>.yaml``.

    ``name`` is one of ``PAPERS``. The file is read only once.
    """
    content: dict[str, Any] = read_own_yaml(_FOLDER / f"{name}.yaml")
    rows = []
    for table in content["tables"]:
        for row in table["rows"]:
            rows.append(_build_row(content, table, row))
    return Paper(content["names"], rows)


def _build_row(content: Mapping[str, Any], table: Mapping[str, Any], own: Mapping[str, Any]) -> Row:
    """Build a row of a paper's table from its entry in the paper's YAML file.

    Keys in the entry of the row override the same keys of the table. Only the key ``settings`` is
    different: the settings of the table and of the row are joined. If ``percent`` is true, all
    numbers are divided by 100.

    Args:
        content: the whole content of the file. Its key ``conditions`` has the conditions that a run
            must meet.
        table: the entry of the table, with the keys that its rows share.
        own: the entry of the row.
    """
    # The last mapping wins: a row's own keys, then those of its table
    row = {"means": {}, **table, **own}
    settings = table.get("settings", {}) | own.get("settings", {})
    scale = 1
    if row.get("percent"):
        scale = 100
    return Row(
        table=row["table"],
        name=row["name"],
        dataset=row["dataset"],
        settings=settings,
        conditions=_conditions(content["conditions"], row, settings),
        metrics=row["metrics"],
        parts=row["parts"],
        lines=[_scale_line(line, scale) for line in row["numbers"]],
        means=row["means"],
        digits=content.get("mean-digits"),
    )


def _scale_line(line: Sequence[float | None], scale: int) -> list[float | None]:
    """Divide each number of a line by ``scale``, for example to convert percentages.

    None stands for a number that the paper does not print, and stays None.
    """
    scaled: list[float | None] = []
    for number in line:
        if number is not None:
            number = number / scale
        scaled.append(number)
    return scaled


def _conditions(
    blocks: Iterable[Mapping[str, Any]], row: Mapping[str, Any], settings: Mapping[str, Value]
) -> Conditions:
    """Merge the conditions of all blocks in a paper's file that apply to a row.

    A block may list the methods and the data sets that it applies to. It says what a run must have
    for the row to be shown:

    - ``settings``: allowed values by key.
    - ``defaults``: keys of settings that must have their default value.
    - ``at-least``: least values by key.
    - ``files``: keys of settings that must name a file.
    - ``sites``: the names of the sites.

    Files and sites of all blocks are joined. For the other conditions, later blocks override
    earlier ones. The argument ``settings`` has the row's own settings, which override the
    ``settings`` and ``defaults`` of all blocks.
    """
    usual = defaults(CommonSettings)
    allowed: dict[str, Any] = {}
    at_least: dict[str, float] = {}
    files: list[str] = []
    sites: list[str] = []
    for block in blocks:
        if not _applies(block, row):
            continue
        # Defaults come first, so a block's own settings can override them
        named = block.get("defaults", [])
        for key, value in usual.items():
            if key in named:
                allowed[key] = value
        allowed |= block.get("settings", {})
        at_least |= block.get("at-least", {})
        files += block.get("files", [])
        sites += block.get("sites", [])
    listed: dict[str, list[Value]] = {}
    for key, values in {**allowed, **settings}.items():
        if not isinstance(values, list):
            values = [values]
        listed[key] = values
    return Conditions(listed, at_least, files, sites)


def _applies(block: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Tell whether a block of conditions applies to a row of a paper's table.

    A block may have a list ``name`` of methods, a list ``dataset`` of data sets, both or neither.
    The row's method must be in the first list, and its data set in the second. If a block lacks a
    list, any method or any data set is accepted in its place.
    """
    keys = {"name", "dataset"} & block.keys()
    return all(row[key] in block[key] for key in keys)


def _merge_rows(rows: Sequence[Row]) -> Numbers:
    """Join the numbers that a paper prints in several tables about the same runs.

    The result maps part -> metric -> number. A part is a site, a distribution or "all". The parts
    are those of the first row, and its numbers are always kept. A later row only adds metrics that
    a part still lacks. If the accuracies of a later row differ from those of the first row, the
    later row is about other runs and is ignored.
    """
    first, *others = [row.numbers_by_part() for row in rows]
    joined = first
    for other in others:
        if _has_same_accuracies(first, other):
            # The first row's number stays if both tables print one
            joined = {part: other.get(part, {}) | numbers for part, numbers in joined.items()}
    return joined


def _has_same_accuracies(first: Numbers, other: Numbers) -> bool:
    """Tell whether both rows have the same accuracy in each part that both have."""
    for part in first.keys() & other.keys():
        if first[part].get("accuracy") != other[part].get("accuracy"):
            return False
    return True
