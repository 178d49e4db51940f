"""Reading a table's schema from YAML; every mistake is told with the file and the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from datasets.io.text_files import read_text, same_text
from datasets.tables.parsing import KINDS, Column, TableSchema
from models.contract.errors import DataError

_KEYS = (
    "columns",
    "label",
    "missing",
    "policy",
    "header",
    "delimiter",
    "sites",
    "test-share",
    "split-seed",
)
_COLUMN_KEYS = ("name", "kind", "levels", "mean", "std")


def read_schema(path: Path) -> TableSchema:
    """Return the schema in a YAML file; docs/tables.md shows one.

    Raises:
        DataError: the file is missing, no YAML, or a key is unknown, missing or of a wrong kind.
    """
    return Reading(str(path)).schema(read_yaml(path))


def read_yaml(path: Path) -> Any:
    """Return a YAML file's content.

    Raises:
        DataError: the file is missing or no YAML.
    """
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise DataError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None


class Reading:
    """The reading of one YAML file, named ``where`` in errors; each method returns what it checked.

    Each raises a ``DataError`` for what cannot be.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, what: str) -> DataError:
        """Return the error for what is wrong in the file."""
        return DataError(f"{self.where}: {what}")

    def schema(self, content: Any) -> TableSchema:
        """Return a table's schema."""
        found = self.mapping(content, "the schema", _KEYS, ("columns", "label", "sites"))
        label = self.mapping(found["label"], "'label'", ("column", "classes"))
        columns = tuple(self.column(one) for one in self.list_of(found["columns"], "columns"))
        names = [column.name for column in columns]
        name, marks = str(label["column"]), found.get("missing", ["", "?"])
        if len({*names, name}) != len(names) + 1:
            raise self.fail("two columns have one name, or the label stands among 'columns'")
        schema = TableSchema(
            columns=columns,
            label=name,
            classes=self.classes(label["classes"]),
            missing=tuple(self.text(mark, "missing") for mark in self.list_of(marks, "missing")),
            policy=self.one_of(found.get("policy", "drop"), "policy", ("drop", "impute")),
            header=self.one_of(found.get("header", True), "header", (True, False)),
            delimiter=str(found.get("delimiter", ",")),
            sites=self.sites(found["sites"]),
            test_share=self.number(found.get("test-share", 0.34), "test-share", 0.0, 0.9),
            split_seed=self.whole(found.get("split-seed", 43), "split-seed"),
        )
        if not schema.features():
            raise self.fail("no column is 'numeric' or 'categorical'")
        if len(schema.delimiter) != 1:
            raise self.fail(f"'delimiter' is {schema.delimiter!r}; it must be one character")
        return schema

    def column(self, content: Any) -> Column:
        """Return a column."""
        found = self.mapping(content, "a column", _COLUMN_KEYS, ("name",))
        name = str(found["name"])
        kind = self.one_of(found.get("kind", "numeric"), f"kind of '{name}'", KINDS)
        raw = self.list_of(found.get("levels", []), f"levels of '{name}'")
        levels = tuple(same_text(self.text(level, f"levels of '{name}'")) for level in raw)
        if (kind == "categorical") != bool(levels) or len(set(levels)) != len(levels):
            raise self.fail(
                f"column '{name}' is {kind} with levels {list(levels)}; a categorical column, and "
                "no other, lists its levels, each once"
            )
        if len(levels) == 1:
            raise self.fail(f"column '{name}' has one level only: declare it as 'ignored'")
        mean, std = found.get("mean"), found.get("std")
        if (mean is None) != (std is None):
            raise self.fail(f"column '{name}' declares one of 'mean' and 'std'; give both or none")
        if mean is None:
            return Column(name, kind, levels)
        return Column(
            name,
            kind,
            levels,
            self.number(mean, f"mean of '{name}'", -1e300, 1e300),
            self.number(std, f"std of '{name}'", 1e-12, 1e300),
        )

    def classes(self, content: Any) -> dict[str, tuple[str, ...]]:
        """Return each class's label values by its name, in order."""
        if not isinstance(content, dict) or len(content) < 2:
            raise self.fail("'classes' must map at least two class names to lists of label values")
        found = {
            self.text(name, "classes"): tuple(
                same_text(self.text(v, f"class '{name}'"))
                for v in self.list_of(values, f"class '{name}'")
            )
            for name, values in content.items()
        }
        values = [value for listed in found.values() for value in listed]
        if len(set(values)) != len(values) or not all(found.values()):
            raise self.fail("under 'classes' each label value must stand once, each class have one")
        return found

    def sites(self, content: Any) -> dict[str, str]:
        """Return each site's file by its name, in order."""
        if not isinstance(content, dict) or not content:
            raise self.fail("'sites' must map each site's name to its CSV file")
        for name in content:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", str(name)) or name == "all":
                raise self.fail(
                    f"site '{name}' is no plain name of letters, digits, '.', '_' and '-', or is "
                    "'all', which stands for the mean over sites"
                )
        return {self.text(n, "sites"): self.text(file, "sites") for n, file in content.items()}

    def mapping(
        self, content: Any, what: str, keys: tuple[str, ...], needed: tuple[str, ...] | None = None
    ) -> Mapping[str, Any]:
        """Check that it is a mapping of known keys, with the needed ones (all)."""
        if not isinstance(content, dict):
            raise self.fail(f"{what} must be a mapping with the keys {', '.join(keys)}")
        for key in content:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else f"; allowed: {', '.join(keys)}"
                raise self.fail(f"{what} has the unknown key '{key}'{hint}")
        for key in needed or keys:
            if key not in content:
                raise self.fail(f"{what} lacks the key '{key}'")
        return content

    def text(self, value: Any, what: str) -> str:
        """Return a scalar as text, unless YAML made something else of it."""
        if isinstance(value, bool) or value is None or isinstance(value, list | dict):
            raise self.fail(
                f"'{what}' has {value!r}, which YAML makes of words such as yes, no and null: "
                "write it in quotes"
            )
        return str(value)

    def whole(self, value: Any, what: str) -> int:
        """Check a whole number."""
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise self.fail(f"'{what}' is {value!r}; it must be a whole number from 0 to 2^32 - 1")
        return value

    def list_of(self, content: Any, what: str) -> list[Any]:
        """Check a list."""
        if not isinstance(content, list):
            raise self.fail(f"'{what}' is {content!r}; it must be a list")
        return content

    def one_of(self, value: Any, what: str, allowed: tuple[Any, ...]) -> Any:
        """Check one of some values."""
        if value not in allowed:
            raise self.fail(f"'{what}' is {value!r}; it must be one of {list(allowed)}")
        return value

    def number(self, value: Any, what: str, least: float, most: float) -> float:
        """Return a number of a range as float."""
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not least <= value <= most:
            raise self.fail(f"'{what}' is {value!r}; it must be a number from {least} to {most}")
        return float(value)
