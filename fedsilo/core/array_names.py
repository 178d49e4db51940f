"""Names of arrays, in messages and in a site's own state: ``<kind>/<site>/<array>``.

The kind ends at the first '/', the site ends at the second, and the rest is the array's own name.
That name may contain a '/', but a site's name may not. A kind is a method's constant that ends in
'/' (``expert/``). Arrays that belong to no particular site are ``<kind>/<array>``. If a site has
only one array of a kind, its name is ``<kind>/<site>``.
"""

from collections.abc import Mapping
from typing import TypeVar

A = TypeVar("A")

# Batch norm's buffers: they follow from the data, and no optimiser moves them
BATCH_NORM = ("running_mean", "running_var")


def arrays_below(prefix: str, arrays: Mapping[str, A]) -> dict[str, A]:
    """Select the arrays whose names begin with ``prefix``, and remove the prefix from their names.

    The prefix may be any string. A name that equals the prefix becomes empty.

    Returns:
        Name without the prefix -> array, sorted by the full name; empty if no name has the prefix.
    """
    return {
        name.removeprefix(prefix): array
        for name, array in sorted(arrays.items(), key=lambda named: named[0])
        if name.startswith(prefix)
    }


def with_prefix(prefix: str, arrays: Mapping[str, A]) -> dict[str, A]:
    """Put ``prefix`` before the name of each array. ``arrays_below`` removes it again."""
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def by_site(arrays: Mapping[str, A]) -> dict[str, dict[str, A]]:
    """Group arrays by the site in their names, which have the form ``<site>/<array>``.

    The site is the text before the first '/'. Callers first remove any prefix of the site, such as
    ``expert/``. If a name has no '/', the whole name is the site, and its array gets the empty
    name. The arrays of a site keep their given order.

    Returns:
        Site -> name of the array -> array, sorted by site.
    """
    sites: dict[str, dict[str, A]] = {}
    for name, array in arrays.items():
        site, _, own_name = name.partition("/")
        sites.setdefault(site, {})[own_name] = array
    return dict(sorted(sites.items()))


def select_others(site: str, arrays: Mapping[str, A], *kinds: str) -> dict[str, A]:
    """Select the arrays of certain kinds that belong to any site except ``site``.

    An array's full name is ``<kind>/<site>/<array>``, such as ``expert/north/weight``.

    Args:
        site: the site whose arrays are left out.
        arrays: full name -> array.
        kinds: the kinds to select, each with a final '/'. If there are none, no array is selected.

    Returns:
        Full name -> array, in the order of ``arrays``.
    """
    # The site is compared as a whole part of the name: a prefix would take site-1 for site-10 too
    return {
        name: array
        for name, array in arrays.items()
        if name.startswith(kinds) and name.split("/", 2)[1] != site
    }


def is_statistic(name: str) -> bool:
    """Return whether the array ``name`` is a running mean or variance of batch norm."""
    return name.endswith(BATCH_NORM)
