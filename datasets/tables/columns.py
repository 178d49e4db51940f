"""A table's columns as a survey counts them: numbers with declared edges, categories by levels."""

from __future__ import annotations

import numpy as np

from fedsilo.datasets.silo.measures import Measure, Values
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.tables.parsing import Column, TableSchema


def column_measures(schema: TableSchema, silo: Silo) -> list[Measure]:
    """Return the columns of a silo that are read, in the schema's order."""
    inputs = {
        split: np.asarray(rows.inputs.numpy(), dtype=np.float64)
        for split, rows in silo.splits().items()
    }
    places = {name: place for place, name in enumerate(schema.features())}
    measures, may_lack = [], schema.policy != "drop"
    for column in schema.columns:
        if column.kind == "numeric":
            values = {split: rows[:, places[column.name]] for split, rows in inputs.items()}
            measures.append(Measure(column.name, values, column.survey_edges(), may_lack=may_lack))
        elif column.kind == "categorical":
            named = [places[f"{column.name}={level}"] for level in column.levels[1:]]
            levels = {split: _levels(rows[:, named], column) for split, rows in inputs.items()}
            measures.append(Measure(column.name, levels, levels=column.levels, may_lack=may_lack))
    return measures


def _levels(one_hot: Values, column: Column) -> Values:
    """Return the place of each row's level, (n,): the first has no feature of its own."""
    return one_hot @ np.arange(1, len(column.levels), dtype=np.float64)
