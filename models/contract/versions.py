"""Which fedsilo and which Flower a process runs: a server sends it, and its sites compare."""

import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedsilo.models.contract.errors import SiteError

# As in pyproject.toml (release/version.py writes both): Flower's bundle has no package metadata
FEDSILO = "0.1.0"

WORKER_FLOWER = "1.39"  # whose protocol between SuperNode and worker is known; pyproject.toml's
TRIED_FLOWER = "1.42"  # the newest with which simulations have been tried

_APP, _FLOWER = "fedsilo-version", "flower-version"


def own_versions() -> dict[str, str]:
    """Return the versions of this process, as keys and values of a ConfigRecord."""
    return {_APP: FEDSILO, _FLOWER: version("flwr")}


def installed_software() -> dict[str, str]:
    """Return what a hospital runs: versions of fedsilo, Flower and PyTorch, and the revision."""
    return {
        "fedsilo": FEDSILO,
        "revision": git_revision(),
        "flower": version("flwr"),
        "torch": version("torch"),
    }


def git_revision() -> str:
    """Return the checkout's revision, or 'unknown' if this is not a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FEDSILO_REVISION", "unknown")
    return done.stdout.strip()


def refuse_other_versions(server: Mapping[str, Any]) -> None:
    """Refuse, by a ``SiteError``, another fedsilo or a Flower whose first two numbers differ.

    A server that does not say what it runs is not refused.
    """
    own = own_versions()
    for what, key, parts in (("fedsilo", _APP, None), ("Flower", _FLOWER, 2)):
        here, there = own[key], str(server.get(key, own[key]))
        if here.split(".")[:parts] != there.split(".")[:parts]:
            raise SiteError(
                f"the site runs {what} {here} and the server {there}: install the same version"
            )
