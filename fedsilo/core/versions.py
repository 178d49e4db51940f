"""The versions of fedsilo and Flower in a process. The server sends them, and the sites compare."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedsilo._version import VERSION
from fedsilo.core.errors import SiteError

FEDSILO = VERSION

# The protocol between SuperNode and worker is known for this version; pyproject.toml pins it
WORKER_FLOWER = "1.39"
TRIED_FLOWER = "1.42"  # the newest version that simulations were tested with

_APP, _FLOWER = "fedsilo-version", "flower-version"


def own_versions() -> dict[str, str]:
    """Return the versions of fedsilo and Flower in this process, as two ConfigRecord entries."""
    return {_APP: FEDSILO, _FLOWER: installed_version("flwr")}


@cache
def installed_version(package: str) -> str:
    """Return the version of an installed package. The version is read once per process.

    Raises:
        PackageNotFoundError: ``importlib.metadata`` does not find the package.
    """
    # Each reading parses the package's whole metadata, and every run and message needs a version
    return version(package)


def installed_software() -> dict[str, str]:
    """Return the versions of fedsilo, Flower and PyTorch on this machine, and the git revision.

    The keys are "fedsilo", "revision", "flower" and "torch". The value of "revision" comes from
    ``git_revision``. Outside a git checkout it is $FEDSILO_REVISION, or "unknown" if that is not
    set.

    Raises:
        PackageNotFoundError: Flower or PyTorch is not installed as a package.
    """
    return {
        "fedsilo": FEDSILO,
        "revision": git_revision(),
        "flower": installed_version("flwr"),
        "torch": installed_version("torch"),
    }


@cache
def git_revision() -> str:
    """Return the git revision of the checkout that has this code, as a full hash.

    Changes that are not committed do not show in the result. Outside a checkout, the result is
    $FEDSILO_REVISION, which the container images set. If that is not set either, the result is
    'unknown'. The revision is read once per process.
    """
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


def processor() -> str:
    """Return this machine's processor and the instruction set that PyTorch uses on it.

    An example is "AMD EPYC 7B13 (AVX2)". Processors with different instruction sets can give
    different numbers for the same run. If /proc/cpuinfo has no model name, as outside Linux, the
    architecture replaces it, as in "arm64 (DEFAULT)".
    """
    import torch  # commands that only list runs do not need it

    name = platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = " ".join(value.split())
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def refuse_other_versions(server: Mapping[str, Any]) -> None:
    """Check that the server's versions of fedsilo and Flower match those of this site.

    Two versions match if their first two numbers are equal, because a third number changes neither
    messages nor settings. A version that the server does not send is accepted.

    Args:
        server: the ConfigRecord entries that ``own_versions`` built at the server. Further entries
            are ignored.

    Raises:
        SiteError: a version differs. If both differ, the error names fedsilo's.
    """
    own = own_versions()
    for what, key in (("fedsilo", _APP), ("Flower", _FLOWER)):
        here, there = own[key], str(server.get(key, own[key]))
        if here.split(".")[:2] != there.split(".")[:2]:
            raise SiteError(
                f"the site runs {what} {here}, but the server {there}: install the same version"
            )
