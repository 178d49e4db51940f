"""Check that folders of images are what they are taken for: sites, parts of a split, or classes.

A wrong guess at the layout would turn a test set into a hospital, or years into classes, without
any error. So folder names that look like another level are refused.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsilo.core.errors import DataError
from fedsilo.core.one_line import one_line
from fedsilo.datasets.silo.silos import SPLITS

LAYOUTS = "SITE/CLASS/*, SITE/{train,val,test}/CLASS/* or CLASS/*"
ENDINGS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp")

# How public data sets call the parts of their split, in lower case
_TRAINING = {"train", "training"}
_VALIDATION = {"val", "valid", "validation"}
_TEST = {"test", "testing"}
_PICTURES = {"image", "images", "img", "imgs"}
_MASKS = {"mask", "masks", "segmentation", "segmentations", "annotation", "annotations"}
_YEAR = re.compile(r"(19|20)\d\d")
_MOST_NAMES = 5  # names that an error quotes


def entries(folder: Path) -> list[Path]:
    """List the files and folders directly in a folder, sorted by name.

    Names that begin with a dot are left out.

    Raises:
        DataError: the folder cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({error.strerror}): check that this user may read it"
        ) from None


def subfolders(folder: Path) -> list[Path]:
    """List the folders directly in a folder, sorted by name.

    Links to folders count. Names that begin with a dot are left out.

    Raises:
        DataError: the folder cannot be read.
    """
    return list(filter(Path.is_dir, entries(folder)))


def pictures(folder: Path) -> list[Path]:
    """List the image files directly in a folder, sorted by name.

    A file counts as an image if it has one of ``ENDINGS``, such as '.jpg' or '.PNG'. Upper and
    lower case do not matter. Hidden files are left out.

    Raises:
        DataError: the folder cannot be read.
    """
    return list(filter(_is_picture, entries(folder)))


def are_parts(folders: Sequence[Path]) -> bool:
    """Tell whether folders are the parts of a split: all of them are named train, val or test.

    Returns:
        False if no folder's name looks like a part, or if there are no folders.

    Raises:
        DataError: a folder's name looks like a part, such as 'train' or 'Training', but not every
            folder is named train, val or test.
    """
    names = [folder.name for folder in folders]
    if names and set(names) <= set(SPLITS):
        return True
    like_parts = []
    others = []
    for name in names:
        if _looks_like_part(name, names):
            like_parts.append(name)
        else:
            others.append(name)
    if not like_parts:
        return False
    place = folders[0].parent
    if others:
        raise DataError(
            f"{place}: {quote_names(like_parts)} look like parts of a split, but "
            f"{quote_names(others)} does not: move {quote_names(others)} away, or, if all are "
            "sites or classes, rename those that look like parts"
        )
    raise DataError(
        f"{place}: {quote_names(like_parts)} look like the parts of a split, not like sites or "
        "classes: name the parts train, val and test"
    )


def _looks_like_part(name: str, names: Sequence[str]) -> bool:
    """Tell whether a folder's name is one that data sets use for training, validation or test.

    Training and test names, such as 'train', 'training' or 'testing', always count. Validation
    names, such as 'val' or 'valid', count only for a single folder or next to a training or test
    folder. Elsewhere they may be classes, such as 'valid' next to 'invalid'. Case does not matter.

    Args:
        name: the folder's name.
        names: the names of all folders in the same place, including this one.
    """
    sure = _TRAINING | _TEST
    if name.lower() in sure:
        return True
    if name.lower() not in _VALIDATION:
        return False
    # 'valid' next to 'invalid' is a class, but next to 'train' a part
    return len(names) == 1 or not sure.isdisjoint(map(str.lower, names))


def check_class_names(place: Path, names: Sequence[str]) -> None:
    """Check that folders look like classes, and not like years or like images next to masks.

    Args:
        place: the folder that contains them, for errors.
        names: the folders' names. At least one is required.

    Raises:
        DataError: every name is a year from 1900 to 2099. The error is also raised if one name
            means images (such as 'images') and another means masks (such as 'masks').
    """
    lowered = set(map(str.lower, names))
    if lowered & _PICTURES and lowered & _MASKS:
        raise DataError(
            f"{place}: {quote_names(names)} look like images and their segmentation masks, but "
            "data set 'folder' takes each folder for a class: set 'dataset' to 'masks' and 'task' "
            f"to 'segmentation', or keep only images, sorted by class into {LAYOUTS}"
        )
    if all(map(_YEAR.fullmatch, names)):
        raise DataError(
            f"{place}: the folders that would be classes are years ({quote_names(names)}): put the "
            f"images directly into the folder of their class ({LAYOUTS})"
        )


def check_no_class_folders(folders: Sequence[Path]) -> None:
    """Check that folders to be read as classes are not the folders of sites (hospitals).

    Folders look like sites if each has two or more subfolders with images at any depth, and the
    names of these subfolders are the same in all folders. They are then the real classes. A single
    folder passes.

    Args:
        folders: the folders. The caller ensures that at least one has images directly in it, which
            the error names.

    Raises:
        DataError: the folders look like sites, or a folder cannot be read.
    """
    below = []
    for folder in folders:
        below.append([inner.name for inner in subfolders(folder) if _has_pictures(inner)])
    # Sites have the same class folders; folders within classes are hardly ever the same
    are_alike = below.count(below[0]) == len(below)
    if len(folders) > 1 and len(below[0]) > 1 and are_alike:
        loose = next(filter(pictures, folders))
        raise DataError(
            f"{loose} has images next to folders of images ({quote_names(below[0])}), so it could "
            f"be a class or a site: move these images into one of {LAYOUTS}"
        )


def _has_pictures(folder: Path) -> bool:
    """Tell whether an image file exists at any depth below a folder."""
    return any(map(_is_picture, folder.rglob("*")))


def count_loose(folders: Iterable[Path]) -> dict[Path, int]:
    """Count the images that are directly in each folder, where no class labels them.

    Such images are not read. Images in subfolders do not count.

    Args:
        folders: the folders above the class folders.

    Returns:
        Folder -> number of images. Folders without images are left out.

    Raises:
        DataError: a folder cannot be read.
    """
    counts = {}
    for folder in folders:
        count = len(pictures(folder))
        if count:
            counts[folder] = count
    return counts


def count_unread(class_folder: Path) -> dict[str, int]:
    """Count the files in a class folder that are not read as images, by reason.

    Hidden files directly in the class folder do not count, but those in subfolders do.

    Returns:
        Reason -> number of files. A subfolder with files at any depth has the reason "in subfolder
        'NAME'". Other files have the reason "without an image's ending".

    Raises:
        DataError: the folder cannot be read.
    """
    reasons: Counter[str] = Counter()
    for path in entries(class_folder):
        if path.is_dir():
            files = sum(map(Path.is_file, path.rglob("*")))
            if files:
                reasons[f"in subfolder '{one_line(path.name, 60)}'"] = files
        elif not _is_picture(path):
            reasons["without an image's ending"] += 1
    return dict(reasons)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and not path.is_dir()


def quote_names(names: Sequence[str]) -> str:
    """Quote names for an error, such as "'a', 'b' and 'c'".

    Of more than five names, only the first five are quoted, as in "'a', 'b', 'c', 'd', 'e' and 3
    more". A name is shortened to 60 characters. There must be at least one name.
    """
    quoted = [f"'{one_line(name, 60)}'" for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        quoted.append(f"{len(names) - _MOST_NAMES} more")
    *all_but_last, last = quoted
    if not all_but_last:
        return last
    return f"{', '.join(all_but_last)} and {last}"
