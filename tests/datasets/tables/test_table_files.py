"""Tables are recognised by their content, and no cell of theirs is lost without a word."""

import gzip
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.unpacked_size import VARIABLE
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.tables.new_rows import parse_new_rows
from fedsilo.datasets.tables.parsing import parse_table
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import OPEN_FORMULA, Lines, read_table
from tests.support.errors import refuses

SCHEMA = TableSchema.model_validate(
    {
        "columns": [{"name": "age"}, {"name": "ward", "kind": "categorical", "levels": ["ä", "b"]}],
        "label": {"column": "ill", "classes": {"no": [0], "yes": [1]}},
        "sites": {"north": "north.csv"},
        "policy": "impute",
    }
)
FRAME = pd.DataFrame(
    {
        "age": [50.0 + place for place in range(12)],
        "ward": ["ä", "b", "b", None] * 3,
        "ill": [0, 1] * 6,
    }
)
TEXT = FRAME.to_csv(index=False)
FORMS = ("utf-8", "utf-8-sig", "utf-16", "gzip", "xlsx", "parquet")


def write(path: Path, form: str) -> Path:
    """Write the frame in a form, whatever the file is called."""
    if form == "gzip":
        path.write_bytes(gzip.compress(TEXT.encode()))
    elif form == "xlsx":
        FRAME.to_excel(path.with_suffix(".xlsx"), index=False)
        shutil.move(path.with_suffix(".xlsx"), path)
    elif form == "parquet":
        FRAME.to_parquet(path, index=False)
    else:
        path.write_bytes(TEXT.encode(form))
    return path


def formulas(path: Path, cached: str = "<v></v>", **types: str) -> Lines:
    """Read a workbook whose column ``age`` holds formulas; ``cached`` is the XML of their values,
    and ``types`` are those of cells."""
    frame = pd.DataFrame({"age": ["=2020-1936", "=2020-1986"], "ward": ["b", None], "ill": [0, 1]})
    frame.to_excel(path.with_suffix(".old.xlsx"), index=False)
    with zipfile.ZipFile(path.with_suffix(".old.xlsx")) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            content = old.read(entry).decode()
            content = content.replace("<v></v>", cached).replace("<v />", cached)
            for cell, kind in types.items():
                content = content.replace(f'<c r="{cell}"', f'<c r="{cell}" t="{kind}"')
            new.writestr(entry.filename, content)
    return read_table(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["north.csv", "north.export"])
def test_a_site_trains_on_the_same_rows_in_every_form(form: str, name: str, tmp_path: Path) -> None:
    fingerprints = []
    for used, path in (("utf-8", tmp_path / "plain"), (form, tmp_path / "other")):
        path.mkdir()
        write(path / name, used)
        schema = SCHEMA.model_dump_json(by_alias=True).replace("north.csv", name)
        (path / "schema.yaml").write_text(schema)
        silo = load_silo("north", CommonSettings(dataset="table"), Places(path, tmp_path / "cache"))
        fingerprints.append(silo.fingerprints)
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("form", FORMS)
def test_new_rows_are_those_of_training_in_every_form(form: str, tmp_path: Path) -> None:
    lines = read_table(write(tmp_path / "rows", form))
    new = parse_new_rows(lines, SCHEMA, "rows")
    assert np.array_equal(new.rows, parse_table(lines, SCHEMA, "rows").rows, equal_nan=True)
    assert new.imputed == {"ward": 3}


def test_the_names_in_a_parquet_file_are_a_header_whatever_the_schema_says(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", "parquet")
    bare = SCHEMA.model_copy(update={"header": False})
    assert parse_table(read_table(path), bare, "rows").labels.tolist() == FRAME["ill"].tolist()


def test_a_column_that_pandas_stored_as_the_index_is_found(tmp_path: Path) -> None:
    FRAME.assign(patient=[f"P{place}" for place in range(12)]).set_index("patient").to_parquet(
        tmp_path / "new.parquet"
    )
    rows = parse_new_rows(read_table(tmp_path / "new.parquet"), SCHEMA, "new.parquet", "patient")
    assert list(rows.ids.values())[:2] == ["P0", "P1"]


def test_a_formula_without_a_stored_value_is_not_a_missing_value(tmp_path: Path) -> None:
    lines = formulas(tmp_path / "a.xlsx")
    assert [cells[0] for _, cells in lines] == ["age", OPEN_FORMULA, OPEN_FORMULA]
    with refuses(DataError, "line 2", "age"):
        parse_table(lines, SCHEMA, "a.xlsx")
    faults = parse_new_rows(lines, SCHEMA, "a.xlsx").faults
    assert list(faults) == [2, 3]
    assert all("formula" in fault for fault in faults.values())


def test_a_formula_in_a_column_that_is_not_read_refuses_nothing(tmp_path: Path) -> None:
    columns = [SCHEMA.columns[0].model_copy(update={"kind": "ignored"}), SCHEMA.columns[1]]
    schema = SCHEMA.model_copy(update={"columns": columns})
    assert len(parse_table(formulas(tmp_path / "a.xlsx"), schema, "a.xlsx").rows) == 2


def test_the_stored_value_of_a_formula_is_read_an_empty_text_too(tmp_path: Path) -> None:
    lines = formulas(tmp_path / "a.xlsx", "<v>84</v>")
    assert [cells[0] for _, cells in lines] == ["age", "84", "84"]
    lines = formulas(tmp_path / "b.xlsx", "<v></v>", A2="str")
    assert [cells[0] for _, cells in lines] == ["age", "", OPEN_FORMULA]


def test_an_error_in_a_cell_of_excel_is_not_a_missing_value(tmp_path: Path) -> None:
    lines = formulas(tmp_path / "a.xlsx", "<v>#DIV/0!</v>", A2="e", A3="e")
    with refuses(DataError, "line 2", "age"):
        parse_table(lines, SCHEMA, "a.xlsx")


def test_lines_of_a_workbook_keep_their_numbers_past_empty_ones(tmp_path: Path) -> None:
    frame = pd.DataFrame([["age", "ward"], [None, None], ["50", None]])
    frame.to_excel(tmp_path / "a.xlsx", index=False, header=False)
    assert read_table(tmp_path / "a.xlsx") == [(1, ["age", "ward"]), (3, ["50", ""])]


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(TEXT.encode())[:-20],
        gzip.compress(gzip.compress(b"a")),
        b"\xd0\xcf\x11\xe0",
    ],
    ids=["cut", "packed twice", "xls"],
)
def test_a_packed_file_that_is_no_table_is_refused_by_its_name(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "north.csv").write_bytes(content)
    with refuses(DataError, "north.csv"):
        read_table(tmp_path / "north.csv")


def test_a_small_gzip_file_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(2**20))
    path = tmp_path / "north.csv"
    path.write_bytes(gzip.compress(b"0" * 2**22))
    with refuses(DataError, "north.csv", VARIABLE):
        read_table(path)


@settings(max_examples=40, deadline=None)
@given(
    ages=st.lists(st.none() | st.integers(-50, 150), min_size=1, max_size=30),
    low=st.integers(-20, 40),
    high=st.integers(41, 120),
    policy=st.sampled_from(["drop", "impute"]),
    fate=st.sampled_from(["drop", "keep"]),
)
def test_counts_of_rows_are_those_of_pandas(
    ages: list[int | None], low: int, high: int, policy: str, fate: str
) -> None:
    column = SCHEMA.columns[0].model_copy(update={"range": [float(low), float(high)]})
    schema = SCHEMA.model_copy(update={"columns": [column], "policy": policy, "out_of_range": fate})
    lines = [(1, ["age", "ill"])]
    for number, age in enumerate(ages, 2):
        lines.append((number, ["" if age is None else str(age), "0"]))
    table = parse_table(lines, schema, "here")
    frame = pd.DataFrame({"age": pd.array(ages, dtype="Int64")})
    missing = frame["age"].isna()
    outside = ((frame["age"] < low) | (frame["age"] > high)).fillna(False)
    gone = pd.Series(False, index=frame.index)
    if policy == "drop":
        gone |= missing
    if fate == "drop":
        gone |= outside
    assert table.left_out.count == gone.sum()
    assert table.left_out.missing == {"age": int(gone.sum()), "ill": 0}
    kept = frame["age"][~gone].astype("Float64").to_numpy(np.float32, na_value=np.nan)
    assert np.array_equal(table.rows[:, 0], kept, equal_nan=True)
    assert np.isnan(table.rows).sum() == (missing & ~gone).sum()
    assert len(table.notes) == int(outside.any()) + int((missing & ~gone).any())
