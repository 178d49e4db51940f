"""A table's schema in YAML, as models. Imported when a file is read.

Errors name the file and the key, and never a value.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from fedsilo.datasets.io.declarations import FileModel, Text, fault, misfit, number, whole
from fedsilo.datasets.io.text_files import same_text
from fedsilo.datasets.silo.declared_silos import ClassLists, Sites, one_class_each, read_declared
from fedsilo.datasets.tables.parsing import Column, TableSchema

_MOST_EDGES = 64


def _one_character(text: str) -> str:
    if len(text) != 1:
        raise misfit("must be one character")
    return text


class ColumnModel(FileModel):
    """A column, as the file has it."""

    model_config = ConfigDict(title="a column")

    name: Text
    kind: Literal["numeric", "categorical", "ignored"] = "numeric"
    levels: list[Text] = Field(default_factory=list)
    mean: Annotated[float, number(-1e300, 1e300)] | None = None
    std: Annotated[float, number(1e-12, 1e300)] | None = None
    edges: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> ColumnModel:
        levels = self.forms()
        if (self.kind == "categorical") != bool(levels) or len(set(levels)) != len(levels):
            raise fault(
                f"column '{self.name}' is {self.kind} with {len(levels)} levels, of which "
                f"{len(set(levels))} differ; a categorical column, and no other, lists its "
                "levels, each once"
            )
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
        return self

    def forms(self) -> tuple[str, ...]:
        """Return the levels, each in one form."""
        return tuple(same_text(level) for level in self.levels)


class LabelModel(FileModel):
    """The label's column, and the values that mean each class."""

    model_config = ConfigDict(title="'label'")

    column: Text
    classes: ClassLists

    @model_validator(mode="after")
    def _consistent(self) -> LabelModel:
        one_class_each(self.classes)
        return self


class SchemaModel(FileModel):
    """A table's schema, as the file has it."""

    model_config = ConfigDict(title="the schema")

    columns: list[ColumnModel]
    label: LabelModel
    missing: list[Text] = Field(default_factory=lambda: ["", "?"])
    policy: Literal["drop", "impute"] = "drop"
    header: bool = True
    delimiter: Annotated[Text, AfterValidator(_one_character)] = ","
    sites: Sites
    test_share: Annotated[float, number(0.0, 0.9)] = 0.34
    split_seed: Annotated[int, whole(0, 2**32 - 1, "2^32 - 1")] = 43

    @model_validator(mode="after")
    def _consistent(self) -> SchemaModel:
        names = [column.name for column in self.columns]
        if len({*names, self.label.column}) != len(names) + 1:
            raise fault("two columns have one name, or the label stands among 'columns'")
        if all(column.kind == "ignored" for column in self.columns):
            raise fault("no column is 'numeric' or 'categorical'")
        return self


def read_schema(path: Path) -> TableSchema:
    """Return the schema in a YAML file; docs/tables.md shows one.

    Raises:
        DataError: the file is missing, no YAML, or a key is unknown, missing or of a wrong kind.
    """
    schema = read_declared(path, SchemaModel)
    return TableSchema(
        columns=tuple(
            Column(one.name, one.kind, one.forms(), one.mean, one.std, tuple(one.edges))
            for one in schema.columns
        ),
        label=schema.label.column,
        classes=one_class_each(schema.label.classes),
        missing=tuple(schema.missing),
        policy=schema.policy,
        header=schema.header,
        delimiter=schema.delimiter,
        sites=schema.sites,
        test_share=schema.test_share,
        split_seed=schema.split_seed,
    )
