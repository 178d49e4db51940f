"""What the files of a run directory must hold, or one line that says what is wrong.

A file may come from another machine or version, or may have been edited. What it has is checked
when it is read; what it lacks is an error when it is needed.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, create_model

from fedsilo.datasets.io.declarations import checked, misfit
from fedsilo.datasets.silo.declared_silos import SiteName
from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.one_line import one_line, shown

_LARGEST, _LONGEST = 10**15, 4000


class Content(dict[str, Any]):
    """The content of a file: a key that it lacks is an error of the run directory."""

    def __init__(self, content: Iterable[tuple[str, Any]], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> NoReturn:
        raise RunDirectoryError(f"{self.path} lacks '{one_line(key, 80)}': start a new run")


def read_content(text: str, path: Path) -> Any:
    """Return the content of a JSON file, checked if it is a file of a known name.

    Raises:
        RunDirectoryError: it has another form.
        ValueError: it is no JSON.
    """
    content = json.loads(text, object_pairs_hook=lambda pairs: Content(pairs, path))
    check(FORMS.get(path.name, Any), content, str(path))
    return content


def check(form: Any, content: Any, where: str) -> None:
    """Raise a RunDirectoryError, which names the place, for a content not of the type ``form``."""
    checked(form, content, lambda sentence: _other_form(where, sentence), quoted=True)


def check_table(rows: Iterable[Mapping[Any, Any]], where: str) -> None:
    """Raise a RunDirectoryError for rows of metrics.csv or traffic.csv of another form."""
    for line, cells in enumerate(rows, start=2):
        if None in cells or None in cells.values():
            raise _other_form(where, f"line {line} has more or fewer cells than the first")
        for column, cell in cells.items():
            if fault := _cell_fault(column, cell):
                raise _other_form(where, f"line {line}, '{column}' is {shown(cell)}, {fault}")


def _cell_fault(column: str, cell: str) -> str | None:
    if column in ("round", "bytes_down", "bytes_up", "steps", "samples") and not _is_count(cell):
        return "no whole number"
    if column in ("value", "seconds") and not _is_number(cell):
        return "no number"
    return None if cell.isprintable() else "no text that can be printed"


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 16


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _other_form(where: str, sentence: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{where} is of another form: {one_line(sentence)}; was it altered, or made by another "
        "version of fedsilo?"
    )


def _printable(text: str) -> str:
    if not text.isprintable() or len(text) > _LONGEST:
        raise misfit("must be a line of text")
    return text


def _plain(text: str) -> str:
    if {"$", "\\"} & set(text):
        raise misfit("must have no '$' or '\\', which plots take for a formula")
    return text


def _count_as_text(text: str) -> str:
    if not _is_count(text):
        raise misfit("must be a whole number")
    return text


def _setting(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise misfit("must be a setting")
    return value


def _record(fields: Mapping[str, Any]) -> Any:
    """Return the type of a mapping whose values must be of these types where they are there."""
    optional: dict[str, Any] = {}
    for name, kind in fields.items():  # a field cannot have a name of BaseModel's, as 'schema' is
        optional[f"{name}_"] = (kind, Field(None, alias=name))
    return create_model("Record", __config__=ConfigDict(strict=True), **optional)


_Whole = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
_Number = Annotated[float, Field(strict=True)]  # NaN too, where a metric is undefined
_Line = Annotated[str, Field(strict=True), AfterValidator(_printable)]
_Label = Annotated[_Line, AfterValidator(_plain)]
_Metrics = dict[_Line, _Number]
_Round = Annotated[str, AfterValidator(_count_as_text)]

_SILO = _record(
    {
        "distribution": _Label,
        "sizes": dict[_Line, _Whole],
        "label_counts": dict[_Line, list[_Whole]],
        "fingerprints": dict[_Line, _Line],
        "dropped": _Whole,
        "schema": _Line,
        "classes": list[_Label],
        "backbone": _Line,
        "software": dict[_Line, _Line],
        "agreed": _Whole,
    }
)


def _consistent(silos: dict[str, Any]) -> dict[str, Any]:
    if not silos:
        raise misfit("must name a site")
    counts = [counts for silo in silos.values() for counts in (silo.label_counts_ or {}).values()]
    named = [silo.classes_ for silo in silos.values() if silo.classes_]
    if len({len(classes) for classes in (*counts, *(named if counts else ()))}) > 1:
        raise misfit("must have 'classes' and 'label_counts' of one number of classes")
    return silos


_FAILURE = _record({"round": _Whole, "phase": _Line, "site": _Line, "reason": _Line})
FIGURES = _record({"mean": list[_Number], "std": list[_Number]})
SILOS: Any = Annotated[GenericAlias(dict, (SiteName, _SILO)), AfterValidator(_consistent)]
SUMMARY = _record(
    {
        "method": _Label,
        "title": _Label,
        "dataset": _Label,
        "seed": _Whole,
        "rounds": _Whole,
        "aggregation": _Label,
        "sites": dict[SiteName, _Metrics],
        "mean": _Metrics,
        "distributions": dict[_Label, _Metrics],
        "validation": _record({"mean": _Metrics, "distributions": dict[_Label, _Metrics]}),
        "published": dict[_Line, _Metrics] | None,
        "stopped": _Line | None,
        "best": _record({"round": _Whole, "metric": _Line, "value": _Number, "model": bool}),
        "marks": dict[_Round, _Label],
        "failures": GenericAlias(list, (_FAILURE,)),
        "seconds": _record({"total": _Number, "rounds": _Number, "sites": _Metrics}),
        "peak-memory-bytes": _Metrics,
        "unrepeatable-operations": list[_Line],
        "bytes": _record({"down": _Whole, "up": _Whole}),
        "privacy": _record({"leaves each site": list[_Line], "bytes up": _Whole}),
    }
)
STATE = _record(  # of a checkpoint or model file, in its metadata
    {
        "round": _Whole,
        "extras": dict[str, Any],
        "keepers": dict[SiteName, _Whole],
        "settings": dict[_Line, Annotated[Any, BeforeValidator(_setting)]],
        "hooks": dict[str, Any],
        "figures": FIGURES,
    }
)
FORMS = {"silos.json": SILOS, "summary.json": SUMMARY, "standardisation.json": FIGURES}
