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

    ``silos`` maps sites to data, or has data without sites. ``label`` is the column with the
    labels. ``missing`` is 'drop' or 'impute', for a frame's missing values.

    Returns:
        The settings 'dataset' and 'data.dir', which read the data.

    Raises:
        FedsiloError: the data cannot be used.
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

    The value is 'table', 'arrays' or 'images'. ``silos`` maps sites to data, or has data without
    sites. ``label`` is the column with the labels. ``missing`` is 'drop' or 'impute', for a frame's
    missing values.

    Raises:
        FedsiloError: the data cannot be used.
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

    Names become strings in Unicode's form NFC. Data that are not a mapping become one silo 'data'.
    An empty mapping, a forbidden name, or a name that occurs twice is refused.
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

    ``silos`` maps each site to its (picture, class name) pairs. The files are
    ``<site>/<class>/<number>.png``, numbered from 0. Data without sites have no folder ``<site>``.
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

    ``silos`` maps each site to its (picture, class name) pairs. A folder has the name of its class.
    If the name has a "/" or begins with ".", the folder is "class-1" or the like.
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
    """Turn a Pillow picture upright, as its EXIF data say, and convert it to RGB.

    Any other object, or a picture with more than 8 bits per channel, is refused. ``where`` names
    the sample in the error.
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

    The result is 'tables' with a frame, 'arrays' with (samples, labels), or 'pictures' with a list
    of (picture, class name). ``label`` is the column with the labels.
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

    Pillow pictures become 'pictures' with a list of (picture, class name). The data set's
    ``classes`` name the classes. Other samples become 'arrays' with (samples, labels), or 'tables'
    with a frame.
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

    A string is itself the name. A number is looked up in ``names``, which has the class names by
    number. If ``names`` is None, the name is the number. A label without a name is refused.
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

    A string is itself the name. A number is looked up in ``names``, which has the class names by
    number. If ``names`` is None, the name is the number. None means no single class.
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

    Rows ``x`` are (n, features), and images (n, [channels,] height, width). ``y`` has n labels,
    which the frame gets as the column ``label``. Features of an array are named x0, x1 and so on.
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

    If there are columns of images, the result is 'pictures', with pairs of the first such column
    and the class name. Otherwise it is 'tables' with a frame of all columns.
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
