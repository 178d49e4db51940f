"""Read the German traffic signs (GTSRB, benchmark.ini.rub.de): official folders with CSV files.

Each class has a training folder with its images and ``GT-000xx.csv``; an image's name is its
track's number and its frame's. The classes of the test images are in ``GT-final_test.csv``. Images
have sides of 15 to 250 pixels; the whole image of any shape is resized to 32x32 (bilinear),
as in the UEFL notes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import read_rows
from fedsilo.core.seeding import generator
from fedsilo.datasets.images.decoding import BrokenImageError, opened_image
from fedsilo.datasets.shifted.pools import Facts, Pool, facts_of

SIGNS = 43  # classes

_CLASSES = tuple(f"{label:05d}" for label in range(SIGNS))
_SIDE = 32  # pixels
_TRAIN = Path("Final_Training") / "Images"
_TEST = Path("Final_Test") / "Images"
_TEST_CSVS = ("Final_Test/GT-final_test.csv", "Final_Test/Images/GT-final_test.csv")
_FETCH = "run 'fedsilo fetch gtsrb --data-dir DIR'"


@dataclass(frozen=True)
class _Sign:
    """One line of a CSV: an image file, its class, its track, and the place of the line for errors.

    The track is used only for training images.
    """

    path: Path
    label: int
    track: str
    where: str


def list_signs(folder: Path) -> Facts:
    """List the CSV files and image folders of the traffic signs, so that changes can be detected.

    Each training class has an image folder, and a CSV file with its labels. A class without a
    folder is left out together with its CSV file. The test images have a folder, and a CSV file in
    one of the two places of ``_TEST_CSVS``. Other missing files and folders are left out too. A
    folder's modification time changes if images are added or removed, but not if an image is
    overwritten.

    Returns:
        First the CSV files and then the folders, each as [path within ``folder``, size in bytes (0
        for a folder), modification time in ns]. If no training class has a folder, the result is
        [], even if test images exist.
    """
    classes = [_TRAIN / name for name in _CLASSES if (folder / _TRAIN / name).is_dir()]
    if not classes:
        return []
    csvs = [str(_csv_of(name)) for name in classes]
    facts = facts_of(folder, [*csvs, *_TEST_CSVS])
    for name in (*classes, _TEST):
        path = folder / name
        if path.is_dir():
            facts.append([str(name), 0, path.stat().st_mtime_ns])
    return facts


def decode_signs(folder: Path) -> Pool:
    """Decode all images of traffic signs into a ``Pool`` with training and test images.

    The images of each part are in a random order, which depends only on their number. The pool also
    has the track of each training image, a series of frames of one sign. A class without a training
    folder is skipped.

    Raises:
        DataError: a CSV file or an image is missing or unusable, or a class is out of range.
    """
    train: list[_Sign] = []
    for name in _CLASSES:
        train += _training_signs(folder / _TRAIN / name)
    test = _test_signs(folder)
    # Tracks are numbered in the order of the files, before the images are shuffled
    numbers: dict[str, int] = {}
    for sign in train:
        numbers.setdefault(sign.track, len(numbers))
    train = _shuffle(train, "train")
    test = _shuffle(test, "test")
    tracks = np.array([numbers[sign.track] for sign in train], np.int64)
    return Pool(*_decode_all(train), *_decode_all(test), tracks)


def _csv_of(folder: Path) -> Path:
    return folder / f"GT-{folder.name}.csv"


def _training_signs(folder: Path) -> list[_Sign]:
    """Read the list of images in the training folder of one class.

    The list is the CSV file in the folder. The result is empty if the folder does not exist. The
    name of the folder is the class's number, such as '00012'.

    Raises:
        DataError: the folder has no CSV file, the CSV file is unusable, or a ClassId in it differs
            from the folder's name.
    """
    if not folder.is_dir():
        return []
    path = _csv_of(folder)
    if not path.is_file():
        raise DataError(
            f"{folder} has no {path.name}, which names its images: put it there, or {_FETCH}"
        )
    signs = _read_signs(path, folder)
    for sign in signs:
        if sign.label != int(folder.name):
            raise DataError(
                f"{sign.where}: ClassId must be {int(folder.name)}, as the folder says, but is "
                f"{sign.label}: {_FETCH} again"
            )
    return signs


def _test_signs(folder: Path) -> list[_Sign]:
    """Read the list of test images from GT-final_test.csv, which names the class of each image.

    The CSV file is searched in Final_Test, and then in Final_Test/Images.

    Raises:
        DataError: neither folder has the CSV file, or a line is invalid.
    """
    paths = [folder / name for name in _TEST_CSVS if (folder / name).is_file()]
    if not paths:
        raise DataError(
            f"{folder} has no {_TEST_CSVS[0]}, which has the test images' classes (the CSV in "
            f"Final_Test/Images, GT-final_test.test.csv, does not): put it there, or {_FETCH}"
        )
    return _read_signs(paths[0], folder / _TEST)


def _read_signs(path: Path, folder: Path) -> list[_Sign]:
    """Read a CSV file whose lines name images in ``folder`` and their classes.

    The track of an image is 'FOLDER/PREFIX'. FOLDER is the name of ``folder``, and PREFIX is the
    part of the image's name before the first '_'.

    Raises:
        DataError: in one of these cases:

            - The CSV file cannot be read, lacks a column or has no lines.
            - An image is missing or is listed twice.
            - A ClassId is out of range.
    """
    present: set[str] = set()
    if folder.is_dir():
        present.update(os.listdir(folder))
    signs: list[_Sign] = []
    seen: set[str] = set()
    for line, row in read_rows(path, ["Filename", "ClassId"], delimiter=";"):
        name, where = row["Filename"], f"{path}, line {line}"
        fault = ""
        if name not in present:  # nor is any name with a folder in it
            fault = f"is not in {folder}: put the image there or take the line out, or {_FETCH}"
        elif name in seen:
            fault = "appears twice: take the line out"
        if fault:
            raise DataError(f"{where}: {name[:80]!r} {fault}")
        seen.add(name)
        # Tracks are numbered within each class, so the class's folder belongs to the name
        track = f"{folder.name}/{name.split('_')[0]}"
        signs.append(_Sign(folder / name, _read_label(row["ClassId"], where), track, where))
    if not signs:
        raise DataError(f"{path} names no image: {_FETCH} again")
    return signs


def _read_label(text: str, where: str) -> int:
    """Convert the text of a ClassId, which may have leading zeros, to its number 0..42.

    Raises:
        DataError: the text is not a number in this range. The error begins with ``where``.
    """
    # Short ASCII digits only, because int() also takes '1_0', other scripts' digits and long texts
    if text.isascii() and text.isdigit() and len(text) < 5 and int(text) < SIGNS:
        return int(text)
    raise DataError(
        f"{where}: ClassId {text[:20]!r} is out of range 0..{SIGNS - 1}: correct it, or {_FETCH} "
        "again"
    )


def _shuffle(signs: Sequence[_Sign], part: str) -> list[_Sign]:
    """Return the signs in a random order that depends only on ``part`` and the number of signs."""
    import torch

    order = torch.randperm(len(signs), generator=generator(0, "gtsrb-order", part))
    return [signs[place] for place in order.tolist()]


def _decode_all(signs: Sequence[_Sign]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Decode signs in order: images (n, 32, 32, 3) uint8, and labels (n,) int64.

    Raises:
        DataError: an image is missing, damaged, or not RGB with 8 bits per channel.
    """
    images = np.empty((len(signs), _SIDE, _SIDE, 3), np.uint8)
    for place, sign in enumerate(signs):
        images[place] = _decode(sign)
    return images, np.array([sign.label for sign in signs], np.int64)


def _decode(sign: _Sign) -> npt.NDArray[Any]:
    """Decode one sign of any size, and resize it bilinearly to (32, 32, 3) uint8.

    Raises:
        DataError: the image is missing or damaged, is not a PPM, or is not RGB with 8 bits per
            channel.
    """
    from PIL.Image import Resampling

    try:
        with opened_image(sign.path, ("PPM",)) as image:
            if image.mode != "RGB":
                raise BrokenImageError(
                    f"is of mode {image.mode}, but must be in colour of 8 bits (RGB)"
                )
            return np.asarray(image.resize((_SIDE, _SIDE), Resampling.BILINEAR))
    except BrokenImageError as error:
        raise DataError(
            f"{sign.where}: {sign.path} {error}: replace the image, or {_FETCH} again"
        ) from None
