"""The budgets of ``.ci/budgets.toml``: numbers that may fall freely, and rise only with a reason.

A number above its budget fails, and so does one more than 5 % below it: then the budget is too
loose and is to be lowered. ``python -m tests.test_budgets`` prints today's numbers as that file.
"""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("client_app", "datasets", "models", "server_app", "strategies")
STUDIES = "server_app/studies"
SLACK = 0.05
WINDOW = 6  # lines that are a duplicate where they are found again

Numbers = dict[str, dict[str, int]]


@cache
def _sources() -> dict[str, list[str]]:
    """Return the lines of every source file, by path."""
    files = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in files}


def _lines() -> dict[str, int]:
    counted = {
        room: sum(len(lines) for path, lines in _sources().items() if path.startswith(f"{room}/"))
        for room in (*ROOMS, STUDIES)
    }
    together = sum(counted[room] for room in ROOMS)
    return counted | {"all": together, "all-but-studies": together - counted[STUDIES]}


def _modules() -> dict[str, int]:
    """Return the most modules of a folder; those of methods grow with the table, and are apart."""
    folders = Counter(path.rpartition("/")[0] for path in _sources())
    methods = {folder: count for folder, count in folders.items() if folder.endswith("/methods")}
    return {
        "most": max(count for folder, count in folders.items() if folder not in methods),
        "most-of-methods": max(methods.values()),
    }


def _windows(lines: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield each run of lines of code; blank lines, comments, imports and brackets are left out."""
    text = re.sub(
        r"^from .*? import \(.*?^\)$", "", "\n".join(lines), flags=re.MULTILINE | re.DOTALL
    )
    code = [line.strip() for line in text.split("\n")]
    code = [
        line for line in code if re.search(r"\w", line) and not re.match(r"#|import |from ", line)
    ]
    yield from zip(*(code[start:] for start in range(WINDOW)), strict=False)


def duplicated(sources: dict[str, list[str]]) -> int:
    """Return how many runs of ``WINDOW`` lines are found again, in the same file or in another."""
    found = Counter(window for lines in sources.values() for window in _windows(lines))
    return sum(count - 1 for count in found.values())


def _round() -> dict[str, int]:
    """Return what a FedAvg round passes, counted in a process of its own with empty caches."""
    command = [sys.executable, str(ROOT / "benchmarks" / "round_trace.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    functions, files, first = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    return {"functions": functions, "files": files, "functions-to-first-step": first}


def measured() -> Numbers:
    """Return today's numbers, by section and name."""
    return {
        "round": _round(),
        "lines": _lines(),
        "modules": _modules(),
        "files": {"longest": max(map(len, _sources().values()))},
        "duplicates": {"runs": duplicated(_sources())},
    }


def faults(budgets: Numbers, numbers: Numbers) -> list[str]:
    """Return a line for each number that is above its budget, or too far below."""
    lines = []
    for section, named in numbers.items():
        for name, number in named.items():
            budget = budgets.get(section, {}).get(name)
            if budget is None:
                lines.append(f"{section}.{name} is {number} and has no budget")
            elif number > budget:
                lines.append(f"{section}.{name} is {number}, above its budget of {budget}")
            elif number < budget * (1 - SLACK):
                lines.append(f"{section}.{name} is {number}: lower its budget of {budget}")
    return lines


def test_no_number_is_above_its_budget_or_far_below() -> None:
    budgets = tomllib.loads((ROOT / ".ci" / "budgets.toml").read_text())
    assert faults(budgets, measured()) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (100, []),
        (95, []),
        (101, ["files.longest is 101, above its budget of 100"]),
        (94, ["files.longest is 94: lower its budget of 100"]),
    ],
)
def test_a_budget_holds_a_number_from_both_sides(number: int, expected: list[str]) -> None:
    assert faults({"files": {"longest": 100}}, {"files": {"longest": number}}) == expected


def test_a_run_of_lines_that_is_found_again_is_a_duplicate() -> None:
    lines = [f"value_{index} = {index}" for index in range(WINDOW + 1)]
    assert duplicated({"a.py": lines}) == 0
    assert duplicated({"a.py": lines, "b.py": ["x = 1", *lines]}) == 2, "seven lines, two windows"
    assert duplicated({"a.py": lines, "b.py": ["import x", "", "# y", *lines[:WINDOW]]}) == 1


if __name__ == "__main__":
    for section, named in measured().items():
        print(f"\n[{section}]")
        for name, number in named.items():
            print(f'"{name}" = {number}')
