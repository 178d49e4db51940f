"""The page on the architecture is true: its arrows, its layers, the way of a round, its table."""

import ast
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.test_budgets import budgets, faults, numbers_of_a_round, trace_of_a_round

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LINES, WIDTH, QUESTIONS = 142, 140, 30
APP = ("client_app", "datasets", "models", "server_app", "strategies")
ROOMS = (*APP, "core", "fedsilo")  # 'fedsilo' is the folder without 'core'
# What of a room another may import at most, beside all that its arrows lead to
ONLY = {("client_app", "strategies"): "strategies.wire"}

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (?P<question>[^|]+) \| `(?P<path>\S+\.py): (?P<name>[\w.]+)` \|$")
_STEP = re.compile(r"([\w/]+\.py): (\w+(?:\.\w+)*(?:, \w+(?:\.\w+)*)*)")
_ARROW = re.compile(r"^ +(\w+) --(?: [\w ]+ --)?> (\w+)$", re.MULTILINE)
_ROOM = re.compile(
    r"^ +(\w+)\[\"<b>\1</b>:[^\n]*<br/>\n +((?:[^\n]+<br/>\n +)?[^\n]+)\"\]$", re.MULTILINE
)


def _blocks(kind: str) -> list[str]:
    return [text for name, text in _BLOCK.findall(PAGE) if name == kind]


def _drawing() -> str:
    (drawing,) = _blocks("mermaid")
    return drawing


def _steps(text: str) -> list[tuple[str, str]]:
    """Return path and definition of each step of a way, in its order."""
    return [(path, name) for path, names in _STEP.findall(text) for name in names.split(", ")]


def _rows() -> list[tuple[str, str, str]]:
    """Return question, path and definition of each row of the table."""
    found = (_ROW.match(line) for line in PAGE.splitlines())
    return [(row["question"], row["path"], row["name"]) for row in found if row]


def _definitions(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return the names of functions, classes and constants, those in a class with its name."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {prefix + node.name, *_definitions(node.body, f"{prefix}{node.name}.")}
        elif isinstance(node, ast.Assign):
            names |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@cache
def _defined_in(path: str) -> set[str]:
    return _definitions(ast.parse((ROOT / path).read_text()).body)


def _imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports, wherever in it the import stands."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def _room_of(name: str) -> str:
    """Return the room of a module, named without the package."""
    first = name.partition(".")[0]
    # The version is core's, though its file is beside it: hospitals do not compare that file
    return first if first in APP else "core" if first in ("core", "_version") else "fedsilo"


@cache
def _imports() -> Mapping[tuple[str, str], set[str]]:
    """Return what is imported by each room of each other one."""
    found: dict[tuple[str, str], set[str]] = {}
    for folder in (*APP, "fedsilo"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT / "fedsilo" if folder == "fedsilo" else ROOT)
            room = _room_of(".".join(place.with_suffix("").parts))
            for module in _imported(ast.parse(path.read_text())):
                name = module.removeprefix("fedsilo.")
                if name != module and (other := _room_of(name)) != room:
                    found.setdefault((room, other), set()).add(name)
    return found


def _reached(room: str, arrows: set[tuple[str, str]]) -> set[str]:
    """Return the rooms to which arrows lead from ``room``; it is among them if they go round."""
    reached: set[str] = set()
    ahead = {room}
    while ahead:
        ahead = {head for tail, head in arrows if tail in ahead} - reached
        reached |= ahead
    return reached


def _wrong(
    arrows: set[tuple[str, str]], imports: Mapping[tuple[str, str], set[str]]
) -> list[tuple[str, str]]:
    """Return the arrows that are no imports, then the imports that the arrows forbid."""
    forbidden = [
        (room, other)
        for (room, other), modules in sorted(imports.items())
        if other not in _reached(room, arrows)
        or not all(module.startswith(ONLY.get((room, other), other)) for module in modules)
    ]
    return sorted(arrows - imports.keys()) + forbidden


def test_each_arrow_is_an_import_and_each_import_follows_the_arrows() -> None:
    arrows = set(_ARROW.findall(_drawing()))
    assert len(arrows) == _drawing().count("--> ")
    assert _wrong(arrows, _imports()) == []


def test_the_arrows_go_one_way() -> None:
    arrows = set(_ARROW.findall(_drawing()))
    assert {room for arrow in arrows for room in arrow} == set(ROOMS)
    assert [room for room in ROOMS if room in _reached(room, arrows)] == []


@pytest.mark.parametrize(
    ("imports", "wrong"),
    [
        ({("server_app", "client_app"): {"client_app.app"}}, []),
        ({}, [("server_app", "client_app")]),
        (
            {
                ("server_app", "client_app"): {"client_app.app"},
                ("client_app", "server_app"): {"server_app.run"},
            },
            [("client_app", "server_app")],
        ),
    ],
)
def test_a_wrong_arrow_is_found_out(
    imports: dict[tuple[str, str], set[str]], wrong: list[tuple[str, str]]
) -> None:
    assert _wrong({("server_app", "client_app")}, imports) == wrong


def test_of_a_room_behind_a_narrow_arrow_no_more_than_that_is_imported() -> None:
    arrow = ("client_app", "strategies")
    assert _wrong({arrow}, {arrow: {"strategies.wire.records.bundle"}}) == []
    assert _wrong({arrow}, {arrow: {"strategies.loop.method.Method"}}) == [arrow]


def test_the_folders_of_the_drawing_are_the_layers_that_lint_holds() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    held: dict[str, list[set[str]]] = {}
    for contract in settings["tool"]["importlinter"]["contracts"]:
        for container in contract.get("containers", []):
            layers = [set(layer.split(" | ")) for layer in contract["layers"]]
            held[container.removeprefix("fedsilo.")] = layers
    # Below 'pages' are the rooms that have drawings of their own
    assert [held["fedsilo"].pop(), held["fedsilo"].pop()] == [{"_version"}, {"core"}]
    while held["fedsilo"][-1] < set(APP):
        held["fedsilo"].pop()
    drawn = {
        room: [set(layer.split(", ")) for layer in layers.split(" → ")]
        for room, text in _ROOM.findall(_drawing())
        for layers in [re.sub(r"<br/>\n +", " ", text)]
    }
    assert drawn == held


def test_the_way_of_a_round_names_what_there_is() -> None:
    ways = [_steps(text) for text in _blocks("text")]
    assert len(ways) == 4
    assert all(ways)
    assert [step for way in ways for step in way if step[1] not in _defined_in(step[0])] == []


@pytest.fixture(scope="module")
def trace() -> str:
    """Return what a round passes; to trace one takes seconds."""
    return trace_of_a_round()


def test_a_round_passes_what_the_page_says_in_its_order(trace: str) -> None:
    passed = _steps("\n".join(line for line in trace.splitlines() if ".py: " in line))
    (train,) = [text for text in _blocks("text") if "RoundLoop.run_round" in text]
    way = _steps(train)
    assert [step for step in passed if step in way] == way


def test_no_number_of_a_round_is_above_its_budget(trace: str) -> None:
    assert faults(budgets(), {"round": numbers_of_a_round(trace)}) == []


def test_the_table_answers_thirty_questions_with_what_there_is() -> None:
    rows = _rows()
    assert len({question for question, _, _ in rows}) == len(rows) >= QUESTIONS
    assert PAGE.count("\n| ") == len(rows) + 1  # beside the heading every row is an answer
    assert [row for row in rows if row[2] not in _defined_in(row[1])] == []


def test_the_page_is_short() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= LINES
    assert [line for line in lines if len(line) > WIDTH] == []
