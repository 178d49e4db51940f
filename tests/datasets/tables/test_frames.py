"""Frames of pandas become the tables that a schema written by hand would describe."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.tables.frames import write_frames
from fedsilo.datasets.tables.schema import read_schema
from tests.support.errors import refuses

NORTH = pd.DataFrame(
    {
        "age": [40.5, 50.25, 61.0, 70.0, 33.0, 44.0],
        "smoker": [True, False, True, True, False, False],
        "stage": ["II", "I", "II", "III", "I", "I"],
        "ward": ["w"] * 6,
        "ill": ["yes", "no", "yes", "yes", "no", "no"],
    }
)
SOUTH = NORTH.assign(stage=["I", "IV", "I", "I", "IV", "I"])


def silo_of(folder: Path, name: str, **changes: Any) -> Any:
    cache = str(folder / "cache")
    settings = CommonSettings(dataset="table", data_dir=str(folder), cache_dir=cache, **changes)
    return load_silo(name, settings)


def test_columns_are_typed_and_levels_are_those_of_all_sites(tmp_path: Path) -> None:
    write_frames(tmp_path, {"north": NORTH, "south": SOUTH}, "ill")
    schema = read_schema(tmp_path / "schema.yaml")
    kinds = {column.name: (column.kind, column.levels) for column in schema.columns}
    assert kinds == {
        "age": ("numeric", []),
        "smoker": ("numeric", []),
        "stage": ("categorical", ["I", "II", "III", "IV"]),
        "ward": ("ignored", []),
    }
    assert dict(schema.classes) == {"no": ["no"], "yes": ["yes"]}
    silo = silo_of(tmp_path, "north", test_folds=3)
    assert silo.features == ("age", "smoker", "stage=II", "stage=III", "stage=IV")
    rows = np.concatenate([silo.train.inputs.numpy(), silo.test.inputs.numpy()])
    labels = [*silo.train.labels.tolist(), *silo.test.labels.tolist()]
    found = sorted(zip(map(tuple, rows.tolist()), labels, strict=True))
    assert found[0] == ((33.0, 0.0, 0.0, 0.0, 0.0), 0)
    assert found[-1] == ((70.0, 1.0, 0.0, 1.0, 0.0), 1)


@pytest.mark.parametrize(("policy", "rows"), [("drop", 5), ("impute", 7)])
def test_missing_values_are_treated_as_the_policy_says_and_a_missing_label_leaves_its_row_out(
    policy: str, rows: int, tmp_path: Path
) -> None:
    frame = pd.concat([NORTH, NORTH[:2]]).assign(
        age=[None, 1, 2, 3, 4, 5, 6, 7],
        stage=["I", "?", *"IVIVIV"],
        ill=["yes", "no", "yes", "no", "yes", "no", "yes", None],
    )
    write_frames(tmp_path, {"north": frame}, "ill", policy)
    silo = silo_of(tmp_path, "north")
    assert sum(map(len, silo.splits().values())) == rows
    assert silo.dropped == 8 - rows


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([10, 2, 10, 2, 10, 2], ["2", "10"]),
        ([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], ["0", "1"]),
        ([True, False, True, False, True, False], ["0", "1"]),
        (pd.Categorical(["b", "a"] * 3), ["a", "b"]),
    ],
)
def test_labels_of_any_type_are_classes_numbers_in_their_order(
    labels: Any, classes: list[str], tmp_path: Path
) -> None:
    write_frames(tmp_path, {"north": NORTH.assign(ill=labels)}, "ill")
    assert list(read_schema(tmp_path / "schema.yaml").classes) == classes
    assert sum(map(sum, silo_of(tmp_path, "north").label_counts().values())) == 6


def test_objects_with_gaps_are_the_numbers_and_booleans_that_they_hold(tmp_path: Path) -> None:
    gaps: dict[str, Any] = {
        "smoker": [True, None, False] * 2,
        "age": [40, 50, None, 60.5, 2**53 + 1, 30],
        "ill": [True, False, None] * 2,
    }
    south = NORTH.assign(**{name: np.array(own, dtype=object) for name, own in gaps.items()})
    north = NORTH.assign(ill=[True, False] * 3)
    write_frames(tmp_path, {"north": north, "south": south}, "ill", "impute")
    schema = read_schema(tmp_path / "schema.yaml")
    assert {one.name: one.kind for one in schema.columns}["smoker"] == "numeric"
    assert list(schema.classes) == ["0", "1"]
    silo = silo_of(tmp_path, "south")
    assert silo.features[:2] == ("age", "smoker")
    assert silo.dropped == 2, "two rows have no label"


@pytest.mark.parametrize(
    ("south", "said"),
    [
        (NORTH.drop(columns="ill"), ["south", "ill"]),
        (NORTH.assign(more=1), ["north", "south", "more"]),
        (pd.concat([NORTH, NORTH], axis=1), ["south"]),
        (NORTH.assign(age=pd.Timestamp(0)), ["age"]),
        (NORTH.assign(age="old"), ["age", "north", "south"]),
        (NORTH.assign(age=np.inf), ["south", 2, "age"]),
        (NORTH.assign(age=1j), ["age"]),
        (
            NORTH.assign(stage="two\nlines"),
            ["stage"],
        ),
    ],
)
def test_a_frame_that_cannot_be_used_is_refused_by_site_or_column(
    south: pd.DataFrame, said: list[object], tmp_path: Path
) -> None:
    with refuses(DataError, *said):
        write_frames(tmp_path, {"north": NORTH, "south": south}, "ill")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("ill", "yes", ["ill", 1, 2]),
        ("ill", np.arange(1200.0), ["ill", 1200]),
        ("stage", [f"p{i}" for i in range(1200)], ["stage", 1200, 64]),
    ],
)
def test_one_class_free_numbers_as_labels_and_names_as_levels_are_refused(
    column: str, values: Any, said: list[object], tmp_path: Path
) -> None:
    frame = pd.concat([NORTH] * 200, ignore_index=True).assign(**{column: values})
    with refuses(DataError, *said):
        write_frames(tmp_path, {"north": frame}, "ill")


@pytest.mark.parametrize("text", ["nan", "NA", "N/A", "."])
def test_a_word_for_a_missing_value_is_no_class(text: str, tmp_path: Path) -> None:
    labels = ["yes", "no", text, "yes", "no", "no"]
    with refuses(DataError, "ill", text.lower()):
        write_frames(tmp_path, {"north": NORTH.assign(ill=labels), "south": SOUTH}, "ill")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["II", "I", "ii", "III", "I", "I"], "differ only by case"),
        (["II", "I", "nan", "III", "I", "I"], "looks like a missing value"),
    ],
)
def test_texts_that_may_not_be_levels_are_mentioned_and_kept(
    stages: list[str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_frames(tmp_path, {"north": NORTH.assign(stage=stages), "south": SOUTH}, "ill")
    levels = {
        column.name: column.levels for column in read_schema(tmp_path / "schema.yaml").columns
    }
    assert set(levels["stage"]) == {*stages, "IV"}
    assert "'stage'" in caplog.text
    assert said in caplog.text


def test_numbers_stored_as_texts_are_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = pd.DataFrame({"age": list(map(str, range(40, 60))), "ill": ["yes", "no"] * 10})
    write_frames(tmp_path, {"north": rows, "south": rows}, "ill")
    assert "numbers are stored as texts" in caplog.text
