"""FLamby's survival data by its two files, of which a test writes small ones."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.downloads.public_files import RemoteFile, public_data
from fedsilo.datasets.tables import tcga_brca
from fedsilo.datasets.tables.parsing import LeftOutRows, ParsedTable
from fedsilo.datasets.tables.tcga_brca import TCGA_BRCA
from tests.support.errors import refuses

FOLDS = "dataset_creation_scripts/train_test_split.csv"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Write files of six patients, of whom a is in no fold, and take their MD5 for published."""
    folder = tmp_path / "data" / "tcga_brca"
    (folder / FOLDS).parent.mkdir(parents=True)
    names = TCGA_BRCA.schema(Places(None, tmp_path)).column_names()
    rows = [",".join(names)]
    for patient in "abcdef":
        rows.append(",".join([patient, *["1"] * (len(names) - 1)]))
    (folder / "brca.csv").write_text("\n".join(rows) + "\n")
    folds = {"b": "test_1", "c": "train_1", "d": "train_0", "e": "train_1", "f": "test_1"}
    lines = ["pid,fold,fold2", *(f"{patient},x,{fold}" for patient, fold in folds.items())]
    (folder / FOLDS).write_text("\n".join(lines) + "\n")
    files = []
    for file in public_data()["tcga-brca"].files:
        md5 = hashlib.md5((folder / file.name).read_bytes(), usedforsecurity=False).hexdigest()
        files.append(RemoteFile(file.name, md5))
    published = replace(public_data()["tcga-brca"], files=tuple(files))
    monkeypatch.setattr(tcga_brca, "public_data", lambda: {"tcga-brca": published})
    return Places(tmp_path / "data", tmp_path / "cache")


def test_a_region_has_its_training_patients_first_then_its_test_patients(places: Places) -> None:
    lines, where = TCGA_BRCA.lines_of("south", TCGA_BRCA.schema(places), places)
    assert [cells[0] for _, cells in lines] == ["pid", "c", "e", "b", "f"]
    assert where == "brca.csv, south"


def test_an_altered_file_is_refused(places: Places) -> None:
    assert places.data
    path = places.data / "tcga_brca" / "brca.csv"
    path.write_text(path.read_text() + "g\n")
    with refuses(DataError, path):
        TCGA_BRCA.lines_of("south", TCGA_BRCA.schema(places), places)


@pytest.mark.parametrize("use_test", [True, False])
def test_flambys_split_is_kept_unless_folds_are_asked_for(use_test: bool, tmp_path: Path) -> None:
    patients = 40 + 11  # of canada
    labels = np.stack([np.arange(1.0, patients + 1), np.arange(patients) % 2], 1)
    table = ParsedTable(np.zeros((patients, 39)), labels, LeftOutRows(0), np.arange(patients))
    schema = TCGA_BRCA.schema(Places(None, tmp_path))
    settings = CommonSettings(use_test=use_test, val_folds=4)
    rows = TCGA_BRCA._split(table, schema, settings, "brca.csv, canada")
    assert sorted([*rows.train, *rows.val]) == list(range(40))
    assert len(rows.val) == 10
    assert list(rows.test) == (list(range(40, patients)) if use_test else [])
    folds = CommonSettings(test_folds=3, val_folds=2)
    rows = TCGA_BRCA._split(table, schema, folds, "brca.csv, canada")
    assert len(rows.test) == 17, "a fold of all patients"
