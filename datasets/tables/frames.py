"""Frames of pandas as hospitals' tables: a CSV file each, and the schema that all of them share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import DataError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.declarations import check_content
from fedsilo.core.files.text_files import same_text
from fedsilo.core.one_line import one_line
from fedsilo.datasets.tables.parsing import parse_table
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_data_set import SCHEMA_FILE

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_MOST_LEVELS = 64  # most different texts in a column; more are names or free text
_MOST_CLASSES = 1000
_MISSING = ("", "?")
_NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal")  # pandas' words for objects


def write_frames(
    folder: Path, frames: Mapping[str, DataFrame], label: str, policy: str = "drop"
) -> None:
    """Write ``schema.yaml`` and a CSV file for each site into ``folder``.

    Numbers and booleans are numeric columns; texts are categorical ones, whose levels are those of
    all sites together. A column with one value at all sites is ignored. Each value of the column
    ``label`` is a class, and ``policy``, 'drop' or 'impute', is what becomes of rows with a missing
    value.

    Raises:
        DataError: columns differ between sites, the label's is missing, a column is of dates or of
            too many texts, or there is one class.
    """
    import pandas as pd

    named = {site: _plain(frame) for site, frame in frames.items()}
    columns = _common_columns({site: list(one.columns) for site, one in named.items()}, label)
    classes = _classes(label, pd.concat([frame[label] for frame in named.values()]))
    schema = {
        "columns": [
            _column(name, {site: frame[name] for site, frame in named.items()})
            for name in columns
            if name != label
        ],
        "label": {"column": label, "classes": {one: [one] for one in classes}},
        "missing": list(_MISSING),
        "policy": policy,
        "sites": {site: f"{site}.csv" for site in named},
    }
    write_atomically(folder / SCHEMA_FILE, json.dumps(schema, ensure_ascii=False))
    read: TableSchema = check_content(TableSchema, schema, DataError)
    for site, frame in named.items():
        text = frame[columns].to_csv(index=False)
        parse_table(text, read, f"silo '{site}'")  # refused here, before a run begins
        write_atomically(folder / f"{site}.csv", text, 0o600)


def _plain(frame: DataFrame) -> DataFrame:
    """Return the frame with texts as names, and booleans and objects of numbers as numbers.

    Both may have gaps.
    """
    import pandas as pd

    frame = frame.set_axis([str(name).strip() for name in frame.columns], axis=1)
    for place in range(frame.shape[1]):
        values = frame.iloc[:, place]
        kind = pd.api.types.infer_dtype(values)
        if kind == "boolean":
            frame.isetitem(place, values.astype("boolean").astype("Int8").array)
        elif values.dtype == object and kind in _NUMBERS:
            frame.isetitem(place, pd.to_numeric(values, dtype_backend="numpy_nullable").array)
    return frame


def _common_columns(columns: Mapping[str, list[str]], label: str) -> list[str]:
    """Return the columns that all sites have."""
    first, *others = columns
    for site, own in columns.items():
        if len(set(own)) < len(own):
            raise DataError(f"silo '{site}' has two columns of one name: rename one")
        if label not in own:
            shown = one_line(", ".join(own), 200)
            raise DataError(
                f"silo '{site}' has no column '{label}' of labels, but {shown}: name it by label="
            )
    for site in others:
        if odd := sorted(set(columns[site]) ^ set(columns[first])):
            raise DataError(
                f"silos '{first}' and '{site}' have other columns: only one of them has "
                f"'{one_line(odd[0], 60)}'; give all the same"
            )
    return columns[first]


def _column(name: str, sites: Mapping[str, Series[Any]]) -> dict[str, Any]:
    """Return a column as the schema declares it, by its values at all sites."""
    import pandas as pd

    kinds = {_kind(name, own): site for site, own in sites.items() if own.notna().any()}
    if len(kinds) > 1:
        raise DataError(
            f"column '{one_line(name, 60)}' holds numbers at silo '{kinds['numbers']}' and texts "
            f"at '{kinds['texts']}': give all the same"
        )
    if "texts" not in kinds:
        return {"name": name}
    levels = _texts(name, pd.concat(sites.values()))
    if len(levels) > _MOST_LEVELS:
        raise DataError(
            f"column '{one_line(name, 60)}' has {len(levels)} different texts, more than "
            f"{_MOST_LEVELS}: drop it if it is a name or free text, or group them"
        )
    if len(levels) < 2:
        return {"name": name, "kind": "ignored"}
    return {"name": name, "kind": "categorical", "levels": levels}


def _kind(name: str, values: Series[Any]) -> str:
    from pandas.api import types

    if types.is_numeric_dtype(values) and not types.is_complex_dtype(values):
        return "numbers"
    texts = types.is_object_dtype(values) or types.is_string_dtype(values)
    if texts or str(values.dtype) == "category":
        return "texts"
    raise DataError(
        f"column '{one_line(name, 60)}' is of type {values.dtype}: make numbers of it, or drop it"
    )


def _texts(name: str, values: Series[Any]) -> list[str]:
    """Return the different values as texts in one form, numbers in their order."""
    found = {same_text(text) for text in values.dropna().map(str).unique()} - set(_MISSING)
    if not all(map(str.isprintable, found)):
        raise DataError(
            f"column '{one_line(name, 60)}' has a text that is not one printable line: clean it"
        )
    try:
        return sorted(found, key=float)
    except ValueError:
        return sorted(found)


def _classes(label: str, values: Series[Any]) -> list[str]:
    classes = _texts(label, values)
    if not 2 <= len(classes) <= _MOST_CLASSES:
        raise DataError(
            f"column '{one_line(label, 60)}' of labels has {len(classes)} different values: a "
            f"classifier needs 2 to {_MOST_CLASSES} classes"
        )
    return classes
