"""Checks that need others, what becomes of errors, and the exit code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsilo.core.errors import DataError
from fedsilo.deployment.doctor import machine, server, site
from fedsilo.deployment.doctor import run_checks as run
from fedsilo.deployment.doctor.findings import (
    Check,
    Finding,
    Passed,
    Refused,
    Skipped,
    Status,
    build_document,
    examine,
    exit_code,
    format_finding,
    require,
    summarise,
)
from fedsilo.server_app.config import resources


def _raising(error: Exception) -> Check[None]:
    def look(_: None) -> str:
        raise error

    return Check("one", look)


def test_a_check_is_skipped_if_one_that_it_needs_has_not_passed() -> None:
    checks = (
        _raising(Refused("it is broken", "fix it")),
        Check[None]("two", lambda _: "well", ("one",)),
        Check[None]("three", lambda _: "well", ("two",)),
        Check[None]("four", lambda _: Passed("well", ("more",))),
    )
    found = list(examine(checks, None, "north"))
    assert [str(finding.status) for finding in found] == ["FAILED", "SKIPPED", "SKIPPED", "PASSED"]
    assert found[1].said == "it needs 'one', which has not passed"
    assert {finding.about for finding in found} == {"north"}
    assert list(format_finding(found[0])) == ["FAILED  one          north: it is broken -- fix it"]
    assert list(format_finding(found[3]))[1].strip() == "more"
    assert summarise(found) == "1 passed, 1 failed, 2 skipped"


@pytest.mark.parametrize(
    ("error", "said", "fix"),
    [
        (Refused("a", "b"), "a", "b"),
        (DataError("a: do b"), "a: do b", ""),
        (OSError(28, "No space left", "/x"), "/x: No space left", "make room on that disk"),
        (OSError(13, "Permission denied", "/x"), "/x: Permission denied", "let this user"),
        (ValueError("two\nlines"), "(ValueError: two lines)", "report it to fedsilo's makers"),
    ],
)
def test_an_error_is_one_line_and_stops_no_other_check(
    error: Exception, said: str, fix: str
) -> None:
    found = list(examine((_raising(error), Check[None]("two", lambda _: "")), None))
    assert [finding.status for finding in found] == [Status.FAILED, Status.PASSED]
    (line,) = format_finding(found[0])
    assert said in line
    assert fix in line


def test_what_is_skipped_says_why() -> None:
    (found,) = examine((_raising(Skipped("nothing is named")),), None)
    assert (found.status, found.said) == (Status.SKIPPED, "nothing is named")


def test_given_nothing_skips_and_something_is_returned() -> None:
    assert require(Path("key"), "no key is named") == Path("key")
    for nothing in (None, "", []):
        with pytest.raises(Skipped, match="no key is named"):
            require(nothing, "no key is named")


@pytest.mark.parametrize(
    ("statuses", "code"),
    [("PASSED SKIPPED", 0), ("PASSED FAILED SKIPPED", 1), ("SKIPPED", 3), ("", 3), ("FAILED", 1)],
)
def test_the_exit_code_tells_failed_from_skipped_only(statuses: str, code: int) -> None:
    found = [Finding("one", Status(status), "") for status in statuses.split()]
    assert exit_code(found) == code
    assert build_document("site", found)["exit-code"] == code


@pytest.mark.parametrize("checks", [site.CHECKS, server.CHECKS, run.CHECKS])
def test_each_check_needs_earlier_ones_only(
    checks: Sequence[Check[Any]],
) -> None:
    names: list[str] = []
    for check in checks:
        assert set(check.needs) <= set(names)
        assert check.name not in names
        names.append(check.name)


@pytest.mark.parametrize(
    ("most", "left"),
    [("max\n", 1e18), ("3000000000\n", 2.5e9)],
)
def test_a_containers_bound_counts_and_what_is_only_cached_makes_room(
    most: str, left: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(most)
    (tmp_path / "memory.current").write_text("1500000000\n")
    (tmp_path / "memory.stat").write_text("anon 500000000\ninactive_file 1000000000\n")
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    free = psutil.virtual_memory()._replace(available=10**18)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert machine.check_memory(1.0) == f"{left / 1e9:.1f} GB free"
    if left < 1e18:
        with pytest.raises(Refused, match=r"2.5 GB of memory are free.*container's limit"):
            machine.check_memory(2.6)
