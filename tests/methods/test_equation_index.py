"""Each paper's file opens with an index of its equations, which must lead to what computes them.

Its form: a line ``Equations (<source>):``, then a line ``  (<number>) <what> -> <dotted name>`` for
each. A source is an arXiv number, a DOI, or, where there is neither, a volume and its pages.
"""

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedsilo.models.methods

FOLDER = Path(fedsilo.models.methods.__path__[0])
# Baselines that are of no paper
OWN = {"__init__", "ensemble", "local", "mix"}
PARTS = {"uefl_books", "uefl_network"}  # of a paper whose index is in the method's own file
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in OWN | PARTS)
HEADER = re.compile(r"Equations \((?P<source>.+)\):")
LINE = re.compile(r"  \((?P<number>[^()]+)\) (?P<what>\S.*) -> (?P<name>[\w.]+)")
SOURCE = re.compile(
    r"arXiv:\d{4}\.\d{5}(, after arXiv:\d{4}\.\d{5})?|doi:10\.\S+|.* \d{4}, .*pages .*"
)


@dataclass(frozen=True)
class Index:
    """``sources`` of the blocks, and each equation's number and dotted name."""

    sources: list[str]
    names: list[tuple[str, str]]


def read_index(docstring: str) -> Index:
    """Return the index of a module's docstring; a block ends at an empty line."""
    sources: list[str] = []
    names: list[tuple[str, str]] = []
    within = False
    for line in docstring.splitlines():
        if header := HEADER.fullmatch(line):
            sources.append(header["source"])
            within = True
        elif within and line.strip():
            entry = LINE.fullmatch(line)
            assert entry, f"this line of an index is not '  (number) what -> name': {line!r}"
            names.append((entry["number"], entry["name"]))
        else:
            within = False
    return Index(sources, names)


def resolve(name: str) -> object:
    """Import what a dotted name means: the longest module in it, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_index_names_its_source_and_leads_to_functions_that_are_there(path: Path) -> None:
    index = read_index(ast.get_docstring(ast.parse(path.read_text()), clean=False) or "")
    assert index.sources, f"{path.name} has no index of equations"
    assert index.names, f"the index of {path.name} names nothing"
    assert all(SOURCE.fullmatch(source) for source in index.sources)
    assert len({number for number, _ in index.names}) == len(index.names)
    for _, name in index.names:
        assert callable(resolve(f"fedsilo.{name}")), name


def test_an_index_is_read_with_its_numbers_and_ends_at_an_empty_line() -> None:
    index = read_index(
        "A paper.\n\nEquations (arXiv:2402.18888):\n  (8) an entropy -> a.b\n"
        "  (4, first term) two words -> c.d.e\n\n(1) no part of it -> f\n"
    )
    assert index == Index(["arXiv:2402.18888"], [("8", "a.b"), ("4, first term", "c.d.e")])


def test_a_line_of_another_form_is_no_index_line() -> None:
    with pytest.raises(AssertionError, match="not '  \\(number\\)"):
        read_index("Equations (arXiv:2402.18888):\n  (8) an entropy")


@pytest.mark.parametrize(
    "name", ["fedsilo.models.methods.uefl.no_such", "fedsilo.models.no_such", "nowhere.x"]
)
def test_resolve_of_an_unknown_name_raises(name: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve(name)


def test_no_docstring_cites_a_folder_of_papers_that_is_not_there() -> None:
    root = FOLDER.parents[1]
    rooms = ("fedsilo", "models", "datasets", "strategies", "client_app", "server_app")
    cited = [
        path.relative_to(root).as_posix()
        for room in rooms
        for path in sorted((root / room).rglob("*.py"))
        if re.search(r"\bpapers/\w", path.read_text())
    ]
    assert cited == []
