"""Licences of all packages that fedsilo installs, as the packages declare them.

    python release/licences.py > docs/licences.md     # what `make licences` runs

Packages are those of pyproject.toml and what they need in turn, in this environment; pip-licenses,
which uv runs in an environment of its own, reads what each declares.
"""

import csv
import io
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DEVELOPMENT = ("test", "docs")  # extras that no user's command needs
_LONGEST = 90  # characters of a licence
HEAD = """\
# Licences of the dependencies

This page lists each package that fedsilo installs, with the licence that the package declares.
fedsilo itself has [Apache-2.0](../LICENSE). `make licences` writes the page from an environment
with all extras; a test compares it with `pyproject.toml` and the images' lock file.

NVIDIA's packages (`nvidia-*`, `cuda-toolkit`) come with PyTorch's CUDA build alone: an
[installation for CPUs](install.md) has none of them. certifi, pathspec and tqdm have the Mozilla
Public License 2.0. All others are permissive.

"""


def needed(wanted: Iterable[Requirement]) -> dict[str, Requirement]:
    """Return these requirements and those that they need in turn, by canonical name.

    What is not installed here, such as a package for Windows, is left out.
    """
    found: dict[str, Requirement] = {}
    seen, todo = set(), list(wanted)
    while todo:
        one = todo.pop()
        key = (canonicalize_name(one.name), tuple(sorted(one.extras)))
        if key in seen:
            continue
        seen.add(key)
        try:
            texts = requires(one.name) or []
        except PackageNotFoundError:
            continue
        found[key[0]] = one
        todo += [need for need in map(Requirement, texts) if _holds(need, one.extras)]
    return found


def _holds(need: Requirement, extras: Iterable[str]) -> bool:
    """Tell whether a requirement is meant for this machine and these extras."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    return not need.marker or any(need.marker.evaluate(one) for one in environments)


def licences(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return version and licence of installed packages by canonical name."""
    command = ["uv", "--no-config", "tool", "run", "pip-licenses"]
    command += ["--python", sys.executable, "--from=mixed", "--format=csv", "--with-system"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = csv.DictReader(io.StringIO(done.stdout))
    declared = {canonicalize_name(row["Name"]): row for row in rows}
    return {
        name: (row["Version"], " ".join(row["License"].split())[:_LONGEST])
        for name in sorted(names)
        for row in [declared[canonicalize_name(name)]]
    }


def _table(title: str, names: Iterable[str]) -> str:
    rows = [
        f"| {name} | {version} | {licence.replace('|', '/')} |"
        for name, (version, licence) in licences(names).items()
    ]
    return "\n".join([f"## {title}", "", "| package | version | licence |", "|---|---|---|", *rows])


def page(project: dict[str, Any]) -> str:
    """Return the page of a pyproject.toml's table 'project'."""
    extras = project["optional-dependencies"]
    direct = [Requirement(text) for text in project["dependencies"]]
    core = needed(direct)
    own = {canonicalize_name(one.name) for one in direct}
    used = [t for name, texts in extras.items() if name not in DEVELOPMENT for t in texts]
    more = needed(map(Requirement, used))
    return HEAD + "\n\n".join(
        [
            _table("What fedsilo names", own),
            _table("What those need", core.keys() - own),
            _table("What the extras add", more.keys() - core.keys()),
        ]
    )


if __name__ == "__main__":
    print(page(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]))
