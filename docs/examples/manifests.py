"""Manifests of public image data sets: python manifests.py inbreast|cbis-ddsm|ranzcr FOLDER.

A recipe reads a folder as its source gives it out and says for every image its file, its label in
the source's own words, its patient and, where the source has one, its part. Which labels are a
class is the declaration's word, and nothing is copied or converted. Layouts are those that the
sources describe; no recipe has been tried on the real data.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import DataError, FedsiloError, error_line, unknown_name
from fedsilo.core.files.text_files import read_rows
from fedsilo.datasets.images.folders import MANIFEST, Image, refuse_existing, write_images

_CBIS = "{}_case_description_{}_set.csv"
_KINDS = ("calc", "mass")
# From bad to good: of an image with several findings the first counts
_PATHOLOGY = ("MALIGNANT", "BENIGN", "BENIGN_WITHOUT_CALLBACK")
_LINES = ("ETT", "NGT", "CVC", "Swan Ganz Catheter Present")


@dataclass(frozen=True)
class Recipe:
    """How a public data set becomes a manifest.

    Attributes:
        source: where to get it.
        licence: as its source states it.
        dataset: the 'dataset' that reads the manifest.
        images: reads a folder.
        classes: a usual choice for the declaration, class -> labels; if empty, each label is one.
    """

    source: str
    licence: str
    dataset: str
    images: Callable[[Path], Iterator[Image]]
    classes: Mapping[str, Sequence[str]]


def write_manifest(name: str, folder: Path) -> Counter[str]:
    """Write ``folder/manifest.csv`` by a recipe; return how many images each label has.

    Raises:
        SettingError: there is no such recipe.
        DataError: a table or an image of the source is missing, or there
            is a manifest already. Nothing is written then.
    """
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: name that into which '{name}' was unpacked")
    refuse_existing(folder / MANIFEST)
    images = sorted(RECIPES[name].images(folder), key=lambda image: image.path)
    if not images:
        raise DataError(f"{folder} names no image: is it all of '{name}'?")
    write_images(folder / MANIFEST, images)
    return Counter(image.label for image in images)


def _rows(
    path: Path, needed: Sequence[str], delimiter: str = ","
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the place and the values by column of each line of a source's table."""
    if not path.is_file():
        raise DataError(f"{path} is missing: it is the table that says what the images are")
    for number, row in read_rows(path, needed, delimiter=delimiter):
        yield f"{path}, line {number}", row


def _inbreast(folder: Path) -> Iterator[Image]:
    """INbreast (Moreira et al. 2012): the label is BI-RADS, the patient is in the file's name.

    A file is ``AllDICOMs/<file name>_<patient>_MG_<side>_<view>_ANON.dcm``.
    """
    files = {path.name.split("_")[0]: path for path in (folder / "AllDICOMs").glob("*_*.dcm")}
    for where, row in _rows(folder / "INbreast.csv", ("File Name", "Bi-Rads"), ";"):
        name = row["File Name"]
        if name not in files:
            raise DataError(
                f"{where}: no file 'AllDICOMs/{name}_...dcm': copy it, or the remaining files"
            )
        yield Image(files[name], row["Bi-Rads"], files[name].name.split("_")[1])


def _cbis_ddsm(folder: Path) -> Iterator[Image]:
    """CBIS-DDSM (Lee et al. 2017): a line for each finding; an image has the worst one's label."""
    tables = [
        (folder / _CBIS.format(kind, part), part) for kind in _KINDS for part in ("train", "test")
    ]
    if missing := [path.name for path, _ in tables if not path.is_file()]:
        raise DataError(
            f"{folder} has no '{missing[0]}': download the case descriptions to that folder"
        )
    wanted, found = ("patient_id", "image file path", "pathology"), dict[str, Image]()
    for table, part in tables:
        for where, row in _rows(table, wanted):
            patient, file, pathology = (row[column] for column in wanted)
            if pathology not in _PATHOLOGY:
                raise DataError(f"{where}: the pathology is not one of {', '.join(_PATHOLOGY)}")
            series = file.split("/")[0]
            other = found.get(series)
            if other and other.split != part:
                raise DataError(f"{where}: its image is in training and test part")
            worst = min([pathology, *([other.label] if other else [])], key=_PATHOLOGY.index)
            path = other.path if other else _series(folder, series, where)
            found[series] = Image(path, worst, patient, part)
    yield from found.values()


def _series(folder: Path, name: str, where: str) -> Path:
    """Return the one DICOM file of a series; downloaders name the folders between differently."""
    files = sorted((folder / name).rglob("*.dcm")) if name not in ("", ".", "..") else []
    if len(files) != 1:
        raise DataError(
            f"{where}: {len(files)} DICOM files below '{name}', and a full mammogram has one: "
            "download the series of full mammograms there"
        )
    return files[0]


def _ranzcr(folder: Path) -> Iterator[Image]:
    """RANZCR CLiP: the label is which lines and tubes an image shows, as ``CVC+ETT``, or ``none``.

    A kind has columns ``<kind> - Abnormal``, ``- Borderline`` and ``- Normal`` of 0 and 1 (of
    'NGT' also ``- Incompletely Imaged``); Swan-Ganz catheters have one.
    """
    table = folder / "train.csv"
    for where, row in _rows(table, ("StudyInstanceUID", "PatientID")):
        kinds_of = {name: name.split(" - ")[0] for name in row if name.split(" - ")[0] in _LINES}
        if set(kinds_of.values()) != set(_LINES):
            lines = ", ".join(_LINES)
            raise DataError(f"{table} lacks columns of {lines}: it is not the source's own")
        uid = row["StudyInstanceUID"]
        path = folder / "train" / f"{uid}.jpg"
        if not path.is_file():
            raise DataError(f"{where}: no file 'train/{uid}.jpg': copy it, or the remaining files")
        kinds = {line.split(" Catheter")[0] for name, line in kinds_of.items() if row[name] == "1"}
        yield Image(path, "+".join(sorted(kinds)) or "none", row["PatientID"])


RECIPES: Mapping[str, Recipe] = {
    "inbreast": Recipe(
        "https://doi.org/10.1016/j.acra.2011.09.014",
        "on request from its authors",
        "mammography",
        _inbreast,
        {"not-malignant": ["1", "2", "3"], "malignant": ["4a", "4b", "4c", "5", "6"]},
    ),
    "cbis-ddsm": Recipe(
        "https://doi.org/10.7937/K9/TCIA.2016.7O02S9CY",
        "CC BY 3.0",
        "mammography",
        _cbis_ddsm,
        {"not-malignant": ["BENIGN", "BENIGN_WITHOUT_CALLBACK"], "malignant": ["MALIGNANT"]},
    ),
    "ranzcr": Recipe(
        "https://www.kaggle.com/competitions/ranzcr-clip-catheter-line-classification",
        "the competition's rules: research and education, not commercial",
        "endovascular",
        _ranzcr,
        {},
    ),
}


def main(name: str, folder: Path) -> int:
    """Write a manifest, and print its labels and the lines of a declaration."""
    try:
        labels = write_manifest(name, folder)
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    made = RECIPES[name]
    print(f"{folder / MANIFEST}: {labels.total()} images")
    for label, count in sorted(labels.items()):
        print(f"  {label}: {count}")
    print(f"licence: {made.licence} ({made.source})")
    classes = made.classes or {label: [label] for label in sorted(labels)}
    print(f"for {made.dataset}.yaml, in the data directory:")
    print(f"sites: {{{name}: {folder.name}/{MANIFEST}}}")
    print(f"classes: {json.dumps(classes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
