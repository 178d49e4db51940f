"""The schema of a table, as its YAML file has it: typed columns, a label, marks of missing values.

A categorical column becomes one feature per level but the first (one-hot, first level dropped);
levels are declared, not found, so that all hospitals have the same features without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from fedsilo.core.files.declarations import FileModel, Text, fault, misfit, number, whole
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.files.text_files import Marks, same_text
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.silo.declared_silos import ClassLists, Sites, read_declared

_MOST_EDGES = 64


def _in_one_form(levels: list[str]) -> list[str]:
    return [same_text(level) for level in levels]


def _one_character(text: str) -> str:
    if len(text) != 1:
        raise misfit("must be one character")
    return text


class Column(FileModel):
    """A column: ``kind`` numeric, categorical or ignored; ``levels`` of a categorical one.

    ``mean`` and ``std`` standardise a numeric column, if they are declared. ``edges`` are those of
    its histogram in a survey; without them they follow from mean and standard deviation. ``range``
    is the lowest and highest value that is possible: ``fedsilo predict`` refuses any other.
    ``unmeasured`` lists values of a numeric column that mean "not measured": they are imputed,
    whatever the schema's policy. ``indicator`` adds a feature ``column=unmeasured``, which is 1
    where the value is imputed and else 0.
    """

    model_config = ConfigDict(title="a column")

    name: Text
    kind: Literal["numeric", "categorical", "ignored"] = "numeric"
    levels: Annotated[list[Text], AfterValidator(_in_one_form)] = Field(default_factory=list)
    mean: Annotated[float, number(-1e300, 1e300)] | None = None
    std: Annotated[float, number(1e-12, 1e300)] | None = None
    edges: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)
    range: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)
    unmeasured: Annotated[list[Text], AfterValidator(_in_one_form)] = Field(default_factory=list)
    indicator: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Column:
        levels = self.levels
        if (self.kind == "categorical") != bool(levels) or len(set(levels)) != len(levels):
            raise fault(
                f"column '{self.name}' is {self.kind} with {len(levels)} levels, of which "
                f"{len(set(levels))} differ; a categorical column, and no other, lists its "
                "levels, each once"
            )
        if "=" in self.name and self.kind != "ignored":
            raise fault(f"column '{self.name}' has '=' in its name, as levels do: rename it")
        if len(levels) == 1:
            raise fault(f"column '{self.name}' has one level only: declare it as 'ignored'")
        if (self.mean is None) != (self.std is None):
            raise fault(f"column '{self.name}' declares one of 'mean' and 'std'; give both or none")
        rising = all(low < high for low, high in pairwise(self.edges))
        if self.edges and (self.kind != "numeric" or not rising or len(self.edges) > _MOST_EDGES):
            raise fault(
                f"column '{self.name}' has 'edges', which must be up to {_MOST_EDGES} rising "
                "numbers of a numeric column"
            )
        pair = len(self.range) == 2 and self.range[0] < self.range[1]
        if self.range and (self.kind != "numeric" or not pair):
            raise fault(
                f"column '{self.name}' has a 'range', which must be the lowest and the highest "
                "possible value of a numeric column"
            )
        if self.kind != "numeric" and (self.unmeasured or self.indicator):
            raise fault(
                f"column '{self.name}' is {self.kind} and has 'unmeasured' or 'indicator', which "
                "are of numeric columns: name its mark under the schema's 'missing'"
            )
        return self

    def unmeasured_marks(self) -> Marks:
        """Return the values that mean that nothing was measured; '0.0' is the value 0."""
        return Marks(self.unmeasured)

    def survey_edges(self) -> tuple[float, ...]:
        """Return the edges of its histogram, or none if nothing declares them."""
        if self.edges or self.mean is None or self.std is None:
            return tuple(self.edges)
        return tuple(self.mean + step * self.std for step in range(-3, 4))


class Label(FileModel):
    """The label's column, without a header the last, and the values that mean each class."""

    model_config = ConfigDict(title="'label'")

    column: Text
    classes: ClassLists


class TableSchema(FileModel):
    """The form of every hospital's table.

    Attributes:
        columns: in file order where there is no header; without the label.
        label: the label's column and classes, in class order.
        missing: texts that mark a missing value.
        policy: ``drop`` rows with a missing value, or ``impute`` it by the pooled mean.
        header: whether the first line names the columns.
        delimiter: separates values.
        sites: site -> CSV file.
        test_share, split_seed: of the split where no folds are set.
    """

    model_config = ConfigDict(title="the schema")

    columns: list[Column]
    label: Label
    missing: list[Text] = Field(default_factory=lambda: ["", "?"])
    policy: Literal["drop", "impute"] = "drop"
    header: bool = True
    delimiter: Annotated[Text, AfterValidator(_one_character)] = ","
    sites: Sites
    test_share: Annotated[float, number(0.0, 0.9)] = 0.34
    split_seed: Annotated[int, whole(0, 2**32 - 1, "2^32 - 1")] = 43

    @model_validator(mode="after")
    def _consistent(self) -> TableSchema:
        names = [column.name for column in self.columns]
        if len({*names, self.label.column}) != len(names) + 1:
            raise fault("two columns have one name, or the label is among 'columns'")
        if all(column.kind == "ignored" for column in self.columns):
            raise fault("no column is 'numeric' or 'categorical'")
        for column in self.indicator_columns():
            if self.policy == "drop" and not column.unmeasured:
                raise fault(
                    f"column '{column.name}' has an 'indicator' that would always be 0: list the "
                    "values that mean 'not measured' under 'unmeasured', or set 'policy' to "
                    "'impute'"
                )
        return self

    @property
    def classes(self) -> Mapping[str, list[str]]:
        """Class name -> the label's values that mean it, in class order."""
        return self.label.classes

    def features(self) -> tuple[str, ...]:
        """Return the features' names: numeric columns, ``column=level``, ``column=unmeasured``."""
        numbers = [column.name for column in self.columns if column.kind == "numeric"]
        levels = [f"{one.name}={level}" for one in self.columns for level in one.levels[1:]]
        return (*numbers, *levels, *(f"{one.name}=unmeasured" for one in self.indicator_columns()))

    def indicator_columns(self) -> list[Column]:
        """Return the columns with an indicator, a feature that is 1 where the value is imputed."""
        return [column for column in self.columns if column.indicator]

    def used_columns(self) -> list[str]:
        """Return the names of the columns that become features."""
        return [column.name for column in self.columns if column.kind != "ignored"]

    def digest(self) -> str:
        """Return a SHA-256 of all that must be the same at every site for one model to fit all."""
        facts = [
            [[c.name, c.kind, c.levels, c.mean, c.std] for c in self.columns],
            [self.label.column, [[name, sorted(values)] for name, values in self.classes.items()]],
            [sorted(same_text(mark) for mark in self.missing), self.policy],
        ]
        marked = [[c.name, sorted(c.unmeasured), c.indicator] for c in self.columns]
        if declared := [mark for mark in marked if mark[1:] != [[], False]]:
            facts.append(declared)  # other schemas keep the digest that they had
        return json_digest(facts)

    def missing_marks(self) -> Marks:
        """Return the texts that mark a missing value; '-9.0' is the mark '-9'."""
        return Marks(self.missing)

    def declared_statistics(self) -> FeatureStatistics | None:
        """Return the declared mean and standard deviation; None if a numeric column has none.

        One-hot features are shifted by an equal share of each level, which a missing one gets; an
        indicator becomes -1 or 1.
        """
        numeric = [column for column in self.columns if column.kind == "numeric"]
        pairs = [(c.mean, c.std) for c in numeric if c.mean is not None and c.std is not None]
        if len(pairs) < len(numeric):
            return None
        for column in self.columns:  # a first level has no feature: all of the others are 0 there
            pairs += [(1 / len(column.levels), 1.0) for _ in column.levels[1:]]
        pairs += [(0.5, 0.5) for _ in self.indicator_columns()]
        return FeatureStatistics(
            np.array([mean for mean, _ in pairs]), np.array([std for _, std in pairs])
        )

    def key(self) -> dict[str, Any]:
        """Return all that it says, which decides a cached silo's content."""
        said = self.model_dump()
        columns, label = said.pop("columns"), said.pop("label")
        for column in columns:  # columns without these keep the key that they had
            for name in ("unmeasured", "indicator"):
                if not column[name]:
                    del column[name]
        return {"columns": columns, "label": label["column"], "classes": label["classes"], **said}


def read_schema(path: Path) -> TableSchema:
    """Return the schema in a YAML file; docs/tables.md shows one.

    Raises:
        DataError: the file is missing, no YAML, or a key is unknown, missing or of a wrong kind.
    """
    return read_declared(path, TableSchema)
