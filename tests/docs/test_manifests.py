"""Manifests of public data sets, made of folders that are laid out as their sources say."""

import csv
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError, SettingError
from fedsilo.datasets.images.declaration import Declaration
from fedsilo.datasets.silo.declared_silos import read_declared

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "manifests.py"
_SPEC = importlib.util.spec_from_file_location("manifests", EXAMPLE)
assert _SPEC is not None
assert _SPEC.loader is not None
_module = importlib.util.module_from_spec(_SPEC)
sys.modules["manifests"] = _module  # its dataclass looks for it there
_SPEC.loader.exec_module(_module)
RECIPES, write_manifest, main = _module.RECIPES, _module.write_manifest, _module.main

INBREAST = """Patient ID;Laterality;View;File Name;ACR;Bi-Rads;Mass ;Findings
removed;R;CC;20586908;3;4a;X;mass
removed;L;MLO;20586934;3;2;;normal
"""
LEFT = "AllDICOMs/20586934_6c613a14b80a8591_MG_L_ML_ANON.dcm"
CBIS = "patient_id,abnormality id,pathology,subtlety,image file path,cropped image file path\n"
RANZCR = (
    "StudyInstanceUID,ETT - Abnormal,ETT - Normal,NGT - Normal,CVC - Abnormal,CVC - Normal,"
    "Swan Ganz Catheter Present,PatientID\n"
)


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"image")


def inbreast(folder: Path) -> None:
    (folder / "INbreast.csv").write_text(INBREAST)
    for name in ("20586908_6c613a14b80a8591_MG_R_CC", "20586934_6c613a14b80a8591_MG_L_ML"):
        _touch(folder, f"AllDICOMs/{name}_ANON.dcm")


def cbis_ddsm(folder: Path) -> None:
    """A woman with two masses on one view, one with a calcification, in another way downloaded."""
    first, second = "Mass-Training_P_00001_LEFT_CC", "Calc-Test_P_00038_LEFT_CC"
    _touch(folder, f"{first}/07-20-2016-DDSM/1.000000-full mammogram/1-1.dcm")
    _touch(folder, f"{second}/1.3.6.1/1.3.6.2/000000.dcm")
    lines = {
        "mass_case_description_train_set.csv": [
            f"P_00001,1,BENIGN,4,{first}/1.3/1.4/000000.dcm,x/1.dcm",
            f"P_00001,2,MALIGNANT,4,{first}/1.3/1.4/000000.dcm,x/2.dcm",
        ],
        "calc_case_description_test_set.csv": [
            f"P_00038,1,BENIGN_WITHOUT_CALLBACK,3,{second}/1.3.6.1/1.3.6.2/000000.dcm,y/1.dcm"
        ],
        "mass_case_description_test_set.csv": [],
        "calc_case_description_train_set.csv": [],
    }
    for name, told in lines.items():
        (folder / name).write_text(CBIS + "".join(f"{line}\n" for line in told))


def ranzcr(folder: Path) -> None:
    (folder / "train.csv").write_text(
        f"{RANZCR}1.2.3,0,1,0,0,1,0,p1\n1.2.4,0,0,0,0,0,0,p1\n1.2.5,0,0,0,1,0,1,p2\n"
    )
    _touch(folder, "train/1.2.3.jpg", "train/1.2.4.jpg", "train/1.2.5.jpg")


MADE: dict[str, tuple[Callable[[Path], None], str]] = {
    "inbreast": (
        inbreast,
        "path,label,patient\n"
        "AllDICOMs/20586908_6c613a14b80a8591_MG_R_CC_ANON.dcm,4a,6c613a14b80a8591\n"
        "AllDICOMs/20586934_6c613a14b80a8591_MG_L_ML_ANON.dcm,2,6c613a14b80a8591\n",
    ),
    "cbis-ddsm": (
        cbis_ddsm,
        "path,label,patient,split\n"
        "Calc-Test_P_00038_LEFT_CC/1.3.6.1/1.3.6.2/000000.dcm,BENIGN_WITHOUT_CALLBACK,P_00038,test\n"
        "Mass-Training_P_00001_LEFT_CC/07-20-2016-DDSM/1.000000-full mammogram/1-1.dcm,MALIGNANT,"
        "P_00001,train\n",
    ),
    "ranzcr": (
        ranzcr,
        "path,label,patient\ntrain/1.2.3.jpg,CVC+ETT,p1\ntrain/1.2.4.jpg,none,p1\n"
        "train/1.2.5.jpg,CVC+Swan Ganz,p2\n",
    ),
}


def test_every_recipe_is_tried() -> None:
    assert MADE.keys() == RECIPES.keys()


@pytest.mark.parametrize("name", MADE)
def test_a_folder_becomes_a_manifest_and_a_declaration_that_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, manifest = MADE[name]
    folder = tmp_path / "source"
    folder.mkdir()
    make(folder)
    assert main(name, folder) == 0
    assert (folder / "manifest.csv").read_text() == manifest
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{folder / 'manifest.csv'}: {manifest.count(chr(10)) - 1} images"
    start = next(place for place, line in enumerate(said) if line.startswith("for "))
    declared = tmp_path / "declared.yaml"
    declared.write_text("\n".join(said[start + 1 :]))
    declaration = read_declared(declared, Declaration)
    assert declaration.sites == {name: "source/manifest.csv"}
    labels = {line.split(",")[1] for line in manifest.splitlines()[1:]}
    assert labels <= {label for known in declaration.classes.values() for label in known}
    assert main(name, folder) == 1
    assert "already exists: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "missing", "told"),
    [
        ("inbreast", "INbreast.csv", "INbreast.csv is missing: it is the table"),
        ("inbreast", LEFT, "line 3: no file 'AllDICOMs/20586934_...dcm'"),
        ("cbis-ddsm", "calc_case_description_test_set.csv", "download the case descriptions"),
        ("cbis-ddsm", "Calc-Test_P_00038_LEFT_CC/1.3.6.1/1.3.6.2/000000.dcm", "line 2: 0 DICOM"),
        ("ranzcr", "train.csv", "train.csv is missing: it is the table"),
        (
            "ranzcr",
            "train/1.2.4.jpg",
            "line 3: no file 'train/1.2.4.jpg': copy it, or the remaining files",
        ),
    ],
)
def test_what_is_missing_is_one_line_and_nothing_is_written(
    name: str, missing: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MADE[name][0](tmp_path)
    (tmp_path / missing).unlink()
    assert main(name, tmp_path) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "manifest.csv").exists()


def test_an_image_in_both_parts_is_refused(tmp_path: Path) -> None:
    cbis_ddsm(tmp_path)
    first = (tmp_path / "mass_case_description_train_set.csv").read_text()
    (tmp_path / "mass_case_description_test_set.csv").write_text(first)
    with pytest.raises(DataError, match="its image is in training and test part"):
        write_manifest("cbis-ddsm", tmp_path)


@pytest.mark.parametrize(
    ("name", "folder", "told"),
    [
        ("ddsm", "", "unknown recipe 'ddsm'; did you mean 'cbis-ddsm'"),
        ("ranzcr", "nowhere", "is not a folder: name that into which 'ranzcr' was unpacked"),
    ],
)
def test_a_recipe_or_folder_that_is_not_there_is_told(
    name: str, folder: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises((SettingError, DataError), match=told):
        write_manifest(name, tmp_path / folder)


@given(st.sampled_from(sorted(MADE)), st.data())
def test_whatever_a_table_holds_it_is_a_manifest_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("source")
    MADE[name][0](folder)
    table = data.draw(st.sampled_from(sorted(folder.glob("*.csv"))))
    text = table.read_bytes()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    table.write_bytes(text[:start] + data.draw(st.binary(max_size=8)) + text[end:])
    try:
        counted, refusal = write_manifest(name, folder).total(), ""
    except DataError as error:
        counted, refusal = 0, str(error)
    assert "\n" not in refusal
    written = folder / "manifest.csv"
    assert written.exists() == (not refusal)
    if not refusal:
        with written.open(newline="") as manifest:
            assert len(list(csv.reader(manifest))) == counted + 1
