"""A check and what it finds: PASSED, FAILED with what to do, or SKIPPED with why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from fedsilo.models.contract.errors import FedsiloError
from fedsilo.models.contract.one_line import one_line

S = TypeVar("S")
_LONGEST = 600  # characters of what is said


class Status(StrEnum):
    """How a check ended."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class Refused(FedsiloError):
    """What is not as it must be, and what to do about it; as text both on one line."""

    def __init__(self, fault: str, mend: str = "") -> None:
        super().__init__(f"{fault}: {mend}" if mend else fault)
        self.fault, self.mend = fault, mend


class Skipped(Exception):
    """A check that says nothing here; the message is why."""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: its name.
        status: how it ended.
        said: what was found, or why it was skipped.
        mend: what to do; empty where ``said`` says it too, or nothing is to be done.
        about: the site that it is about; empty: the whole.
        details: more lines.
    """

    check: str
    status: Status
    said: str
    mend: str = ""
    about: str = ""
    details: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {"status": str(self.status), "details": list(self.details)}


@dataclass(frozen=True)
class Passed:
    """What a check says that found nothing wrong; ``details`` are more lines."""

    said: str
    details: tuple[str, ...] = ()


Found = str | Passed | Sequence[Finding]


@dataclass(frozen=True)
class Check(Generic[S]):
    """One thing that is looked at.

    Attributes:
        name: a word or two, by which ``needs`` and JSON know it.
        purpose: what it is good for, for people.
        look: looks at a set-up, and returns what it says or what it found of each site; an error
            told on purpose fails the check, ``Skipped`` skips it.
        needs: checks that must have passed for this one to mean anything.
    """

    name: str
    purpose: str
    look: Callable[[S], Found]
    needs: tuple[str, ...] = ()


def examine(checks: Sequence[Check[S]], setup: S, about: str = "") -> Iterator[Finding]:
    """Yield what each check finds in ``setup``, in order; nothing that it finds stops the others.

    Args:
        checks: each after those that it needs.
        setup: what is looked at.
        about: the site that it is of; empty: none.
    """
    passed: set[str] = set()
    for check in checks:
        lacking = [name for name in check.needs if name not in passed]
        if lacking:
            said = f"it needs '{lacking[0]}', which has not passed"
            yield Finding(check.name, Status.SKIPPED, said, about=about)
            continue
        found = _look(check, setup, about)
        if all(finding.status is Status.PASSED for finding in found):
            passed.add(check.name)
        yield from found


def _look(check: Check[S], setup: S, about: str) -> Sequence[Finding]:
    try:
        found = check.look(setup)
    except Skipped as why:
        return [Finding(check.name, Status.SKIPPED, one_line(why, _LONGEST), about=about)]
    except Exception as error:  # the boundary: a check that cannot be made must not hide the others
        return [failed(check.name, error, about)]
    if isinstance(found, str):
        found = Passed(found)
    if isinstance(found, Passed):
        said = one_line(found.said, _LONGEST)
        return [Finding(check.name, Status.PASSED, said, about=about, details=found.details)]
    return found


def failed(check: str, error: Exception, about: str = "") -> Finding:
    """Return the finding of an error: told on purpose, of the system, or of a fault of ours."""
    if isinstance(error, Refused):
        said, mend = error.fault, error.mend
    elif isinstance(error, FedsiloError):
        said, mend = str(error), ""
    elif isinstance(error, OSError):
        said = f"{error.filename or 'the system'}: {error.strerror or error}"
        mend = "see that this user may read and write there"
    else:
        said = f"the check itself failed ({type(error).__name__}: {error})"
        mend = "tell fedsilo's makers"
    return Finding(
        check, Status.FAILED, one_line(said, _LONGEST), one_line(mend, _LONGEST), about=about
    )


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 where something passed and nothing failed, 1 if something failed, else 3."""
    found = {finding.status for finding in findings}
    if Status.FAILED in found:
        return 1
    return 0 if Status.PASSED in found else 3
