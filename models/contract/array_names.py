"""How arrays are named, on the wire and in a site's own state: ``<kind>/<site>/<array>``.

The first '/' ends the kind, the second ends the site, and the rest is the array's own name, which
may have a '/'; a site's name has none. A kind is a method's constant that ends in '/'
(``expert/``). Arrays of no particular site are ``<kind>/<array>``, and a site's only array of a
kind is ``<kind>/<site>``.
"""

from collections.abc import Mapping
from typing import TypeVar

A = TypeVar("A")

_STATISTICS = ("running_mean", "running_var")  # of batch norm


def arrays_below(prefix: str, arrays: Mapping[str, A]) -> dict[str, A]:
    """Return the arrays whose names begin with ``prefix``, by the rest of their names, sorted."""
    return {
        name.removeprefix(prefix): array
        for name, array in sorted(arrays.items(), key=lambda named: named[0])
        if name.startswith(prefix)
    }


def with_prefix(prefix: str, arrays: Mapping[str, A]) -> dict[str, A]:
    """Return the same arrays, each with ``prefix`` before its name; ``arrays_below`` undoes it."""
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def by_site(arrays: Mapping[str, A]) -> dict[str, dict[str, A]]:
    """Return arrays named ``<site>/<array>`` as site -> array -> value, sorted by site.

    A name without a '/' is all the site's.
    """
    sites: dict[str, dict[str, A]] = {}
    for name, array in arrays.items():
        site, _, own_name = name.partition("/")
        sites.setdefault(site, {})[own_name] = array
    return dict(sorted(sites.items()))


def of_others(site: str, arrays: Mapping[str, A], *kinds: str) -> dict[str, A]:
    """Return the arrays of ``kinds``, ``<kind>/<site>/<array>``, of all sites but ``site``."""
    return {
        name: array
        for name, array in arrays.items()
        if name.startswith(kinds) and name.split("/", 2)[1] != site
    }


def is_statistic(name: str) -> bool:
    """Tell whether the array is a running statistic of batch norm, which is not trained."""
    return name.endswith(_STATISTICS)
