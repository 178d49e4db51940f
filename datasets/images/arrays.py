"""The user's own arrays: one file ``SITE.npz`` per site in the data directory.

SITE is the site's name, or its ``folder_name`` if fedsilo wrote the file.

The file holds three arrays:

- ``x``: samples (n, channels, height, width) or (n, height, width), as uint8 or as floats. Networks
  take floats unscaled.
- ``y``: the labels of the task. They are class indices from 0 (n,), numbers (n,) for regression, 0
  and 1 (n, findings) for several findings, or times and events (n, 2) for survival.
- ``classes``: the names of the classes or findings, or the name of the outcome or event; equal at
  all sites.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.array_files import DAMAGES, kind_of, read_arrays
from fedsilo.core.files.locations import Places, data_folder
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.files.site_names import find_by_site, folder_name, is_visible, normalise_name
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, SURVIVAL
from fedsilo.datasets.images.decoding import BrokenImageError, check_file
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, split_rows, split_values
from fedsilo.datasets.silo.silos import (
    DataSet,
    ImageReader,
    Silo,
    Split,
    cached_silo,
    save_silo,
    strata_of,
)
from fedsilo.models.tasks.task import Task, task_named, task_of

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any], list[str]]

_SHARE = 0.25  # share of test samples if there are no test folds
_MOST_BYTES = 2**34  # largest size of an array
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read


class OwnArrays(DataSet):
    """The data set ``arrays``; a site needs only its own file."""

    name = "arrays"
    origin = "own"
    silos_by_files = True
    settings = frozenset({"data.standardise", *SPLIT_KEYS})
    tasks = (CLASSIFICATION, REGRESSION, MULTI_LABEL, SURVIVAL)
    headline = ("balanced-accuracy", "accuracy", "auc", "calibration-error")

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the sites that have an ``.npz`` file, in alphabetical order.

        A file is named after its site. Special characters may be encoded as ``folder_name`` does
        it: ``S+fc+d.npz`` belongs to the site 'Süd'. Only the data directory in ``places`` matters.

        Raises:
            DataError: the data directory has no ``.npz`` file, a file's name cannot be a site's
                name, or two files belong to one site.
        """
        folder = self._folder(places)
        names = sorted(_find_files(folder))
        if not names:
            raise DataError(f"{folder} has no file SITE.npz: write one with x, y and classes")
        return names

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that reads a new sample for a site from a ``.npy`` file.

        The function takes a path and returns an array (channels, height, width). It raises
        ``BrokenImageError`` if the file cannot be read, or if it contains NaN or infinity. The
        sample must also have the shape and type of the samples in the site's array ``x``.

        Raises:
            DataError: the file with the site's arrays is missing or invalid.
        """
        x = _read(self._file(site, places), task_of(settings))[0]
        return lambda path: _read_sample(path, x.shape[1:], x.dtype)

    def _folder(self, places: Places) -> Path:
        return data_folder(places, self.name, "with a file SITE.npz for each site")

    def _file(self, site: str, places: Places) -> Path:
        """Return the path of a site's file, which may be missing."""
        folder = self._folder(places)
        return _find_files(folder).get(site, folder / f"{folder_name(site)}.npz")

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Open a site's silo in the cache, or create it there from the site's arrays.

        The arrays are read in both cases. If 'split.test-folds' is 0, a random quarter of the
        samples are test samples. Samples with equal bytes stay in the same part (train, val or
        test), and the site's log has their number.

        Raises:
            DataError: the arrays are invalid, or the split leaves fewer than 2 training samples.
        """
        path = self._file(name, places)
        stamp = path.stat()
        task = task_of(settings)
        x, y, classes = _read(path, task)
        facts = [
            _MAKER,
            name,
            str(path.resolve()),
            stamp.st_size,
            stamp.st_mtime_ns,
            split_values(settings),
        ]
        if task.name != CLASSIFICATION:
            facts.append(task.name)

        def fill(folder: Path) -> None:
            # Rows are grouped by content, so that a copy of a training sample is never a test
            # sample
            contents = _number_contents(x)
            copies = len(y) - len(set(contents))
            groups = None
            notes = []
            if copies:
                groups = [f"sample {number}" for number in contents]
                notes.append(
                    f"{path}: {copies} of {len(y)} samples are copies of another; a split keeps "
                    "copies in one part"
                )
            strata = strata_of(y, task.name)
            rows = split_rows(strata, settings, _SHARE, settings.fold_seed, str(path), groups)
            if len(rows.train) < 2:
                raise DataError(
                    f"{path}: {len(rows.train)} training samples are left of {len(y)}, but at "
                    "least 2 are needed: add samples, or take fewer for test and validation"
                )
            parts = {part: Split.of(x[own], y[own]) for part, own in vars(rows).items()}
            schema = json_digest([classes, x.shape[1:], str(x.dtype)])
            known = {"name": name, "distribution": name, "classes": classes, "schema": schema}
            known["task"] = task.name
            save_silo(folder, parts, known, notes)

        folder = places.cache / f"{self.name}-silos"
        return cached_silo(folder, name, facts, len(classes), fill)


def _find_files(folder: Path) -> dict[str, Path]:
    """Find each site's ``.npz`` file in a folder: site -> path, in the order of the paths.

    A file is named after its site. Special characters may be encoded as ``folder_name`` does it:
    ``S+fc+d.npz`` and ``Süd.npz`` both belong to the site 'Süd'. Without such files the result is
    empty.

    Raises:
        DataError: a file's name cannot be a site's name, or two files belong to one site.
    """
    return find_by_site({path.stem: path for path in sorted(folder.glob("*.npz"))})


def _number_contents(x: npt.NDArray[Any]) -> list[int]:
    """Number the samples of ``x`` (n, ...) so that only equal samples have the same number.

    The list has one number per sample. Numbers start at 0, in the order of first appearance.
    Samples are compared byte by byte.
    """
    numbers: dict[bytes, int] = {}
    contents = []
    for sample in x:
        # A digest, because the samples themselves may fill the memory
        digest = hashlib.sha256(np.ascontiguousarray(sample).data).digest()
        contents.append(numbers.setdefault(digest, len(numbers)))
    return contents


def _read_sample(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read a ``.npy`` file as one sample, and check its shape and type against those of a site.

    Args:
        path: the file.
        shape: the expected shape, (channels, height, width). For one channel, the file may also
            have (height, width).
        dtype: the expected type. Floats of any width in the file count as float32.

    Returns:
        The sample, with the shape ``shape`` and the type ``dtype``.

    Raises:
        BrokenImageError: the file is missing or not an array, the sample has another shape or type,
            or the sample contains NaN or infinity.
    """
    check_file(path)
    try:
        sample = np.load(path, allow_pickle=False)
    except (OSError, *DAMAGES):
        sample = None
    # numpy opens an archive of arrays too, but returns another object
    if not isinstance(sample, np.ndarray):
        raise BrokenImageError("is not a NumPy array (.npy)")
    numbers = sample
    if sample.dtype.kind == "f":
        numbers = _as_float32(sample)
    is_flat = shape[0] == 1 and sample.shape == shape[1:]
    fault = ""
    if numbers.dtype != dtype or (sample.shape != shape and not is_flat):
        fault = f"is {kind_of(sample)}, but must be a sample {shape} like the site's"
    elif not np.isfinite(numbers).all():  # the same rule as for a site's own arrays
        fault = "contains non-finite numbers"
    if fault:
        raise BrokenImageError(fault)
    return numbers.reshape(shape)


def _as_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Convert an array to float32. Numbers beyond the range of float32 become infinite.

    Later checks refuse infinite numbers.
    """
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _read(path: Path, task: Task) -> Arrays:
    arrays = read_arrays(path, ("x", "y", "classes"), _MOST_BYTES)
    return _check_arrays(str(path), task, **arrays)


def _check_arrays(
    where: str, task: Task, x: npt.NDArray[Any], y: npt.NDArray[Any], classes: npt.NDArray[Any]
) -> Arrays:
    """Check the three arrays of a site, and convert them to shapes and types that a silo stores.

    Args:
        where: the text with which an error begins, such as the file's path.
        task: the task, which decides the form of the labels.
        x: the samples, (n, channels, height, width) or (n, height, width), floats or uint8.
        y: the labels, such as class indices (n,) for classification.
        classes: the names of the classes or findings, or of a numeric outcome.

    Returns:
        The samples as (n, channels, height, width), float32 or uint8. The labels have the type
        ``task.label_type``. The names are in the Unicode form NFC.

    Raises:
        DataError: an array has a wrong type or shape, a sample has NaN or infinity, a name is
            invalid or appears twice, or a label is invalid for the task.
    """
    if x.dtype.kind == "f":
        x = _as_float32(x)
    fault = _sample_fault(x) or _class_fault(classes, task.fewest_names)
    if not fault:
        wrong = task.label_fault(y, len(x), classes.tolist())
        fault = wrong and f"y {wrong}"
    if fault:
        raise DataError(f"{where}: {fault}")
    if x.ndim == 3:
        x = x[:, None]
    names = [normalise_name(str(name)) for name in classes.tolist()]
    return x, y.astype(task.label_type), names


def _sample_fault(x: npt.NDArray[Any]) -> str:
    """Explain why ``x`` is not a valid array of samples, or return '' if it is one.

    The text ends an error message, and begins with "x". The array must be float32 or uint8, with 3
    or 4 dimensions, and finite. An empty array is valid.
    """
    if x.dtype not in (np.float32, np.uint8) or x.ndim not in (3, 4):
        return (
            f"x must be 8-bit numbers or floats (n, channels, height, width), but is {kind_of(x)}"
        )
    if not np.isfinite(x).all():
        return "x contains non-finite numbers: remove those samples"
    return ""


def _class_fault(classes: npt.NDArray[Any], fewest: int) -> str:
    """Explain why an array is not a list of distinct class names, or return '' if it is one.

    The explanation is the end of an error message. The array must be one-dimensional, and contain
    at least ``fewest`` strings. The strings must differ even in the Unicode form NFC. They must not
    contain characters that show nothing, such as control characters.
    """
    are_names = classes.ndim == 1 and classes.dtype.kind == "U"
    names = set(map(normalise_name, map(str, classes.reshape(-1).tolist())))
    if not are_names or len(classes) < fewest or len(names) < len(classes):
        return f"classes must be {fewest} names or more, each once, but is {kind_of(classes)}"
    if not all(map(is_visible, names)):
        return "a name in classes has a character that cannot be seen: rename the class"
    return ""


def write_arrays(
    folder: Path, silos: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]
) -> None:
    """Write each site's samples and labels to a file ``SITE.npz``, with class indices as labels.

    The classes are the distinct labels of all sites together, in ascending order. A class's name is
    its label as a string.

    Args:
        folder: an existing folder. Files of the same names are replaced.
        silos: site -> (samples, labels), at least one site. Channels on the last axis are moved to
            the second axis (``_channels_first``).

    Raises:
        DataError: the samples' shapes differ between sites, a site does not have one label per
            sample, or its arrays are invalid. The files of the sites before the faulty one are then
            already written.
    """
    # The labels of all sites, ascending, so that a label has the same number everywhere
    every = np.unique(np.concatenate([np.asarray(y).reshape(-1) for _, y in silos.values()]))
    classes = np.array(list(map(str, every.tolist())))
    first = next(iter(silos))
    shape = _channels_first(np.asarray(silos[first][0])).shape[1:]
    for site, (x, y) in silos.items():
        x = _channels_first(np.asarray(x))
        if len(y) != len(x) or np.ndim(y) != 1 or x.shape[1:] != shape:
            raise DataError(
                f"silo '{site}' has samples {x.shape} and labels {np.shape(y)}, but each sample "
                f"needs one label and the shape {shape}, as at '{first}': make them alike"
            )
        places = np.searchsorted(every, y)
        task = task_named(CLASSIFICATION)
        _check_arrays(f"silo '{site}'", task, x, places, classes)  # refused before a run begins
        np.savez(folder / f"{folder_name(site)}.npz", x=x, y=places, classes=classes)


def _channels_first(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Move the channels of image samples from the last axis to the second axis, if they are last.

    They are last if there are four axes, the last axis has at most 4 entries, and the second axis
    has more than 4. In any other case ``x`` itself is returned.
    """
    # 4 is the most channels an image has, so only the last axis can be the channels then
    are_last = x.ndim == 4 and x.shape[1] > 4 >= x.shape[-1]
    if not are_last:
        return x
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


ARRAYS = OwnArrays()
