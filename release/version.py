"""The version of fedsilo, in each file that has it: print them, or write another.

    python release/version.py          # each file's version
    python release/version.py 0.2.0    # writes it everywhere, with today as the day of release

The tag of a release is ``v`` and this version; a test compares it with the commit's tags. The
version is written, and not computed from tags while building: ``flwr run`` reads it from the
pyproject.toml of a checkout or of an app without git, and refuses an app that has none there.
"""

import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_VERSION = r"[0-9]+\.[0-9]+\.[0-9]+(?:(?:a|b|rc)[0-9]+)?"
# What stands before the version in a file
PLACES = {
    "pyproject.toml": r'^version = "',
    "fedsilo/_version.py": r'^VERSION = "',
    "CITATION.cff": r'^version: "',
    "docs/README.md": r"^Version ",
    "release/recipe.yaml": r'^  version: "',
    "docker/compose.yaml": r"FEDSILO_TAG:-",
    "docker/compose.cpu.yaml": r"FEDSILO_TAG:-",
    "docker/kubernetes/server/statefulset.yaml": r"image: fedsilo-server:",
    "docker/kubernetes/hospital/statefulset.yaml": r"image: fedsilo-hospital:",
    "docker/kubernetes/example/server/kustomization.yaml": r"newTag: ",
    "docker/kubernetes/example/north/kustomization.yaml": r"newTag: ",
}


def found() -> Iterator[tuple[str, str]]:
    """Yield each file with each version that it has."""
    for name, before in PLACES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for match in re.finditer(f"{before}({_VERSION})", text, re.MULTILINE):
            yield name, match[1]


def write(version: str, day: str) -> None:
    """Write a version into all files, and ``day``, as 2026-01-31, where a release has one."""
    for name, before in PLACES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        text = re.sub(f"({before}){_VERSION}", rf"\g<1>{version}", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")
    for name, (pattern, dated) in {
        "CITATION.cff": (r"^(version: .+)(\ndate-released: .+)?", rf"\g<1>\ndate-released: {day}"),
        "CHANGELOG.md": (r"^## .+ \(unreleased\)", f"## {version} ({day})"),
    }.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(pattern, dated, text, count=1, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if not re.fullmatch(_VERSION, sys.argv[1]):
            sys.exit(f"'{sys.argv[1]}' is no version such as 0.2.0 or 0.2.0rc1")
        write(sys.argv[1], f"{datetime.now(UTC):%Y-%m-%d}")
    for name, version in found():
        print(f"{version:10}{name}")
