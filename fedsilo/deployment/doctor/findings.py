"""A check and its findings: PASSED, FAILED with a fix, or SKIPPED with the reason.

Findings become lines, or JSON whose schema is in docs/doctor.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from fedsilo.core.errors import FedsiloError, describe_system_error
from fedsilo.core.files.atomic_files import FULL
from fedsilo.core.one_line import one_line
from fedsilo.core.versions import FEDSILO

S = TypeVar("S")
T = TypeVar("T")
_MAX_LENGTH = 600  # characters; longer texts of a finding are cut


class Status(StrEnum):
    """The result of a check."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class Refused(FedsiloError):
    """An error that a check raises, with the fault and the way to fix it.

    The error's message has both, as "fault: fix". If the fix is empty, the message is the fault.
    """

    def __init__(self, fault: str, fix: str = "") -> None:
        text = fault
        if fix:
            text = f"{fault}: {fix}"
        super().__init__(text)
        self.fault, self.fix = fault, fix


class Skipped(Exception):
    """A check that does not apply; the message is the reason."""


def require(value: T | None, reason: str) -> T:
    """Return ``value`` if it is not empty, otherwise skip the check that needs it.

    None, 0, False, and an empty string or list count as empty. An example of ``value`` is a path
    that the user did not name.

    Args:
        value: the value that the check needs.
        reason: the sentence that tells the user why the check is skipped.

    Raises:
        Skipped: the value is empty. ``examine`` turns this error into a finding with ``reason``.
    """
    if not value:
        raise Skipped(reason)
    return value


@dataclass(frozen=True)
class Finding:
    """The result of one check: a status, a sentence and, after a failure, the fix."""

    check: str  # its name
    status: Status
    said: str  # the finding as a sentence, or the reason for skipping
    fix: str = ""  # the fix; empty if ``said`` already has it or nothing is wrong
    about: str = ""  # the site; empty if the check is not about one site
    details: tuple[str, ...] = ()  # more lines


@dataclass(frozen=True)
class Passed:
    """The sentence and the details of a check that found no fault."""

    said: str
    details: tuple[str, ...] = ()  # more lines


@dataclass(frozen=True)
class Failed:
    """The fault that a check found, and the fix."""

    said: str
    fix: str = ""  # empty if ``said`` already has it


Verdict = str | Passed | Failed  # only a sentence means that the check has passed


@dataclass(frozen=True)
class Check(Generic[S]):
    """One check of a setup of type ``S``.

    ``look`` returns its verdict, or a finding for each site. If ``look`` raises ``Skipped``, the
    check is skipped. Any other error fails the check.
    """

    name: str  # a word or two, used by ``needs`` and in JSON
    look: Callable[[S], Verdict | Sequence[Finding]]
    needs: tuple[str, ...] = ()  # earlier checks that must have passed


def examine(checks: Sequence[Check[S]], setup: S, about: str = "") -> Iterator[Finding]:
    """Run checks in order on one setup, and yield their findings.

    A check passes if all its findings have passed. A check that needs a check which has not passed
    is not run. It yields one finding with the status SKIPPED, which names the missing check. All
    other checks still run. An error in a check becomes a finding and is not raised. The checks run
    one by one, as the caller takes the findings.

    Args:
        checks: the checks, each after the checks that it needs.
        setup: the object to check, such as a hospital's ``SiteSetup``. Each check gets it.
        about: the site of the setup, which each finding names. It is empty if there is none.
    """
    passed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name not in passed]
        if missing:
            reason = f"it needs '{missing[0]}', which has not passed"
            yield Finding(check.name, Status.SKIPPED, reason, about=about)
            continue
        findings = _look(check, setup, about)
        if all(finding.status is Status.PASSED for finding in findings):
            passed.add(check.name)
        yield from findings


def _look(check: Check[S], setup: S, about: str) -> Sequence[Finding]:
    try:
        found = check.look(setup)
    except Skipped as reason:
        said = one_line(reason, _MAX_LENGTH)
        return [Finding(check.name, Status.SKIPPED, said, about=about)]
    except (
        Exception
    ) as error:  # the boundary: a check that breaks must not hide the findings of other checks
        fault, fix = _fault_and_fix(error)
        said, fix = one_line(fault, _MAX_LENGTH), one_line(fix, _MAX_LENGTH)
        return [Finding(check.name, Status.FAILED, said, fix, about)]
    if isinstance(found, str):
        found = Passed(found)
    if not isinstance(found, Passed | Failed):
        return found
    said = one_line(found.said, _MAX_LENGTH)
    if isinstance(found, Failed):
        return [Finding(check.name, Status.FAILED, said, one_line(found.fix, _MAX_LENGTH), about)]
    return [Finding(check.name, Status.PASSED, said, about=about, details=found.details)]


def _fault_and_fix(error: Exception) -> tuple[str, str]:
    """Describe an error that a check raised: the fault, and how to fix it.

    A ``Refused`` has both texts. Any other ``FedsiloError`` has the fix in its message, so the
    second text is empty. The fix for an ``OSError`` is to free space if the disk is full, and
    otherwise to give this user access. Any other error is a bug in the check, to be reported.
    """
    if isinstance(error, Refused):
        return error.fault, error.fix
    if isinstance(error, FedsiloError):
        return str(error), ""
    if isinstance(error, OSError):
        fix = "let this user read and write there"
        if error.errno in FULL:
            fix = "make room on that disk"
        return describe_system_error(error), fix
    # Any other error is a bug of the check, and its text is not a sentence
    fault = f"the check itself failed ({type(error).__name__}: {error})"
    return fault, "report it to fedsilo's makers"


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of ``fedsilo doctor`` for its findings.

    The code is 1 if a check failed, and 0 if none failed and at least one passed. It is 3 if all
    checks were skipped, or if there are no findings.
    """
    statuses = {finding.status for finding in findings}
    if Status.FAILED in statuses:
        return 1
    if Status.PASSED in statuses:
        return 0
    return 3


_WIDTH = 12  # characters; the names of checks are padded to this column width


def format_finding(finding: Finding) -> Iterator[str]:
    """Yield the lines that show a finding: one for the finding itself, then one for each detail.

    The first line has the status, the name of the check, the site (if any), the finding's
    sentence and, after "--", the fix (if any). Details are indented.
    """
    text = finding.said
    if finding.about:
        text = f"{finding.about}: {text}"
    if finding.fix:
        text = f"{text} -- {finding.fix}"
    yield f"{finding.status:7} {finding.check:{_WIDTH}} {text}"
    for detail in finding.details:
        yield f"{'':8}{'':{_WIDTH}}   {detail}"


def summarise(findings: Iterable[Finding]) -> str:
    """Count the findings of each status, as text such as "3 passed, 0 failed, 1 skipped"."""
    count = Counter(finding.status for finding in findings)
    return ", ".join(f"{count[status]} {status.lower()}" for status in Status)


def build_document(target: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Build the mapping that ``fedsilo doctor --json`` prints.

    Its keys are "target", "fedsilo" (the version), "exit-code", "count" (status -> number of
    findings) and "findings". The last is a list of mappings, each with all fields of a ``Finding``.

    Args:
        target: the part of the system that was checked: ``site``, ``server`` or ``run``.
        findings: the findings, in the order in which they are shown.
    """
    count = Counter(finding.status for finding in findings)
    return {
        "target": target,
        "fedsilo": FEDSILO,
        "exit-code": exit_code(findings),
        "count": {str(status): count[status] for status in Status},
        "findings": [asdict(finding) for finding in findings],
    }
