import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import DataError, SettingError
from fedsilo.datasets.tables.new_rows import NewRows, parse_new_rows
from fedsilo.datasets.tables.schema import Column, TableSchema, read_schema
from fedsilo.datasets.tables.table_files import read_table
from tests.datasets.tables.test_parsing import BARE, HEADER, SCHEMA
from tests.support.errors import refuses

RANGED = SCHEMA.model_copy(
    update={
        "columns": [
            c.model_copy(update={"range": [0.0, 120.0]}) if c.name in ("age", "pulse") else c
            for c in SCHEMA.columns
        ]
    }
)
HEART = read_schema(Path(__file__).parents[3] / "datasets" / "tables" / "heart.yaml")


def parse(text: str, schema: TableSchema = SCHEMA, id_column: str | None = None) -> NewRows:
    lines = [(n, line.split(",")) for n, line in enumerate(text.splitlines(), 1) if line]
    return parse_new_rows(lines, schema, "new.csv", id_column)


def test_columns_are_found_by_name_in_any_order_and_case_with_or_without_the_label() -> None:
    for text in (
        "age,sex,sick,stage,pulse,note\n50,m,9,3,70.5,x\n\n-4,f,,1,1e2,\n",
        "Age,SEX,stage,pulse\n50,m,3,70.5\n\n-4,f,1,1e2\n",
    ):
        new = parse(text)
        assert new.rows.tolist() == [[50.0, 70.5, 1.0, 0.0, 1.0], [-4.0, 100.0, 0.0, 0.0, 0.0]]
        assert (new.lines, new.faults, new.unread) == ((2, 4), {}, 0)


def test_a_schema_without_a_header_takes_files_with_and_without_one() -> None:
    for text in ("m,50,x,3,70\n", "m,50,x,3,70,2\n", "pulse,age,stage,sex\n70,50,3,m\n"):
        assert parse(text, BARE).rows.tolist() == [[50.0, 70.0, 1.0, 0.0, 1.0]]


def test_both_columns_of_a_survival_label_may_be_absent_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(
        "header: false\ncolumns: [{name: age}, {name: dose}]\nsites: {a: a.csv}\n"
        "label: {column: died, task: survival, time: days, classes: {alive: [0], dead: [1]}}\n"
    )
    schema = read_schema(tmp_path / "schema.yaml")
    for text in ("50,3\n61,4\n", "50,3,100,1\n61,4,9,0\n"):
        new = parse(text, schema)
        assert (new.rows.tolist(), new.faults) == ([[50.0, 3.0], [61.0, 4.0]], {})


def test_ids_are_of_the_named_column_and_other_columns_are_counted() -> None:
    text = "room,Patient,age,sex,stage,pulse\n1,A7,50,m,3,70\n2,,old,m,3,70\n"
    new = parse(text, id_column="Patient")
    assert new.ids == {2: "A7", 3: ""}
    assert new.unread == 1
    with refuses(DataError, "patient"):
        parse(text, id_column="patient")


def test_a_bad_row_is_a_fault_and_costs_no_other_row() -> None:
    rows = ["m,50,x,3,70,2"] * 1000
    rows[4], rows[500], rows[998] = "m,old,x,3,70,2", "m,50,x,4,70,2", "m,50,x"
    new = parse(HEADER + "\n".join(rows))
    assert len(new.rows) == 997
    assert list(new.faults) == [6, 502, 1000]
    assert new.faults[6].startswith("column 'age': this is not a number")
    assert new.faults[502].startswith("column 'stage': this is not one of the declared levels")
    assert new.faults[1000].startswith("the line has 3 values, but the schema has 6 columns")


def test_every_impossible_value_is_named_with_the_range() -> None:
    new = parse(HEADER + "m,250,x,3,9999,2\nm,0,x,3,120,2\n", RANGED)
    assert new.faults == {
        2: "column 'age': 250 is impossible, because the schema's range is 0 to 120; "
        "column 'pulse': 9999 is impossible, because the schema's range is 0 to 120"
    }
    assert new.lines == (3,)


def test_an_empty_cell_is_missing_whatever_the_schemas_marks_are() -> None:
    schema = SCHEMA.model_copy(update={"missing": ["NA"]})
    text = HEADER + "m,,x,NA,70,0\nf,40,,1,80,0\n"
    assert parse(text, schema).faults == {
        2: "has no value of age, stage, but the schema drops such rows"
    }
    imputed = parse(text, schema.model_copy(update={"policy": "impute"}))
    assert np.isnan(imputed.rows[0]).tolist() == [True, False, False, True, True]
    assert imputed.lines == (2, 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the first line lacks the columns 'sex', 'age', 'stage', 'pulse'"),
        ("age,sex,stage\n1,f,1\n", "the first line lacks the columns 'pulse'"),
        ("age,AGE,sex,stage,pulse\n1,1,f,1,2\n", "the first line has 'age' twice"),
        (HEADER, "new.csv has no rows: give at least one"),
    ],
)
def test_a_table_of_another_schema_is_refused_in_a_line(text: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        parse(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_excel_and_parquet_are_read_as_csv_is(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"sex": ["m", "f"], "age": [50, None], "stage": [3, 1], "pulse": [70.5, 80.0]}
    )
    frame.to_csv(tmp_path / "a.csv", index=False, sep=";")
    frame.to_excel(tmp_path / "a.xlsx", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    impute = SCHEMA.model_copy(update={"policy": "impute"})
    for name, numbers in (("a.csv", (2, 3)), ("a.xlsx", (2, 3)), ("a.parquet", (1, 2))):
        lines = read_table(tmp_path / name, guess_delimiter=True)
        new = parse_new_rows(lines, impute, name)
        assert new.lines == numbers
        assert new.rows[0].tolist() == [50.0, 70.5, 1.0, 0.0, 1.0]
        assert np.isnan(new.rows[1]).tolist() == [True, False, False, False, False]


def test_a_word_that_pandas_takes_for_a_missing_value_is_a_level_in_excel_too(
    tmp_path: Path,
) -> None:
    drug = Column(name="drug", kind="categorical", levels=["None", "NA", "aspirin"])
    schema = SCHEMA.model_copy(update={"columns": [drug], "policy": "impute"})
    frame = pd.DataFrame({"drug": ["None", "NA", "aspirin", None], "other": 1})
    frame.to_excel(tmp_path / "a.xlsx", index=False)
    rows = parse_new_rows(read_table(tmp_path / "a.xlsx"), schema, "a.xlsx").rows
    assert rows[:3].tolist() == [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    assert np.isnan(rows[3]).all()


@pytest.mark.parametrize("ending", ["csv", "xlsx", "parquet"])
def test_booleans_are_numbers_in_numeric_columns_and_levels_in_others(
    ending: str, tmp_path: Path
) -> None:
    level = Column(name="level", kind="categorical", levels=["False", "True"])
    schema = SCHEMA.model_copy(update={"columns": [Column(name="number"), level]})
    frame = pd.DataFrame({"number": [True, False], "level": [False, True]})
    path = tmp_path / f"a.{ending}"
    getattr(frame, f"to_{ending.replace('xlsx', 'excel')}")(path, index=False)
    new = parse_new_rows(read_table(path), schema, path.name)
    assert new.rows.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("name", ["a.xlsx", "a.parquet"])
def test_a_damaged_file_is_told_in_a_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_table(tmp_path / name)
    (tmp_path / name).write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match=r"is damaged or not a \."):
        read_table(tmp_path / name)


def test_a_missing_package_is_told_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with refuses(SettingError, "tables", "fedsilo[tables]"):
        read_table(tmp_path / "a.xlsx")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(max_size=6), max_size=7), min_size=1, max_size=4))
def test_whatever_cells_hold_a_row_is_used_or_has_a_fault(rows: list[list[str]]) -> None:
    header = HEADER.strip().split(",")
    new = parse_new_rows([(1, header), *enumerate(rows, 2)], SCHEMA, "new.csv")
    assert sorted([*new.lines, *new.faults]) == list(range(2, len(rows) + 2))
    assert np.isfinite(new.rows).all()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_value_beyond_the_schemas_range_is_refused(data: st.DataObject) -> None:
    column = data.draw(st.sampled_from([c for c in HEART.columns if c.range]))
    low, high = column.range
    far = st.floats(high, 1e30, exclude_min=True) | st.floats(-1e30, low, exclude_max=True)
    values = dict.fromkeys(HEART.used_columns(), "1") | {"trestbps": "120", "thalach": "150"}
    values[column.name] = repr(data.draw(far))
    new = parse_new_rows([(1, [*values]), (2, [*values.values()])], HEART, "new.csv")
    assert f"column '{column.name}'" in new.faults[2]


def test_a_range_is_of_a_numeric_column_and_rises() -> None:
    for wrong in ({"range": [1.0]}, {"range": [2.0, 1.0]}):
        with pytest.raises(ValueError, match="the lowest and the highest"):
            Column.model_validate({"name": "a", **wrong})
