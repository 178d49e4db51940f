"""Write hospitals' pandas frames as tables: a CSV file per site, and one schema for all."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import DataError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.declarations import check_content
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.files.text_files import csv_lines, same_text
from fedsilo.core.one_line import one_line
from fedsilo.datasets.tables.parsing import parse_table
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_data_set import SCHEMA_FILE

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_MOST_LEVELS = 64  # most distinct texts in a column; more are probably names or free text
_MOST_CLASSES = 1000
_FEW_LEVELS = 10  # a column with more numeric levels is probably a numeric column
# How other programs write a missing value; pandas reads files with some of them as texts
_WORDS_FOR_MISSING = frozenset({"nan", "na", "n/a", "<na>", "."})
_MISSING = ("", "?")
_NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal")  # pandas' words for objects


def write_frames(
    folder: Path, frames: Mapping[str, DataFrame], label: str, policy: str = "drop"
) -> None:
    """Infer one schema from the sites' tables, and write it and a CSV file per site.

    The file ``schema.yaml`` describes the tables for the data set 'table'. Columns of numbers or
    booleans become numeric. Columns of strings become categorical, with the strings of all sites as
    levels. A column with one string at all sites together is ignored. Each value in column
    ``label`` becomes a class. Nothing is written after a ``DataError``.

    Args:
        folder: an existing folder.
        frames: site -> its table.
        label: the name of the label's column.
        policy: the schema's rule for rows that lack a value: 'drop' the row or 'impute' the value.

    Raises:
        DataError: in one of these cases:

            - Columns differ between sites, or the label's column is missing.
            - A column has numbers at one site and strings at another, or has another type, such as
              dates.
            - A column has more than 64 distinct strings.
            - There are not 2 to 1000 classes.
            - A table does not fit the schema.
        OSError: a file cannot be written.
    """
    import pandas as pd

    plain = {site: _plain(frame) for site, frame in frames.items()}
    names = _common_columns({site: list(frame.columns) for site, frame in plain.items()}, label)
    columns = []
    for name in names:
        if name != label:
            columns.append(_column(name, {site: frame[name] for site, frame in plain.items()}))
    classes = _classes(label, pd.concat([frame[label] for frame in plain.values()]))
    content = {
        "columns": columns,
        "label": {"column": label, "classes": {text: [text] for text in classes}},
        "missing": list(_MISSING),
        "policy": policy,
        "sites": {site: f"{folder_name(site)}.csv" for site in plain},
    }
    schema: TableSchema = check_content(TableSchema, content, DataError)
    texts: dict[str, str] = {}
    for site, frame in plain.items():
        texts[site] = frame[names].to_csv(index=False)
        where = f"silo '{site}'"
        parse_table(csv_lines(texts[site], where), schema, where)  # refused before a run begins
    write_atomically(folder / SCHEMA_FILE, json.dumps(content, ensure_ascii=False))
    for site, text in texts.items():
        write_atomically(folder / f"{folder_name(site)}.csv", text, 0o600)


def _plain(frame: DataFrame) -> DataFrame:
    """Return a copy of a table with simpler column types, and with its column names as strings.

    Spaces at both ends of the names are removed. Booleans become 0 and 1. A column of Python
    objects becomes numeric if all its values are numbers. All other columns keep their types, and
    missing values stay missing.
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
    """Check that all sites have the same columns, in any order, and return their names.

    Args:
        columns: site -> names of its columns.
        label: the label's column, which each site must have.

    Returns:
        The names in the first site's order.

    Raises:
        DataError: a site has two columns of the same name, lacks the label, or has another set of
            columns than the first site.
    """
    first = next(iter(columns))
    for site, names in columns.items():
        if len(set(names)) < len(names):
            raise DataError(f"silo '{site}' has two columns with one name: rename one")
        if label not in names:
            shown = one_line(", ".join(names), 200)
            raise DataError(
                f"silo '{site}' has no column '{label}' of labels, but {shown}: name it by label="
            )
    for site, names in columns.items():
        odd = sorted(set(names).symmetric_difference(columns[first]))
        if odd:
            raise DataError(
                f"only one of the silos '{first}' and '{site}' has the column "
                f"'{one_line(odd[0], 60)}': give all silos the same columns"
            )
    return columns[first]


def _column(name: str, sites: Mapping[str, Series[Any]]) -> dict[str, Any]:
    """Infer the schema's description of one column from the column's values at all sites.

    Returns:
        The keys and values of a ``Column``:

        - Only 'name', which makes the column numeric, if it has numbers or no values.
        - 'name', 'kind' ('categorical') and 'levels' if it has at least two distinct strings.
          Levels are sorted by value if all are numbers, and otherwise alphabetically.
        - 'name' and 'kind' ('ignored') if it has fewer distinct strings. '' and '?' mark missing
          values, and do not count.

    Raises:
        DataError: in one of these cases:

            - One site has numbers and another has strings.
            - The column has another type, such as dates.
            - There are more than 64 distinct strings.
            - A string cannot be printed on one line.
    """
    import pandas as pd

    kinds = {}
    for site, values in sites.items():
        if values.notna().any():
            kinds[_kind(name, values)] = site
    if len(kinds) > 1:
        raise DataError(
            f"column '{one_line(name, 60)}' has numbers at silo '{kinds['numbers']}', but texts "
            f"at '{kinds['texts']}': give all silos the same kind"
        )
    if "texts" not in kinds:
        return {"name": name}
    levels = _texts(name, pd.concat(sites.values()))
    if len(levels) > _MOST_LEVELS:
        raise DataError(
            f"column '{one_line(name, 60)}' has {len(levels)} different texts, more than "
            f"{_MOST_LEVELS}: drop it if it is a name or free text, group them, or, if they are "
            "numbers, convert them by pandas.to_numeric"
        )
    # A column with a single text distinguishes no rows
    if len(levels) < 2:
        return {"name": name, "kind": "ignored"}
    return {"name": name, "kind": "categorical", "levels": levels}


def _kind(name: str, values: Series[Any]) -> str:
    """Return 'numbers' or 'texts' for a column at one site, according to the column's type.

    Booleans are numbers. Strings, categories and Python objects are texts. ``values`` is the
    column, and ``name`` its name, for the error.

    Raises:
        DataError: the column has any other type, such as dates or complex numbers.
    """
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
    """Return a column's distinct values as normalised strings, without missing values.

    ``same_text`` normalises the strings, so that 1.0 and 1 both become '1'. '' and '?' count as
    missing. If all strings are numbers, they are sorted by value, otherwise alphabetically. A
    warning is logged for strings that may be mistakes, such as 'Yes' beside 'yes'.

    Raises:
        DataError: a string has a line break or an unprintable character.
    """
    # The same form as when the file is read: 1.0 and 1 are one level
    texts = set(map(same_text, values.dropna().map(str).unique()))
    texts.difference_update(_MISSING)
    if not all(map(str.isprintable, texts)):
        raise DataError(
            f"column '{one_line(name, 60)}' has a text that is not one printable line: clean it"
        )
    _mention_odd_texts(name, texts)
    if _are_numbers(texts):
        return sorted(texts, key=float)
    return sorted(texts)


def _are_numbers(texts: Iterable[str]) -> bool:
    try:
        list(map(float, texts))
    except ValueError:
        return False
    return True


def _mention_odd_texts(name: str, texts: Collection[str]) -> None:
    """Log a warning if some strings of a column are probably not meant as separate levels.

    The warning has a remark for each of these findings:

    - Two strings differ only by upper and lower case.
    - A string is a word for a missing value, such as 'nan' or 'N/A'.
    - There are more than 10 strings and all are numbers, so the column is probably numeric.

    The remarks together are cut to 300 characters. Without a finding nothing is logged.

    Args:
        name: the column's name.
        texts: the distinct strings of the column.
    """
    remarks = []
    by_case: dict[str, str] = {}
    for text in sorted(texts):
        first = by_case.setdefault(text.casefold(), text)
        if first != text:
            remarks.append(f"'{first}' and '{text}' differ only by case: write them alike")
        if text.casefold() in _WORDS_FOR_MISSING:
            remarks.append(f"'{text}' looks like a missing value: write None for it")
    if len(texts) > _FEW_LEVELS and _are_numbers(texts):
        remarks.append("numbers are stored as texts: convert them by pandas.to_numeric")
    if remarks:
        logging.getLogger("flwr").warning(
            "fedsilo: column '%s': %s; otherwise each text is a level of its own",
            one_line(name, 60),
            one_line("; ".join(remarks), 300),
        )


def _classes(label: str, values: Series[Any]) -> list[str]:
    """Return the distinct values in the label's column, which become the names of the classes.

    If all names are numbers, they are sorted by value, otherwise alphabetically. Rows whose label
    is missing, '' or '?' are ignored.

    Raises:
        DataError: a value is a word for a missing value, such as 'nan', or cannot be printed on one
            line. The error also occurs unless there are 2 to 1000 classes.
    """
    classes = _texts(label, values)
    odd = _WORDS_FOR_MISSING.intersection(map(str.casefold, classes))
    if odd:
        raise DataError(
            f"column '{one_line(label, 60)}' of labels has the text '{min(odd)}', which looks like "
            "a missing value: leave such rows out, or give the class another name"
        )
    if not 2 <= len(classes) <= _MOST_CLASSES:
        raise DataError(
            f"column '{one_line(label, 60)}' of labels has {len(classes)} different values, but a "
            f"classifier needs 2 to {_MOST_CLASSES} classes: name another column, or group values"
        )
    return classes
