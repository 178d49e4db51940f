"""ISIC 2019: dermoscopic images, divided into six centres as in FLamby.

23,247 images with eight diagnoses (du Terrail et al. 2022, Fed-ISIC2019); the images of one lesion
stay together. The user provides the files: the challenge's images, FLamby's ``train_test_split``
and the lesion tables of HAM10000 and ISIC, in the folder ``isic2019`` of the data directory.
"""

import os
import re
from functools import lru_cache
from pathlib import Path

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, data_folder, find_places
from fedsilo.core.files.text_files import read_rows
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet, file_stamp
from fedsilo.datasets.images.index import ImageIndex, ListedImage, index_images, take_share

CENTRES = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk4", "vienna_dias")
DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")

_LISTING = "train_test_split"
_AVAILABLE = "available.csv"
_FOLDERS = ("images", "ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input")
_LESIONS = (("HAM10000_metadata", "image_id"), ("ISIC_2019_Training_Metadata.csv", "image"))


def classes_of(target: str) -> dict[str, tuple[str, ...]]:
    """Return the classes that the setting 'data.target' defines, in order: class -> its diagnoses.

    For the target 'diagnosis', each of the eight diagnoses is a class. For any other target there
    are two classes. The first is 'other' with seven diagnoses, and the second is 'nevus' with the
    diagnosis 'NV'.
    """
    if target == "diagnosis":
        return {diagnosis: (diagnosis,) for diagnosis in DIAGNOSES}
    others = [diagnosis for diagnosis in DIAGNOSES if diagnosis != "NV"]
    return {"other": tuple(others), "nevus": ("NV",)}


def class_of(diagnosis: int, target: str) -> int:
    """Convert a diagnosis to the class index for the setting 'data.target'.

    ``diagnosis`` is an index into ``DIAGNOSES``. For the target 'diagnosis' the index stays the
    same. For any other target it is 1 for a nevus (NV) and 0 for all other diagnoses.
    """
    if target == "diagnosis":
        return diagnosis
    return int(DIAGNOSES[diagnosis] == "NV")


class Isic2019(ImageDataSet):
    """The data set ``isic2019``; a site needs all tables, but only its own images."""

    name = "isic2019"
    settings = ImageDataSet.settings | {"data.target"}
    silos_by_files = True

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the classes of 'data.target': nevus against all others, or the eight diagnoses."""
        return classes_of(settings.target)

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the centres with images on this machine, in the order of ``CENTRES``.

        A centre counts if the image folder contains at least one file that the list of images
        assigns to the centre. The result may be empty.

        Raises:
            DataError: the data set's folder, its listing or its image folder is missing.
        """
        folder = _folder(places)
        # One listing of the folder is faster than asking for each of 23,247 files
        files = set(os.listdir(_image_folder(folder)))
        present = set()
        for image, (_, centre) in _read_listing(folder).items():
            if f"{image}.jpg" in files:
                present.add(CENTRES[centre])
        return [name for name in CENTRES if name in present]

    def notices(self, settings: CommonSettings) -> list[str]:
        """Return a list with one sentence that names the centres without images on this machine.

        A centre is a site of this data set. The list is empty if every centre has images, or if the
        data set is not on this machine.
        """
        try:
            places = find_places(settings.data_dir, settings.cache_dir)
            here = self.silo_names(settings, places)
        except DataError:
            return []
        absent = [name for name in CENTRES if name not in here]
        if not absent:
            return []
        return [f"isic2019: no image of {', '.join(absent)} is here; left out"]

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List a centre's images, grouped by lesion, for about 'split.sample-share' of the lesions.

        A hash chooses the lesions. If ``available.csv`` exists, only images that it lists are kept.
        An image without a lesion id is a group by itself. ``site`` is one of ``CENTRES``.

        Raises:
            DataError: a file is missing or invalid, or no table of lesions names an image of this
                centre. Without lesions, images of one lesion could be training and test data.
        """
        folder = _folder(places)
        centre = CENTRES.index(site)
        lesions = _read_lesions(folder, *(file_stamp(folder / name) for name, _ in _LESIONS))
        images = []
        has_lesion = False
        for image, (diagnosis, image_centre) in _read_listing(folder).items():
            if image_centre != centre:
                continue
            has_lesion = has_lesion or image in lesions
            label = class_of(diagnosis, settings.target)
            name = f"{image}.jpg"  # a public name
            images.append(ListedImage(name, label, lesions.get(image) or image, name))
        if not has_lesion:
            raise DataError(
                f"isic2019, {site}: no table of lesions names an image of this centre, so images "
                f"of a lesion would be both training and test data: put {_LESIONS[-1][0]} into the "
                "folder isic2019 of the data directory"
            )
        every = index_images(f"isic2019, {site}", _image_folder(folder), images)
        return take_share(every, settings.sample_share)


def _folder(places: Places) -> Path:
    needs = f"isic2019 with {_LISTING}, a table of lesions and the images"
    return data_folder(places, "isic2019", needs) / "isic2019"


def _image_folder(folder: Path) -> Path:
    for name in _FOLDERS:
        if (folder / name).is_dir():
            return folder / name
    raise DataError(f"{folder} has no folder of images: put them into one of {', '.join(_FOLDERS)}")


def _read_listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Read FLamby's list of images: image -> (index of the diagnosis, index of the centre).

    FLamby is a benchmark of federated data sets that divides ISIC 2019 into six centres. The result
    is cached until a file changes.

    Raises:
        DataError: the list is missing, a line has an invalid name or number, or an image is listed
            twice.
    """
    return _parse_listing(folder, file_stamp(folder / _LISTING), file_stamp(folder / _AVAILABLE))


@lru_cache(maxsize=4)
def _parse_listing(folder: Path, *stamps: object) -> dict[str, tuple[int, int]]:
    """Parse FLamby's list of images: image -> (index of the diagnosis, index of the centre).

    FLamby is a benchmark of federated data sets. The images are in the file's order. If
    ``available.csv`` exists, only the images that it lists are kept. The result is cached.

    Args:
        folder: the data set's folder.
        stamps: the sizes and times of the list and of ``available.csv``. They are part of the
            cache's key, so that changed files are read again.

    Raises:
        DataError: the list is missing, a line has an invalid name or number, or an image is listed
            twice.
    """
    path = folder / _LISTING
    rows: dict[str, tuple[int, int]] = {}
    for number, row in read_rows(path, ("image", "target", "center")):
        place = f"{path}, line {number}"
        image = row["image"]
        fault = ""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", image):
            fault = ", column 'image': this is not an image's name: correct it, without .jpg"
        elif image in rows:
            fault = f": image {image} is listed twice: remove one of the lines"
        if fault:
            raise DataError(f"{place}{fault}")
        target = _number(row["target"], "target", len(DIAGNOSES), place)
        rows[image] = (target, _number(row["center"], "center", len(CENTRES), place))
    if not (folder / _AVAILABLE).is_file():
        return rows
    available = {row["image"] for _, row in read_rows(folder / _AVAILABLE, ("image",))}
    for image in rows.keys() - available:
        del rows[image]
    return rows


def _number(text: str, column: str, count: int, place: str) -> int:
    """Parse an integer from 0 to ``count`` - 1.

    The text may end in '.0'. Spaces and leading zeros are not accepted.

    Args:
        text: the text of the cell.
        column: the cell's column, for the error.
        count: one more than the largest allowed integer.
        place: the text with which the error begins, which names the file and the line.

    Raises:
        DataError: the text is not an allowed number.
    """
    number = text.removesuffix(".0")
    if number not in map(str, range(count)):
        raise DataError(
            f"{place}, column '{column}': the value must be a number from 0 to {count - 1}: "
            "correct it"
        )
    return int(number)


@lru_cache(maxsize=4)
def _read_lesions(folder: Path, *stamps: object) -> dict[str, str]:
    """Read the lesion that each image shows: image -> lesion id.

    Images that are in no table of lesions are left out. If several lines or tables name an image,
    the first non-empty lesion id counts. The id is '' if all of them are empty. The result is
    cached.

    Args:
        folder: the data set's folder.
        stamps: the sizes and times of the tables. They are part of the cache's key, so that changed
            files are read again.

    Raises:
        DataError: the folder has neither of the two tables in ``_LESIONS``, or a table is invalid.
    """
    lesions: dict[str, str] = {}
    has_table = False
    for name, key in _LESIONS:
        if not (folder / name).is_file():
            continue
        has_table = True
        for _, row in read_rows(folder / name, (key, "lesion_id")):
            lesions[row[key]] = lesions.get(row[key]) or row["lesion_id"]
    if not has_table:
        raise DataError(
            f"{folder} has no table of lesions, but without one, images of a lesion would be both "
            f"training and test data: put {' or '.join(dict(_LESIONS))} there"
        )
    return lesions


ISIC2019 = Isic2019()
