"""What an installation takes on disk, by the packages' own lists of files, without bytecode.

    python release/sizes.py cuda > sizes.csv                 # with all extras
    python release/sizes.py cpu | tail -n +2 >> sizes.csv    # in an environment for CPUs

A line says what is installed, with which build of PyTorch, and how many packages and megabytes
(10^6 bytes) that is; an extra adds those to the core. Extras that are not installed are left
out.
"""

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from licences import DEVELOPMENT, needed
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
# Named in the project's card: these stay in the core
CARD = ("flwr", "torch", "torchvision", "timm", "numpy", "grpcio", "pyyaml", "pot", "cvxpylayers")


def megabytes(names: Iterable[str]) -> float:
    """Return the size of installed packages' files."""
    files = [file for name in names for file in distribution(name).files or []]
    return sum(file.size or 0 for file in files if file.suffix != ".pyc") / 1e6


def _is_here(text: str) -> bool:
    try:
        return bool(distribution(Requirement(text).name))
    except PackageNotFoundError:
        return False


def main(build: str) -> None:
    """Print the lines of this environment, whose PyTorch is of that build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [Requirement(text) for text in project["dependencies"]]
    core = needed(direct)
    card = needed(one for one in direct if one.name in CARD)
    torch = needed(one for one in direct if one.name in ("torch", "torchvision"))
    rows = {"torch and torchvision": torch, "the card's packages": card, "fedsilo": core}
    for name, texts in project["optional-dependencies"].items():
        if name not in DEVELOPMENT and all(map(_is_here, texts)):
            more = needed([*direct, *map(Requirement, texts)])
            rows[f"extra {name}"] = {n: r for n, r in more.items() if n not in core}
    print("what,pytorch,packages,megabytes")
    for what, found in rows.items():
        print(f"{what},{build} {distribution('torch').version},{len(found)},{megabytes(found):.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
