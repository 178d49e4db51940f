"""Findings as lines and as JSON; docs/doctor.md has the schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fedsilo.models.contract.versions import FEDSILO
from fedsilo.server_app.doctor.findings import Finding, Status, exit_code

_WIDTH = 12  # of a check's name


def lines_of(finding: Finding) -> Iterator[str]:
    """Yield the line of a finding with its fix, and one more for each detail."""
    about = f"{finding.about}: " if finding.about else ""
    fix = f" -- {finding.fix}" if finding.fix else ""
    yield f"{finding.status:7} {finding.check:{_WIDTH}} {about}{finding.said}{fix}"
    for detail in finding.details:
        yield f"{'':8}{'':{_WIDTH}}   {detail}"


def last_line(findings: Iterable[Finding]) -> str:
    """Return how many checks passed, failed and were skipped."""
    count = Counter(finding.status for finding in findings)
    return ", ".join(f"{count[status]} {status.lower()}" for status in Status)


def document(target: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what ``--json`` prints for the checks of ``site``, ``server`` or ``run``."""
    count = Counter(finding.status for finding in findings)
    return {
        "target": target,
        "fedsilo": FEDSILO,
        "exit-code": exit_code(findings),
        "count": {str(status): count[status] for status in Status},
        "findings": [finding.document() for finding in findings],
    }
