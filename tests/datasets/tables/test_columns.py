"""A table's columns and left-out rows, as a survey counts them."""

import pytest
import torch

from fedsilo.core.files.locations import find_places
from fedsilo.core.files.text_files import csv_lines
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.datasets.silo.measures import LeftOutRows
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.datasets.tables.parsing import parse_table
from fedsilo.datasets.tables.schema import Column, TableSchema
from fedsilo.datasets.tables.table_data_set import column_measures
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.settings import resolve

SCHEMA = TableSchema.model_validate(
    {
        "columns": [
            {"name": "age", "edges": [40.0]},
            {"name": "ward", "kind": "categorical", "levels": ["a", "b", "c"]},
            {"name": "dose", "mean": 10.0, "std": 2.0},
            {"name": "weight"},
            {"name": "note", "kind": "ignored"},
        ],
        "label": {"column": "ill", "classes": {"no": [0], "yes": [1]}},
        "sites": {"north": "north.csv"},
    }
)
TEXT = (
    "age,ward,dose,weight,note,ill\n"
    "30,a,4,60,?,0\n"
    "50,c,10,70,x,1\n"
    "?,b,11,80,x,1\n"
    "60,?,?,90,x,1\n"
    "70,b,12,50,x,?\n"
)


def _silo(schema: TableSchema) -> Silo:
    table = parse_table(csv_lines(TEXT, "here"), schema, "here")
    rows = Split(torch.from_numpy(table.rows), torch.from_numpy(table.labels))
    none = Split(rows.inputs[:0], rows.labels[:0])
    task = NetworkShape((len(schema.features()),), 2)
    return Silo("here", "here", task, rows, none, none, {}, features=schema.features())


def test_columns_are_counted_as_declared() -> None:
    measures = {measure.name: measure for measure in column_measures(SCHEMA, _silo(SCHEMA))}
    assert list(measures) == ["age", "ward", "dose", "weight"]
    assert measures["age"].counts("train") == [1, 1]
    assert measures["ward"].counts("train") == [1, 0, 1]
    assert measures["dose"].edges == (4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0)
    assert measures["dose"].counts("train") == [0, 1, 0, 0, 1, 0, 0, 0]
    assert not measures["weight"].has_histogram


def test_imputed_rows_count_as_without_a_value() -> None:
    schema = SCHEMA.model_copy(update={"policy": "impute"})
    measures = {measure.name: measure for measure in column_measures(schema, _silo(schema))}
    assert measures["age"].counts("train") == [1, 2, 1]
    assert measures["ward"].counts("train") == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("policy", "count", "missing"),
    [
        ("drop", 3, {"age": 1, "ward": 1, "dose": 1, "weight": 0, "ill": 1}),
        ("impute", 1, {"age": 0, "ward": 0, "dose": 0, "weight": 0, "ill": 1}),
    ],
)
def test_left_out_rows_are_those_that_are_dropped(
    policy: str, count: int, missing: dict[str, int]
) -> None:
    schema = SCHEMA.model_copy(update={"policy": policy})
    assert parse_table(csv_lines(TEXT, "here"), schema, "here").left_out == LeftOutRows(
        count, missing
    )


def test_edges_are_no_part_of_what_a_model_must_have_alike() -> None:
    bare = SCHEMA.model_copy(update={"columns": [Column(name="age"), *SCHEMA.columns[1:]]})
    assert bare.digest() == SCHEMA.digest()


@pytest.mark.parametrize("name", ["heart-synthetic", "digits", "dermoscopy-phantom"])
def test_every_sample_of_a_silo_is_in_one_cell(name: str) -> None:
    small = {"data.image-size": 16, "split.sample-share": 0.05} if "phantom" in name else {}
    settings = resolve({"dataset": name, **small})
    places = find_places("", settings.common.cache_dir)
    silo = load_silo(silo_names(settings.common)[0], settings.common)
    measures = data_set(name).measures(silo, settings.common, places)
    assert measures
    for measure in measures:
        assert measure.has_histogram
        for split, rows in silo.splits().items():
            assert sum(measure.counts(split)) == len(rows)
