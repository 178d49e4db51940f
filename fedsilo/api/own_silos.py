"""Writes a caller's own data as silos into the cache, where later runs find the data again.

Frames become tables with a schema, arrays the data set 'arrays', and pictures the data set
'images'. The folder's name is a digest of its files, so the same data give the same silos.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.atomic_files import scratch_folder
from fedsilo.core.files.sealed_folders import file_sha256, json_digest
from fedsilo.core.files.site_names import folder_name, is_visible, normalise_name, site_name_fault
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.datasets.silo.silos import SPLITS

if TYPE_CHECKING:
    from pandas import DataFrame

ALONE = "data"  # the name of the silo if the data are not sorted by site
_FOLDER = "own-silos"  # in the cache directory, but kept for good: fedsilo cannot make it again
_DIGITS = 16
_LONGEST_NAME = 255  # bytes of a folder's name
_TAKEN = "a DataFrame, a pair (X, y), a Dataset of PyTorch or one of Hugging Face"


def write_to_cache(silos: object, label: str, missing: str, cache: Path) -> tuple[str, Path]:
    """Write a caller's silos into the cache, in a folder named by a digest of its files.

    If the same data were written before, the existing folder is returned.

    Args:
        silos: site -> its data. Data without sites become one silo named 'data', which the setting
            'split.partition' can divide.
        label: the column with the labels in frames and in data sets of Hugging Face.
        missing: 'drop' rows with missing values from a frame, or 'impute' the values.
        cache: the cache directory.

    Returns:
        Values for the settings 'dataset' and 'data.dir', with which a run reads the data. The first
        is 'table', 'arrays' or 'images', and the second is the path of the folder.

    Raises:
        FedsiloError: the data are of an unknown kind, the sites' data are of different kinds, or
            the data cannot be used.
    """
    folder = cache / _FOLDER
    # Only for the owner, because these are patients' data
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with scratch_folder(folder, "written") as scratch:
        work = scratch / "files"
        work.mkdir(mode=0o700)
        dataset = write_silos(work, silos, label, missing)
        # Sorted, so that the digest does not depend on the order in which files were written
        parts = []
        for path in sorted(work.rglob("*")):
            if path.is_file():
                parts.append([str(path.relative_to(work)), file_sha256(path)])
        target = folder / json_digest(parts)[:_DIGITS]
        # Renaming is one step, so that a folder of this name is always complete
        try:
            work.rename(target)
        except OSError:  # the same data were written before
            if not target.is_dir():
                raise
    return dataset, target


def write_silos(folder: Path, silos: object, label: str, missing: str) -> str:
    """Write a caller's silos as files, and return the value of 'dataset' that reads them.

    The value is 'table', 'arrays' or 'images', and depends on the kind of the data.

    Args:
        folder: an existing, empty folder.
        silos: site -> its data, or data without sites.
        label: the column with the labels in frames and in data sets of Hugging Face.
        missing: 'drop' rows with missing values from a frame, or 'impute' the values.

    Raises:
        SettingError: ``missing`` is unknown, or the sites have different kinds of data. Also raised
            if all sites are named train, val or test, unless the data are pictures. These names are
            parts of a data set and not hospitals.
        DataError: the data cannot be used.
    """
    if missing not in ("drop", "impute"):
        raise SettingError(f"missing must be 'drop' or 'impute', but is '{missing}'")
    # Site -> its data in a form that can be written, which all sites must share
    plain: dict[str, Any] = {}
    kinds: dict[str, str] = {}  # kind -> the last site whose data have it
    for site, data in _name_silos(silos).items():
        kind, plain[site] = _convert_silo(site, data, label)
        kinds[kind] = site
    if len(kinds) > 1:
        (one, first), (two, second) = list(kinds.items())[:2]
        raise SettingError(f"silo '{first}' is {one} and '{second}' is {two}: give all in one form")
    # Only pictures may come in the parts of a data set
    if "pictures" not in kinds and plain.keys() <= set(SPLITS):
        raise SettingError(
            f"silos are named {', '.join(plain)}, but these are parts of a data set and not "
            "hospitals: join the parts of each hospital, and fedsilo splits them again"
        )
    if "tables" in kinds:
        from fedsilo.datasets.tables.frames import write_frames

        write_frames(folder, plain, str(label), missing)
        return "table"
    if "arrays" in kinds:
        from fedsilo.datasets.images.arrays import write_arrays

        write_arrays(folder, plain)
        return "arrays"
    _write_pictures(folder, plain)
    return "images"


def _name_silos(silos: object) -> dict[str, Any]:
    """Arrange a caller's data by the names of the silos: name -> data.

    Names are converted to strings in Unicode's form NFC. Data that are not a mapping become one
    silo named 'data'.

    Raises:
        SettingError: the mapping is empty, or a name is not allowed for a site. Also raised if two
            names are equal as strings, such as 1 and '1'.
    """
    if not isinstance(silos, Mapping):
        return {ALONE: silos}
    named = {normalise_name(str(name)): data for name, data in silos.items()}
    faults = list(filter(None, map(site_name_fault, named)))
    if not named:
        faults.append(f"silos is empty: give at least one silo, each {_TAKEN}")
    if len(named) < len(silos):
        faults.append(
            "silos has a name twice, as a number and as a text, or in two Unicode forms: rename one"
        )
    if faults:
        raise SettingError(faults[0])
    return named


def _write_pictures(folder: Path, silos: Mapping[str, Any]) -> None:
    """Write the pictures of each silo as PNG files, with manifests that list them.

    The files are ``<site>/<class>/<number>.png``. Data without sites are the site 'data', whose
    files are ``<class>/<number>.png``. A class whose name cannot be a folder's gets another folder
    name. A number is the position of the picture in its silo, from 0, with six digits. The setting
    ``dataset=images`` reads the manifests.

    Args:
        folder: the folder to write into.
        silos: site -> its (picture, class name) pairs.

    Raises:
        DataError: a silo is empty, a class name cannot be used, an object is not a picture, or all
            pictures together have only one class.
    """
    from fedsilo.datasets.images.folders import write_folder_manifests

    class_folders = _name_class_folders(silos)
    for site, pictures in silos.items():
        # Folders are named by site, unless a partition will make the sites
        own = folder
        if site != ALONE:
            own = folder / folder_name(site)
        for number, (picture, name) in enumerate(pictures):
            class_folder = own / class_folders[name]
            class_folder.mkdir(parents=True, exist_ok=True)
            upright = _make_upright(picture, f"silo '{site}', sample {number}")
            upright.save(class_folder / f"{number:06}.png")
    if len(class_folders) == 1:
        (name,) = class_folders
        raise DataError(f"silos have one class, {quote_value(name)}: a classifier needs two")
    write_folder_manifests(folder, {given: name for name, given in class_folders.items()})


def _name_class_folders(silos: Mapping[str, Any]) -> dict[str, str]:
    """Choose a folder name for each class: class -> name of its folder.

    A folder usually has the name of its class. A class whose name has a "/" or begins with "." gets
    a folder "class-1", "class-2" and so on instead, in sorted order of these classes. If another
    class has such a name itself, underscores are appended to the folder's name.

    Args:
        silos: site -> its (picture, class name) pairs.

    Raises:
        DataError: a class name is empty, longer than 255 bytes, or has an invisible character. Also
            raised if a silo has no pictures.
    """
    folders: dict[str, str] = {}
    for site, pictures in silos.items():
        if not pictures:
            raise DataError(f"silo '{site}' is empty: leave it out")
        folders.update((name, name) for _, name in pictures)
    odd = []
    for name in sorted(folders):
        if not is_visible(name) or not 0 < len(name.encode()) <= _LONGEST_NAME:
            raise DataError(
                f"class {quote_value(name)} must have 1 to {_LONGEST_NAME} bytes of characters "
                "that can be seen: rename the class"
            )
        if "/" in name or name.startswith("."):
            odd.append(name)
    for number, name in enumerate(odd, 1):
        folders[name] = f"class-{number}"
        # More underscores until no class has the name
        while folders[name] in folders:
            folders[name] += "_"
    return folders


def _make_upright(picture: Any, where: str) -> Any:
    """Turn a Pillow picture upright and convert it to RGB.

    The picture is turned as its EXIF data say. Without EXIF data it is not turned. ``where`` names
    the sample in the error.

    Raises:
        DataError: the object is not a Pillow picture, or has more than 8 bits per channel.
    """
    from PIL import Image, ImageOps

    from fedsilo.datasets.images.decoding import is_wide

    if not isinstance(picture, Image.Image) or is_wide(picture):
        raise DataError(
            f"{where} is not a picture of 8 bits per channel: convert it or leave it out"
        )
    return ImageOps.exif_transpose(picture).convert("RGB")


def _convert_silo(site: str, data: Any, label: str) -> tuple[str, Any]:
    """Convert a silo's data to one of three kinds that can be written as files.

    The data may be a pandas frame, a data set of Hugging Face or of PyTorch, or a pair (samples,
    labels).

    Args:
        site: the silo's name, for errors.
        data: the silo's data.
        label: the column with the labels. If the labels come separately, a new frame gets them in a
            column of this name.

    Returns:
        The kind and the converted data: 'tables' with a frame, 'arrays' with (samples, labels), or
        'pictures' with a list of (picture, class name). A frame is returned unchanged and
        unchecked.

    Raises:
        SettingError: the type of the data is unknown, or samples and labels differ in number or
            have wrong shapes.
        DataError: a label or the column of labels is missing.
    """
    import pandas as pd

    # A data set of Hugging Face is recognised by its methods, so its package is not imported
    if isinstance(data, pd.DataFrame):
        return "tables", data
    if hasattr(data, "features") and hasattr(data, "to_pandas"):
        return _convert_hugging_face(site, data, label)
    # Pairs come before data sets of PyTorch, because a pair has a length and items as well
    if isinstance(data, tuple | list) and len(data) == 2:
        samples, labels = data
        return _convert_pair(site, samples, labels, label)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str):
        return _convert_torch(site, data, label)
    raise SettingError(f"silo '{site}' is of type {type(data).__name__}: give {_TAKEN}")


def _convert_torch(site: str, data: Any, label: str) -> tuple[str, Any]:
    """Convert a PyTorch ``Dataset`` of (sample, label) pairs to pictures, arrays or a frame.

    The first sample decides. If it is a Pillow picture, the result is 'pictures' with a list of
    (picture, class name). The class names come from the attribute ``classes`` of the data set, if
    it has one. Otherwise the result is 'arrays' with (samples, labels), or 'tables' with a frame.

    Raises:
        SettingError: the data set is empty, an item is not a pair, or the samples differ in shape.
        DataError: a label is missing.
    """
    samples, labels = [], []
    for place in range(len(data)):
        item = data[place]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise SettingError(
                f"silo '{site}', item {place} must be a pair of a sample and its label, but is of "
                f"type {type(item).__name__}: give pairs"
            )
        samples.append(item[0])
        labels.append(item[1])
    if not samples:
        raise SettingError(f"silo '{site}' is empty: leave it out")
    if not hasattr(samples[0], "save"):  # not a Pillow picture
        return _convert_pair(site, tuple(samples), labels, label)
    called = _class_names(site, labels, getattr(data, "classes", None))
    return "pictures", list(zip(samples, called, strict=True))


def _class_names(site: str, labels: Iterable[Any], names: Any) -> list[str]:
    """Return the class name of each label, in order.

    A label that is a string is itself the name. A number is looked up in ``names``, which has the
    name of each class by its number. If ``names`` is None, the number as a string is the name.

    Raises:
        DataError: a label is missing, has several values, or is a number without a name.
    """
    called = []
    for place, label in enumerate(labels):
        name = _class_name(label, names)
        if name is None:
            raise DataError(
                f"silo '{site}', sample {place} must have a label of one class: leave the sample "
                "out"
            )
        called.append(name)
    return called


def _class_name(label: Any, names: Any) -> str | None:
    """Return the class name of a label, without spaces around it.

    A string is itself the name. A number is looked up in ``names``, which has the name of each
    class by its number. If ``names`` is None, the number as a string is the name. The result is
    None if the label is None or NaN, has several values, or is a number that ``names`` lacks, such
    as -1.
    """
    try:
        # item() accepts a tensor or array of one number, and fails for a label of several classes
        value = np.asarray(label).item()
        if isinstance(value, str):
            return value.strip()
        # NaN differs from itself; on the Hub, -1 means an unknown label
        if value is None or value != value or (names and value < 0):
            return None
        if names:
            return str(names[int(value)]).strip()
        return str(value)
    except (ValueError, IndexError, RuntimeError):  # several labels, or a number without a name
        return None


def _convert_pair(site: str, x: Any, y: Any, label: str) -> tuple[str, Any]:
    """Convert a silo's samples and labels to a data frame (tables) or to two arrays (images).

    Args:
        site: the silo's name, for errors.
        x: rows (n, features), as a data frame or an array, or images (n, height, width) or (n,
            channels, height, width). A tuple of n rows or images is stacked first.
        y: the labels, (n,) or (n, 1).
        label: the name of the label column in the data frame.

    Returns:
        For rows, 'tables' and a data frame with a column for each feature and the column ``label``.
        The features of an array are named x0, x1, and so on. For images, 'arrays' and the pair of
        images and labels. If the labels have the dtype object, they become strings.

    Raises:
        SettingError: the samples are neither rows nor images or differ in shape, or the numbers of
            samples and labels differ.
        DataError: a label of an image is missing. The labels of rows are not checked here.
    """
    import pandas as pd

    try:
        # Samples of a PyTorch data set come one by one, perhaps as tensors
        if isinstance(x, tuple):
            x = list(map(np.asarray, x))
        samples = x
        if not isinstance(x, pd.DataFrame):
            samples = np.asarray(x)
        labels = np.atleast_1d(np.asarray(y))
    except (ValueError, TypeError, RuntimeError) as error:  # rows differ in length, for example
        raise SettingError(f"silo '{site}' is not an array ({one_line(error, 200)})") from None
    # A column of labels, (n, 1), is accepted as (n,)
    if labels.size == len(labels):
        labels = labels.reshape(-1)
    if len(samples) != len(labels) or samples.ndim not in (2, 3, 4) or labels.ndim != 1:
        raise SettingError(
            f"silo '{site}' has samples {samples.shape} and labels {labels.shape}: samples are "
            "rows or images, and each needs a label"
        )
    if samples.ndim > 2:
        _class_names(site, labels, None)  # raises an error if a label is missing
        if labels.dtype == object:
            labels = labels.astype(str)
        return "arrays", (samples, labels)
    if not isinstance(samples, pd.DataFrame):
        samples = pd.DataFrame(samples).add_prefix("x")
    return "tables", samples.assign(**{label: labels})


def _convert_hugging_face(site: str, data: Any, label: str) -> tuple[str, Any]:
    """Convert a ``Dataset`` of Hugging Face to pictures or to a frame.

    If the data set has columns of images, the result is 'pictures' with a list of (picture, class
    name). Only the first such column and the labels are used. Otherwise the result is 'tables' with
    a frame of all columns. If the classes have names, the names replace the numbers in the label
    column of the frame. A missing label is then None.

    Raises:
        DataError: the column ``label`` does not exist, or a picture has no label.
    """
    features = data.features
    if label not in features:
        shown = ", ".join(features)
        raise DataError(
            f"silo '{site}' has no column '{label}' of labels, but {shown}: name it by label="
        )
    names = getattr(features[label], "names", None)
    images = image_columns(features)
    if images:
        pictures, labels = [], []
        for row in data:
            pictures.append(row[images[0]])
            labels.append(row[label])
        called = _class_names(site, labels, names)
        return "pictures", list(zip(pictures, called, strict=True))
    frame: DataFrame = data.to_pandas()
    if names:
        frame[label] = [_class_name(number, names) for number in frame[label]]
    return "tables", frame


def image_columns(features: Mapping[str, Any]) -> list[str]:
    """List the names of the columns that hold images, in the order of the data set.

    ``features`` maps each column of a Hugging Face data set to its feature object. A column holds
    images if the Python class of the object is named 'Image'. Only this name is compared, so the
    package of Hugging Face need not be imported.
    """
    return [name for name, kind in features.items() if type(kind).__name__ == "Image"]
