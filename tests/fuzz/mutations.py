"""Mutations of texts, of trees of values and of bytes: what a file or a message may turn into."""

import re
from collections.abc import Callable, MutableMapping, MutableSequence
from random import Random
from typing import Any

from tests.fuzz.oracle import LONG

TEXTS = (
    "",
    " ",
    LONG * 5000,
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\x00b",
    "a\r\nb\tc",
    "\u202egnp.exe",
    "\u2028line",
    "[bold red]fuzzed[/]",
    "[/nothing]",
    "[link=file:///etc/passwd]x[/link]",
    "=1+1",
    "=cmd|' /C calc'!A0",
    "@SUM(A1)",
    "-2+3",
    "../../outside",
    "/etc/passwd",
    "a/b",
    "..",
    "all",
    "<script>alert(1)</script>",
    "$\\frac{",
    "%s%n{0}{site}",
    "NaN",
    "null",
    "true",
    "1e999",
    "9" * 5000,
    "[" * 20_000,
    '{"a":' * 5000,
    "\ud800",
    "\U0001f9ea",
    "é" * 300,
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    35,
    255,
    2**31,
    2**32,
    2**63 - 1,
    -(2**63),
    0.5,
    -0.0,
    1e-320,
    1e30,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)
_NUMBERS_AS_TEXT = (
    *("0", "-1", "1", "2", "3", "35", "1000000", "2147483648", "1e999", "-1e999", "nan", ".inf"),
    *("0x7fffffff", "1_000", "9" * 400, "1e-400", "true", "2024-01-01", "0o7", "1:30:00"),
    *("2024-13-45", "9999-99-99T99:99:99Z", "[1]", "{a: 1}", "'1'", "!!int x", "!!float [", "~"),
)
_WORD = re.compile(r"[^\s:=,\[\]{}\"']+")
_NUMBER = re.compile(r"-?\d[\d.eE+-]*")


def hostile_text(rng: Random) -> str:
    """Return a text that one should not print, store or name a file by."""
    return rng.choice(TEXTS)


def hostile_value(rng: Random) -> Any:
    """Return a value of any kind that JSON or YAML has."""
    return rng.choice(
        [
            lambda: hostile_text(rng),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice([10**400, -(10**400), True, False, None]),
            lambda: rng.choice([[], {}, [[]], [None], {"": 0}, [1] * 2000, [[[[1]]]]]),
            lambda: {hostile_text(rng): hostile_text(rng)},
            lambda: [hostile_text(rng) for _ in range(rng.randrange(4))],
        ]
    )()


def mutate_tree(rng: Random, tree: Any, done: list[str]) -> Any:
    """Return a tree of mappings, lists and values with one place changed; it may be altered."""
    places = list(_places(tree))
    if not places:
        return hostile_value(rng)
    holder, key = rng.choice(places)
    way = rng.choice(["value", "value", "value", "drop", "key", "twice", "wrap", "deep"])
    done.append(f"{way} at {str(key)[:40]!r}")
    old = holder[key]
    if way == "value":
        holder[key] = hostile_value(rng)
        done[-1] += f" -> {str(holder[key])[:40]!r}"
    elif way == "drop":
        del holder[key]
    elif way == "wrap":
        holder[key] = rng.choice([[old], {"value": old}, str(old)[:1000]])
    elif way == "deep":
        for _ in range(rng.choice([40, 150])):
            old = [old]
        holder[key] = old
    elif isinstance(holder, MutableMapping):
        holder[hostile_text(rng)] = old
        if way == "key":
            del holder[key]
    else:
        holder.insert(key, old)
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return the holder and key of each value of a tree."""
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, MutableMapping):
        items = list(tree.items())
    elif isinstance(tree, MutableSequence):
        items = list(enumerate(tree))[:50]
    else:
        return found
    for key, value in items:
        found.append((tree, key))
        found += _places(value)
    return found


def mutate_text(rng: Random, text: str, done: list[str]) -> str:
    """Return a text file's content with one thing changed."""
    name, way = rng.choice(_TEXT_WAYS)
    changed = way(rng, text)
    done.append(name)
    return changed


def _insert(rng: Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + hostile_text(rng) + text[place:]


def _delete(rng: Random, text: str) -> str:
    start = rng.randrange(len(text) + 1)
    return text[:start] + text[start + rng.randrange(1, 30) :]


def _cut(rng: Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _double_line(rng: Random, text: str) -> str:
    lines = text.splitlines() or [""]
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return "\n".join(lines)


def _drop_line(rng: Random, text: str) -> str:
    lines = text.splitlines() or [""]
    lines.pop(rng.randrange(len(lines)))
    return "\n".join(lines)


def _word(rng: Random, text: str) -> str:
    return _replaced(rng, text, _WORD, hostile_text(rng))


def _quoted(rng: Random, text: str) -> str:
    plain = hostile_text(rng).replace("\\", "").replace('"', "")
    return _replaced(rng, text, _WORD, f'"{plain}"')


def _number(rng: Random, text: str) -> str:
    return _replaced(rng, text, _NUMBER, rng.choice(_NUMBERS_AS_TEXT))


def _odd_value(rng: Random, text: str) -> str:
    return _replaced(rng, text, _WORD, rng.choice(_NUMBERS_AS_TEXT))


def _replaced(rng: Random, text: str, pattern: re.Pattern[str], new: str) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text + new
    match = rng.choice(found)
    return text[: match.start()] + new + text[match.end() :]


def _aliases(rng: Random, text: str) -> str:
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    bomb += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return rng.choice(["\n".join(bomb) + "\n" + text, text + "\nself: &s [*s]\n", "&x {a: *x}"])


def _deep(rng: Random, text: str) -> str:
    return text + "\nx: " + rng.choice(["[" * 3000, "{a: " * 3000, "[" * 60 + "]" * 60]) + "\n"


def _surrogate(rng: Random, text: str) -> str:
    return _replaced(rng, text, _WORD, rng.choice(['"\\ud800"', '"\\x1b[2J"', '"\\0"', "\ufeff"]))


_TEXT_WAYS: list[tuple[str, Callable[[Random, str], str]]] = [
    ("insert", _insert),
    ("delete", _delete),
    ("cut", _cut),
    ("double a line", _double_line),
    ("drop a line", _drop_line),
    ("word", _word),
    ("quoted word", _quoted),
    ("number", _number),
    ("odd value", _odd_value),
    ("aliases", _aliases),
    ("deep", _deep),
    ("escape", _surrogate),
]


def mutate_bytes(rng: Random, content: bytes, done: list[str]) -> bytes:
    """Return bytes with one thing changed."""
    data, way = bytearray(content), rng.choice(_BYTE_WAYS)
    place = rng.randrange(len(data) or 1)
    if rng.random() < 0.5:
        place = rng.randrange(min(len(data), 200) or 1)  # headers are what is read first
    done.append(f"{way} at {place}")
    if way == "flip" and data:
        for _ in range(rng.choice([1, 1, 3, 20])):
            data[rng.randrange(len(data)) if rng.random() < 0.5 else place] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[place:]
    elif way == "append":
        data += bytes(rng.choice([1, 100, 100_000]))
    elif way == "number":
        size = rng.choice([1, 2, 4, 8])
        value = rng.choice([0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (4 * size)])
        data[place : place + size] = value.to_bytes(size, rng.choice(["little", "big"]))
    elif way == "text":
        data[place:place] = hostile_text(rng).encode("utf-8", "surrogatepass")
    elif way == "delete":
        del data[place : place + rng.choice([1, 2, 4, 64])]
    elif way == "other":
        return rng.choice([b"", b"PK\x03\x04", b"\x80\x04.", b"\x93NUMPY", b"\x1f\x8b", b"GIF89a"])
    return bytes(data)


_BYTE_WAYS = ("flip", "flip", "cut", "append", "number", "number", "text", "delete", "other")
