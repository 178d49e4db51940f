"""What must never be, whatever came in: in texts that are shown, and in a run directory's files."""

import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

# No text of ours holds this character, and every long hostile text is made of it
LONG = "\u02ac"
MOST = 300  # characters of what others say that one line may quote
_LINE = 4000  # characters of any line: our longest lists all settings
_MARKUP = "fuzzed"  # hostile markup is ``[bold red]fuzzed[/]``
_PLAIN = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9._+-]*")
_LARGEST_WEIGHT, _LARGEST_STATISTIC, _LARGEST = 1e6, 1e12, 1e31
_STATISTICS = ("running_mean", "running_var", "counts")
_MOMENTS = "/optimiser/"  # a site's own, squares of gradients among them
_CHECKPOINTS = "checkpoints"  # beside models these hold a server's moments, squares of changes


def text_faults(text: str) -> Iterator[str]:
    """Yield what is wrong with a text that is shown as it is; line ends part its lines."""
    for line in text.split("\n"):
        if bad := sorted({hex(ord(c)) for c in line if not c.isprintable()}):
            yield f"unprintable {', '.join(bad)} in {line[:200]!r}"
        if line.count(LONG) > MOST:
            yield f"{line.count(LONG)} characters of a site's text in one line: {line[:80]!r}"
        if len(line) > _LINE:
            yield f"a line of {len(line)} characters: {line[:80]!r}"
        if _MARKUP in line and f"[bold red]{_MARKUP}" not in line:
            yield f"markup was interpreted in {line[:200]!r}"


def line_faults(text: str) -> Iterator[str]:
    """Yield what is wrong with a text that must be one line."""
    if "\n" in text:
        yield f"more than one line: {text[:200]!r}"
    yield from text_faults(text)


def run_directory_faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with the files of a run directory, however its run ended."""
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = str(file.relative_to(path))
        if not all(_PLAIN.fullmatch(part) for part in file.relative_to(path).parts):
            yield f"a file called {name!r}"
        readers = {".json": _json_faults, ".csv": _csv_faults, ".safetensors": _model_faults}
        for fault in readers.get(file.suffix, _no_faults)(file):
            yield f"{name}: {fault}"


def _no_faults(file: Path) -> Iterator[str]:
    yield from ()


def _json_faults(file: Path) -> Iterator[str]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} in JSON")

    try:
        content = json.loads(file.read_text(), parse_constant=refuse)
    except ValueError as error:
        yield str(error)
        return
    for value in _leaves(content):
        if isinstance(value, str):
            yield from line_faults(value)
        elif isinstance(value, int | float) and not abs(value) <= _LARGEST:
            yield f"number {value}"


def _leaves(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from _leaves(value)
    elif isinstance(content, list):
        for value in content:
            yield from _leaves(value)
    else:
        yield content


def _csv_faults(file: Path) -> Iterator[str]:
    with file.open(newline="") as opened:
        for row in csv.reader(opened):
            for cell in row:
                if cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not _is_number(cell):
                    yield f"a cell that spreadsheets compute: {cell[:80]!r}"
                yield from line_faults(cell)
            if row and _is_number(row[-1]) and not math.isfinite(float(row[-1])):
                yield f"number {row[-1]}"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _model_faults(file: Path) -> Iterator[str]:
    for name, array in load_file(file).items():
        wide = name.endswith(_STATISTICS) or file.parent.name == _CHECKPOINTS or _MOMENTS in name
        largest = _LARGEST_STATISTIC if wide else _LARGEST_WEIGHT
        if array.size and not np.abs(array.astype(np.float64)).max() <= 1.01 * largest:
            yield f"array {name} has a number beyond {largest:g} or none"
