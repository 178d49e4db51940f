"""How arrays on the wire and at rest are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

A = TypeVar("A")


def by_site(arrays: Mapping[str, A]) -> dict[str, dict[str, A]]:
    """Return arrays named ``<site>/<array>`` as site -> array -> value, sorted by site."""
    found: dict[str, dict[str, A]] = {}
    for key, array in arrays.items():
        site, _, name = key.partition("/")
        found.setdefault(site, {})[name] = array
    return dict(sorted(found.items()))
