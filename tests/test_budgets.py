"""The budgets of ``.ci/budgets.toml``: numbers that may fall freely, and rise only with a reason.

``python -m tests.test_budgets`` prints today's numbers in the form of that file.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks import density

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 6  # lines that are a duplicate where they are found again

Numbers = dict[str, dict[str, float]]


@cache
def _sources() -> dict[str, list[str]]:
    """Return the lines of every source file, by path."""
    files = (path for room in density.ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in files}


@cache
def _counts() -> density.Counts:
    """Return the counts of all source files, which are read once, because that takes seconds."""
    return density.count_folders([ROOT / room for room in density.ROOMS])


def _modules() -> dict[str, float]:
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


def trace_of_a_round() -> str:
    """Return what a FedAvg round passes, listed by a process of its own with empty caches."""
    command = [sys.executable, str(ROOT / "benchmarks" / "round_trace.py"), "--list"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=one_thread
    )
    return done.stdout


def numbers_of_a_round(trace: str) -> dict[str, float]:
    """Return the numbers in a trace's last line."""
    functions, files, first = map(int, re.findall(r"\d+", trace.splitlines()[-1]))
    return {"functions": functions, "files": files, "functions-to-first-step": first}


def measured_in_sources() -> Numbers:
    """Return today's numbers that are better when lower, by section and name, without a round's."""
    return {
        "modules": _modules(),
        "duplicates": {"runs": duplicated(_sources())},
        "density": density.bounded_numbers(_counts()),
    }


def budgets() -> Numbers:
    """Return the budgets, by section and name."""
    return tomllib.loads((ROOT / ".ci" / "budgets.toml").read_text())


def faults(allowed: Numbers, numbers: Numbers) -> list[str]:
    """Return a line for each number that is above its budget or has none."""
    lines = []
    for section, named in numbers.items():
        for name, number in named.items():
            budget = allowed.get(section, {}).get(name)
            if budget is None:
                lines.append(f"{section}.{name} is {number} and has no budget")
            elif number > budget:
                lines.append(f"{section}.{name} is {number}, above its budget of {budget}")
    return lines


# A round's numbers are held where its trace is needed anyway: docs/test_architecture.py
def test_no_number_is_above_its_budget() -> None:
    assert faults(budgets(), measured_in_sources()) == []


def test_hard_places_have_at_least_the_comments_of_the_budget() -> None:
    least = budgets()["at-least"]["comment-lines-per-100"]
    assert density.comments_per_hundred_lines(_counts()) >= least


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (100, []),
        (1, []),
        (101, ["round.files is 101, above its budget of 100"]),
    ],
)
def test_a_budget_is_an_upper_bound(number: int, expected: list[str]) -> None:
    assert faults({"round": {"files": 100}}, {"round": {"files": number}}) == expected


def test_a_number_without_a_budget_is_a_fault() -> None:
    assert faults({}, {"round": {"files": 3}}) == ["round.files is 3 and has no budget"]


def test_density_of_a_small_file_by_hand(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        '"""What a module."""\n'
        "import os  # of the system\n"
        "\n"
        "# why it is so\n"
        "def masked(cards):\n"
        "    if (count := len(cards)) > 3:\n"
        "        raise ValueError\n"
        "    return [card if count else os for card in cards]\n"
    )
    counts = density.count_folders([tmp_path])
    assert (counts.lines, counts.code_lines) == (8, 4)
    numbers = density.bounded_numbers(counts)
    assert numbers["comprehensions-per-1000-lines"] == 125
    assert numbers["conditional-expressions-per-1000-lines"] == 125
    assert numbers["walruses-per-1000-lines"] == 125
    assert numbers["raises-per-1000-lines"] == 125
    assert numbers["attribute-comments"] == 1
    assert numbers["docstrings-with-what-clause"] == 1
    assert numbers["functions-named-by-participle"] == 1
    assert numbers["longest-function"] == 4
    assert density.comments_per_hundred_lines(counts) == 12.5


def test_a_run_of_lines_that_is_found_again_is_a_duplicate() -> None:
    lines = [f"value_{index} = {index}" for index in range(WINDOW + 1)]
    assert duplicated({"a.py": lines}) == 0
    assert duplicated({"a.py": lines, "b.py": ["x = 1", *lines]}) == 2, "seven lines, two windows"
    assert duplicated({"a.py": lines, "b.py": ["import x", "", "# y", *lines[:WINDOW]]}) == 1


if __name__ == "__main__":
    measured = {"round": numbers_of_a_round(trace_of_a_round())} | measured_in_sources()
    for section, named in measured.items():
        print(f"\n[{section}]")
        for name, number in named.items():
            print(f'"{name}" = {number}')
