"""The form of a run directory's files: what each must hold, or one line that says what is amiss.

A file may come from another machine or version, or from a hand that meant well. What is there is
held against its form when it is read; what is not there is told when it is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fedsilo.datasets.silo.site_names import site_name_fault
from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.one_line import one_line, shown

Form = Callable[[Any], str]  # says where and why a content is of another form; empty: it is not

_LARGEST, _LONGEST = 10**15, 4000


class Told(dict[str, Any]):
    """What a file tells: a key that it lacks is an error of the run directory."""

    def __init__(self, content: Iterable[tuple[str, Any]], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> NoReturn:
        raise RunDirectoryError(f"{self.path} lacks '{one_line(key, 80)}': start a new run")


def read_told(text: str, path: Path) -> Any:
    """Return the content of a JSON file, of the form that a file of its name has.

    Raises:
        RunDirectoryError: it is of another.
        ValueError: it is no JSON.
    """
    content = json.loads(text, object_pairs_hook=lambda pairs: Told(pairs, path))
    check(FORMS.get(path.name, _anything), content, str(path))
    return content


def check(form: Form, content: Any, where: str) -> None:
    """Refuse a content of another form.

    Raises:
        RunDirectoryError: names the place in it.
    """
    if fault := form(content):
        raise RunDirectoryError(
            f"{where} is of another form: {one_line(fault)}; is it of another version, or altered?"
        )


def _anything(content: Any) -> str:
    return ""


def number(content: Any) -> str:
    """Take a number; of undefined figures also NaN."""
    fits = isinstance(content, int | float) and not isinstance(content, bool)
    return "" if fits and not abs(content) > _largest(content) else f"{shown(content)} is no number"


def _largest(content: float) -> float:
    return _LARGEST if isinstance(content, int) else math.inf


def whole(content: Any) -> str:
    """Take a whole number of 0 or more."""
    fits = type(content) is int and 0 <= content <= _LARGEST
    return "" if fits else f"{shown(content)} is no whole number"


def text(content: Any) -> str:
    """Take a line that can be printed."""
    fits = isinstance(content, str) and content.isprintable() and len(content) <= _LONGEST
    return "" if fits else f"{shown(content)} is no line of text"


def drawn(content: Any) -> str:
    """Take a line that plots do not take for a formula."""
    return text(content) or ("it has a '$' or '\\'" if {"$", "\\"} & set(content) else "")


def digits(content: Any) -> str:
    """Take a whole number that is written as text, as JSON's keys are."""
    fits = isinstance(content, str) and content.isdecimal() and len(content) < 16
    return "" if fits else f"{shown(content)} is no whole number"


def maybe(form: Form) -> Form:
    """Take None too."""
    return lambda content: "" if content is None else form(content)


def listing(form: Form) -> Form:
    """Take a list, each item of a form."""

    def fault(content: Any) -> str:
        if not isinstance(content, list):
            return f"{shown(content)} is no list"
        return next((wrong for item in content if (wrong := form(item))), "")

    return fault


def row(*forms: Form) -> Form:
    """Take a list of as many items as there are forms, each of its own."""

    def fault(content: Any) -> str:
        if not isinstance(content, list) or len(content) != len(forms):
            return f"{shown(content)} is no list of {len(forms)}"
        pairs = zip(forms, content, strict=True)
        return next((wrong for form, item in pairs if (wrong := form(item))), "")

    return fault


def mapping(form: Form, key: Form = text) -> Form:
    """Take a mapping, each value of a form."""

    def fault(content: Any) -> str:
        if not isinstance(content, dict):
            return f"{shown(content)} is no mapping"
        for name, value in content.items():
            if wrong := key(name) or form(value):
                return f"'{one_line(name, 60)}': {wrong}"
        return ""

    return fault


def record(**forms: Form) -> Form:
    """Take a mapping whose values, if they are there, are of their forms; '_' is '-' in a key."""
    by_key = {key.replace("_", "-"): form for key, form in forms.items()} | forms

    def fault(content: Any) -> str:
        if not isinstance(content, dict):
            return f"{shown(content)} is no mapping"
        faults = ((key, by_key[key](value)) for key, value in content.items() if key in by_key)
        return next((f"'{key}': {wrong}" for key, wrong in faults if wrong), "")

    return fault


def complete(**forms: Form) -> Form:
    """Take a mapping that has all these keys, as ``record`` does."""

    def fault(content: Any) -> str:
        if wrong := record(**forms)(content):
            return wrong
        lacking = sorted({key.replace("_", "-") for key in forms} - content.keys())
        return f"it lacks '{lacking[0]}'" if lacking else ""

    return fault


def site(content: Any) -> str:
    """Take a site's name, which names folders and columns."""
    if not isinstance(content, str):
        return "a site's name is no text"
    return site_name_fault(content) or ""


def _silos(content: Any) -> str:
    silo = record(
        distribution=drawn,
        sizes=mapping(whole),
        label_counts=mapping(listing(whole)),
        fingerprints=mapping(text),
        dropped=whole,
        schema=text,
        classes=listing(drawn),
        backbone=text,
        software=mapping(text),
        agreed=whole,
    )
    if fault := mapping(silo, key=site)(content):
        return fault
    counts = [counts for one in content.values() for counts in one.get("label_counts", {}).values()]
    if len({len(counted) for counted in counts}) > 1:
        return "'label_counts' are of different numbers of classes"
    named = [one["classes"] for one in content.values() if one.get("classes")]
    if any(len(names) != len(counts[0]) for names in named if counts):
        return "'classes' and 'label_counts' are of different numbers of classes"
    return "" if content else "it names no site"


def _setting(content: Any) -> str:
    return "" if isinstance(content, bool | int | float) else text(content)


def _count_or_counts(content: Any) -> str:
    """Take what the privacy hook keeps: of older checkpoints counts, of others two mappings."""
    return mapping(whole)(content) if isinstance(content, dict) else whole(content)


_figures = mapping(number)
FIGURES = record(mean=listing(number), std=listing(number))
SILOS: Form = _silos
SUMMARY = record(
    method=drawn,
    title=drawn,
    dataset=drawn,
    seed=whole,
    rounds=whole,
    sites=mapping(_figures, key=site),
    mean=_figures,
    distributions=mapping(_figures, key=drawn),
    validation=record(mean=_figures, distributions=mapping(_figures, key=drawn)),
    published=maybe(mapping(_figures)),
    stopped=maybe(text),
    marks=mapping(drawn, key=digits),
    failures=listing(record(round=whole, phase=text, site=text, reason=text)),
    seconds=record(total=number, rounds=number, sites=mapping(number)),
    peak_memory_bytes=mapping(number),
    unrepeatable_operations=listing(text),
    bytes=record(down=whole, up=whole),
    privacy=record(**{"leaves each site": listing(text), "bytes up": whole}),
)
STATE = record(
    round=whole,
    extras=mapping(_anything),
    keepers=listing(site),
    settings=mapping(_setting),
    hooks=mapping(_anything),  # see HOOKS
    figures=FIGURES,
)
# Of hooks' states in a checkpoint, by the hook's name; older ones hold all rows
_METRICS_ROWS = listing(row(whole, site, text, text, number))
_TRAFFIC_ROWS = listing(row(whole, text, site, whole, whole, number))
_FAILURES = listing(record(round=whole, phase=text, site=text, reason=text))
_TABLE = complete(bytes=whole, crc32=whole)
_METRICS = complete(table=_TABLE, rows=_METRICS_ROWS, last=_METRICS_ROWS)
_TRAFFIC = complete(
    table=_TABLE,
    rows=_TRAFFIC_ROWS,
    sites=mapping(row(whole, whole, number), key=site),
    peak_memory=mapping(number),
    unrepeatable=listing(text),
)


def _metrics(content: Any) -> str:
    return (_METRICS_ROWS if isinstance(content, list) else _METRICS)(content)


def _traffic(content: Any) -> str:
    """Take where the file stands, or rows, peaks, and names of operations, which some lack."""
    if not isinstance(content, list):
        return _TRAFFIC(content)
    parts = (_TRAFFIC_ROWS, mapping(number), listing(text))
    if not 2 <= len(content) <= len(parts):
        return f"{shown(content)} is no list of {len(parts)}"
    pairs = zip(parts, content, strict=False)
    return next((wrong for form, item in pairs if (wrong := form(item))), "")


HOOKS = record(
    metrics=_metrics,
    traffic=_traffic,
    failures=_FAILURES,
    privacy=maybe(mapping(_count_or_counts)),
)
FORMS: Mapping[str, Form] = {
    "silos.json": SILOS,
    "summary.json": SUMMARY,
    "standardisation.json": FIGURES,
}
_WHOLE_COLUMNS, _NUMBER_COLUMNS = {"round", "bytes_down", "bytes_up"}, {"value", "seconds"}


def table_fault(rows: Iterable[Mapping[str | None, Any]]) -> str:
    """Say why the rows of metrics.csv or traffic.csv are of another form; empty: they are not."""
    for line, cells in enumerate(rows, start=2):
        if None in cells or None in cells.values():
            return f"line {line} has more or fewer cells than the first"
        for column, cell in cells.items():
            if column in _WHOLE_COLUMNS and not (cell.isdecimal() and len(cell) < 16):
                return f"line {line}, '{column}' is {shown(cell)}, no whole number"
            if column in _NUMBER_COLUMNS and not _is_number(cell):
                return f"line {line}, '{column}' is {shown(cell)}, no number"
            if not cell.isprintable():
                return f"line {line}, '{column}' is no text that can be printed"
    return ""


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
