"""Named silos and the network links between them: the Gaia network, or a CSV file of edges.

Gaia is the 11 AWS regions of Hsieh et al. 2017, "Gaia: geo-distributed machine learning approaching
LAN speeds", as used by Marfoq et al. 2020, "Throughput-optimal topology design for cross-silo
federated learning": every pair is linked, and a link has a latency of 4 ms plus 0.0085 ms per km of
great-circle distance, and 1 Gbps.

A file has the columns ``site`` and ``neighbour``, and optionally ``latency-ms`` and ``gbps``. An
edge goes both ways. If a value is missing, the run's ``link-latency-ms`` or ``link-gbps`` applies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from fedsilo.core.errors import DataError
from fedsilo.core.files.site_names import normalise_name, site_name_fault
from fedsilo.core.files.text_files import read_rows

GAIA = "gaia"

_EDGE, _VALUES = ("site", "neighbour"), ("latency-ms", "gbps")
_EARTH_RADIUS = 6371.0  # km
_LATENCY, _LATENCY_PER_KM = 4.0, 0.0085  # ms
_GAIA_GBPS = 1.0

# Degrees north and east; distances are those of the authors' gaia.gml within 1 %
_REGIONS = {
    "virginia": (37.12, -78.49),
    "california": (36.70, -118.76),
    "oregon": (43.98, -120.74),
    "ireland": (53.35, -6.26),
    "frankfurt": (50.11, 8.68),
    "tokyo": (35.69, 139.69),
    "seoul": (37.57, 126.98),
    "singapore": (1.35, 103.82),
    "sydney": (-33.87, 151.21),
    "mumbai": (19.08, 72.88),
    "sao-paulo": (-23.55, -46.63),
}


@dataclass(frozen=True)
class Link:
    """A link between two silos, the same in both directions; None means the run's default."""

    latency_ms: float | None = None
    gbps: float | None = None


@dataclass(frozen=True)
class SiloSet:
    """Silos and the links between them.

    Attributes:
        names: the silos, in order of appearance.
        links: linked pair -> link; each pair appears once, with the earlier silo first. Not every
            pair need be linked.
    """

    names: tuple[str, ...]
    links: Mapping[tuple[str, str], Link]

    def link(self, first: str, second: str) -> Link | None:
        """Return the link between two silos in either order, or None if they are not linked."""
        return self.links.get((first, second)) or self.links.get((second, first))


def open_silo_set(text: str) -> SiloSet:
    """Open the set of silos, and of links between them, that 'split.silo-set' names.

    ``text`` is 'gaia', a set that comes with fedsilo, or the path of a CSV file. Its columns are
    'site' and 'neighbour', and optionally 'latency-ms' (milliseconds) and 'gbps' (gigabits per
    second). A relative path is relative to the working directory, and '~' is expanded.

    Raises:
        DataError: the file is missing or not CSV, a column is missing, or a name or number is
            invalid. The error is also raised if there is no link, a link is repeated in either
            direction, or a link joins a silo with itself.
    """
    if text == GAIA:
        return _gaia()
    path = Path(text).expanduser()
    if not path.is_file():
        raise DataError(
            f"silo set '{text}' is neither '{GAIA}' nor a file: name a CSV file with the columns "
            f"{', '.join(_EDGE + _VALUES)} by its full path"
        )
    return _read_edges(path)


def great_circle_km(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the great-circle distance in km between two points (degrees north, degrees east).

    The haversine formula is used, on a sphere of radius 6371 km.
    """
    north, east, north_there, east_there = (math.radians(x) for x in (*first, *second))
    # The shorter formula by the arc cosine would lose digits for points nearby, because its
    # argument is near 1
    half = (
        math.sin((north - north_there) / 2) ** 2
        + math.cos(north) * math.cos(north_there) * math.sin((east - east_there) / 2) ** 2
    )
    return 2 * _EARTH_RADIUS * math.asin(math.sqrt(half))


def _gaia() -> SiloSet:
    links = {}
    for first, second in combinations(_REGIONS, 2):
        distance = great_circle_km(_REGIONS[first], _REGIONS[second])
        links[first, second] = Link(_LATENCY + _LATENCY_PER_KM * distance, _GAIA_GBPS)
    return SiloSet(tuple(_REGIONS), links)


def _read_edges(path: Path) -> SiloSet:
    """Read silos and the links between them from a CSV file with one link per line.

    The columns are 'site' and 'neighbour', and optionally 'latency-ms' and 'gbps'. An empty or
    missing value becomes None. The silos are in the order of their first appearance. A link goes
    both ways, so the line b,a repeats the line a,b.

    Raises:
        DataError: a silo's name or a number is invalid, a link is repeated or joins a silo with
            itself, or the file has no link.
    """
    names: dict[str, int] = {}
    links: dict[tuple[str, str], Link] = {}
    lines: dict[tuple[str, str], int] = {}
    for number, row in read_rows(path, _EDGE, _VALUES):
        where = f"{path}, line {number}"
        ends = [normalise_name(row[column]) for column in _EDGE]
        for name in ends:
            names.setdefault(name, len(names))
        # An edge has no direction: the silo that appears earlier in the file is always the first
        first, second = sorted(ends, key=names.__getitem__)
        pair = first, second
        fault = ""
        if any(map(site_name_fault, ends)):  # a cell is never quoted
            fault = (
                "a silo's name must begin with a letter or digit, must not have characters such as "
                "'/' (docs/own-data.md lists them), and must not be 'all': rename the silo"
            )
        elif first == second:
            fault = "an edge joins a silo with itself: remove the line"
        elif pair in links:
            fault = (
                f"the edge between these two silos is in line {lines[pair]} too, but an edge goes "
                "both ways: keep one of the lines"
            )
        if fault:
            raise DataError(f"{where}: {fault}")
        latency = _read_number(row, "latency-ms", where, zero=True)
        links[pair] = Link(latency, _read_number(row, "gbps", where, zero=False))
        lines[pair] = number
    if not links:
        raise DataError(
            f"{path} has no edge, but a silo set needs at least 2 silos and an edge: add a line"
        )
    return SiloSet(tuple(names), links)


def _read_number(row: Mapping[str, str], column: str, where: str, zero: bool) -> float | None:
    """Read a cell of a CSV row as a number. An empty cell and a missing column give None.

    Args:
        row: column -> text.
        column: the column to read.
        where: the file and line, for errors.
        zero: whether 0 is allowed too.

    Raises:
        DataError: the value is not a finite number, is below 0, or is 0 although ``zero`` is false.
    """
    text = row.get(column)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_allowed = value > 0 or (zero and value == 0)
    if not math.isfinite(value) or not is_allowed:
        least = "from 0" if zero else "above 0"
        raise DataError(
            f"{where}, column '{column}': the value must be a number {least}: correct it, or leave "
            "the cell empty for the run's default"
        )
    return value
