"""Measure how dense the source reads: how many thoughts a line carries, and how much is explained.

    python benchmarks/density.py [FOLDER ...]     # by default all rooms of this repository

Prints one number a line. ``tests/test_budgets.py`` compares them with ``.ci/budgets.toml``. The
numbers are signs and no aims: a comprehension that a stranger reads once stays.
"""

import ast
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("fedsilo", "client_app", "datasets", "models", "server_app", "strategies")

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.FunctionDef, ast.ClassDef, ast.Module)

# A name such as `masked` or `_opened` says neither what is done nor what the value is
BARE_PARTICIPLE = re.compile(r"_*[a-z]+(ed|en|wn|ght|ung)$")
# "Return what the page says of an order" paraphrases; it does not name the thing
WHAT_CLAUSE = re.compile(
    r"(Return (what|why|how|which|by|of|whose|whether it)\b|What |Whose |Who |Where )"
)
# "# of the run" is half a sentence
ATTRIBUTE_COMMENT = re.compile(
    r"#\s*(of|at|by|in|from|for|to|with|on|under|as|where|which|whose|what)\b", re.IGNORECASE
)


@dataclass
class Counts:
    """Totals over all files that were read."""

    lines: int = 0
    blank_lines: int = 0
    docstring_lines: int = 0
    import_lines: int = 0
    comment_lines: int = 0
    attribute_comments: int = 0
    what_clauses: int = 0
    bare_participles: int = 0
    nodes: Counter[str] = field(default_factory=Counter)
    function_lengths: list[int] = field(default_factory=list)

    @property
    def code_lines(self) -> int:
        """Lines that are neither blank nor docstring, import or comment."""
        other = self.blank_lines + self.docstring_lines + self.import_lines + self.comment_lines
        return self.lines - other

    def per_thousand_lines(self, node: str) -> float:
        """Return how many nodes of one kind there are per 1,000 lines, with one decimal."""
        return round(1000 * self.nodes[node] / self.lines, 1)


def count_folders(folders: list[Path]) -> Counts:
    """Count over every Python file below ``folders``."""
    counts = Counts()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            _count_file(path.read_text(encoding="utf-8"), counts)
    return counts


def _count_file(text: str, counts: Counts) -> None:
    rows = text.splitlines()
    counts.lines += len(rows)
    for row in rows:
        stripped = row.strip()
        if not stripped:
            counts.blank_lines += 1
        if stripped.startswith("#"):
            counts.comment_lines += 1
        # A quote means that the '#' may be within a string
        if "#" in row and '"' not in row and ATTRIBUTE_COMMENT.search(row):
            counts.attribute_comments += 1
    for node in ast.walk(ast.parse(text)):
        _count_node(node, counts)


def _count_node(node: ast.AST, counts: Counts) -> None:
    if isinstance(node, COMPREHENSIONS):
        counts.nodes["comprehension"] += 1
    elif isinstance(node, ast.IfExp):
        counts.nodes["conditional expression"] += 1
    elif isinstance(node, ast.NamedExpr):
        counts.nodes["walrus"] += 1
    elif isinstance(node, ast.Raise):
        counts.nodes["raise"] += 1
    elif isinstance(node, ast.Import | ast.ImportFrom):
        counts.import_lines += _length(node)
    elif isinstance(node, FUNCTIONS):
        counts.function_lengths.append(_length_without_docstring(node))
        counts.bare_participles += bool(BARE_PARTICIPLE.fullmatch(node.name))
    if isinstance(node, DOCUMENTED):
        docstring = ast.get_docstring(node)
        if docstring:
            counts.docstring_lines += _length(node.body[0])
            counts.what_clauses += bool(WHAT_CLAUSE.match(docstring))


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _length_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's lines without its docstring, because explaining more is no fault."""
    if ast.get_docstring(node) is None:
        return _length(node)
    return _length(node) - _length(node.body[0])


def bounded_numbers(counts: Counts) -> dict[str, float]:
    """Return the numbers that have a budget; each is better the lower it is."""
    lengths = sorted(counts.function_lengths)
    return {
        "comprehensions-per-1000-lines": counts.per_thousand_lines("comprehension"),
        "conditional-expressions-per-1000-lines": counts.per_thousand_lines(
            "conditional expression"
        ),
        "walruses-per-1000-lines": counts.per_thousand_lines("walrus"),
        "raises-per-1000-lines": counts.per_thousand_lines("raise"),
        "import-lines-percent": round(100 * counts.import_lines / counts.lines, 1),
        "attribute-comments": counts.attribute_comments,
        "docstrings-with-what-clause": counts.what_clauses,
        "functions-named-by-participle": counts.bare_participles,
        "function-length-90th-percentile": lengths[int(0.9 * len(lengths))],
        "longest-function": lengths[-1],
    }


def comments_per_hundred_lines(counts: Counts) -> float:
    """Return the lines that are only a comment, per 100 lines; its budget is a lower bound."""
    return round(100 * counts.comment_lines / counts.lines, 2)


def main(folders: list[str]) -> None:
    """Print the numbers over ``folders``, by default over all rooms."""
    counts = count_folders([Path(folder) for folder in folders] or [ROOT / room for room in ROOMS])
    print(f"{counts.lines:>10}  lines")
    print(f"{counts.code_lines:>10}  lines of code")
    median = statistics.median(counts.function_lengths)
    print(f"{median:>10.0f}  function-length-median")
    for name, number in bounded_numbers(counts).items():
        print(f"{number!s:>10}  {name}")
    print(f"{comments_per_hundred_lines(counts)!s:>10}  comment-lines-per-100")


if __name__ == "__main__":
    main(sys.argv[1:])
