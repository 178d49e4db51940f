"""The page on doctor lists every check, in its order, and no other; and the keys of its JSON."""

import re
from pathlib import Path

import pytest

from fedsilo.deployment.doctor import run_checks as run
from fedsilo.deployment.doctor import server, site
from fedsilo.deployment.doctor.findings import Finding, Status, build_document

TARGETS = {"site": site.CHECKS, "server": server.CHECKS, "run": run.CHECKS}
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text()


def _named(title: str) -> list[str]:
    """Return the names in the first column of the table of that first line."""
    table = PAGE.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[1:]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("target", TARGETS)
def test_every_check_has_its_line(target: str) -> None:
    assert _named(f"| `{target}` | |") == [check.name for check in TARGETS[target]]


def test_the_keys_of_the_json_are_those_of_the_page() -> None:
    found = build_document("site", [Finding("one", Status.PASSED, "well")])
    assert _named("| key | what |") == list(found)
    assert _named("| key of a finding | what |") == list(found["findings"][0])
