"""A run directory with one thing wrong: a key removed, or a value of another kind in its place."""

import csv
import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**18,
    -(10**400),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "../../../etc/passwd",
    "/etc/passwd",
    "\x1b]0;owned\x07\x9b31m\r\u202e",
    "<script>alert(1)</script>",
    "![x](http://evil.test/x.png)",
    "$\\frac{1}{0}$",
    "a" * 5000,
    "{{ 7 * 7 }}",
    "[link=http://evil.test]x[/link]",
    [],
    [[]],
    ["x"],
    [1, 2, 3],
    [None],
    {},
    {"x": {}},
    {"x": 1},
    {"x": {"x": {"x": ["x"]}}},
    {"": ""},
]
REMOVED = object()


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a document."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(document, dict):
        items = iter(document.items())
    elif isinstance(document, list):
        items = iter(list(enumerate(document))[:3])
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a document with one value replaced or removed."""
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copy


def make_odd(run: Path, name: str, where: int, what: int) -> str:
    """Change one place of a run's file, and say what was changed.

    Args:
        run: the run directory, in which the file is written again.
        name: the file.
        where: decides the place, modulo the number of places.
        what: decides the value, modulo the number of odd values; the last removes the key.
    """
    values = [*ODD, REMOVED]
    value = values[what % len(values)]
    path = run / name
    if path.suffix == ".csv":
        return _odd_cell(path, where, value)
    document = (
        tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    )
    found = list(places(document))
    place = found[where % len(found)]
    odd = changed(document, place, value)
    if path.suffix == ".toml":
        try:
            path.write_text(tomli_w.dumps(odd))
        except (TypeError, ValueError):  # TOML has no null
            path.write_text(tomli_w.dumps(changed(document, place, REMOVED)))
    else:
        path.write_text(json.dumps(odd))
    return f"{name}: {place} = {'removed' if value is REMOVED else repr(value)[:60]}"


def _odd_cell(path: Path, where: int, value: Any) -> str:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    row = rows[where % min(len(rows), 4)]
    column = where // 4 % len(row)
    if value is REMOVED:
        del row[column]
    else:
        row[column] = str(value)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return f"{path.name}: line {where % min(len(rows), 4) + 1}, column {column + 1} = {value!r:.60}"


def draw(generator: random.Random, run: Path, names: list[str]) -> str:
    """Make a random change, for a loop without hypothesis."""
    name = generator.choice(names)
    return make_odd(run, name, generator.randrange(10**6), generator.randrange(10**6))
