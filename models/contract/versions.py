"""Which fedsilo and which Flower a process runs: a server tells its sites, and they compare."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from models.contract.errors import SiteError

FEDSILO = (
    "0.1.0"  # as in pyproject.toml (a test compares); the bundle that Flower sends has no metadata
)

_APP, _FLOWER = "fedsilo-version", "flower-version"


def own_versions() -> dict[str, str]:
    """Return the versions of this process, as keys and values of a ConfigRecord."""
    return {_APP: FEDSILO, _FLOWER: version("flwr")}


def refuse_other_versions(server: Mapping[str, Any]) -> None:
    """Refuse a server of another fedsilo, or of a Flower whose first two numbers differ.

    A server that does not say what it runs is not refused.

    Raises:
        SiteError: it names both versions.
    """
    own = own_versions()
    for what, key, parts in (("fedsilo", _APP, None), ("Flower", _FLOWER, 2)):
        here, there = own[key], str(server.get(key, own[key]))
        if here.split(".")[:parts] != there.split(".")[:parts]:
            raise SiteError(
                f"the site runs {what} {here} and the server {there}: install the same version"
            )
