"""The user's own arrays: a file ``SITE.npz`` for each site in the data directory.

It holds ``x``, the samples (n, channels, height, width) or (n, height, width), as 8-bit numbers or
as floats that networks take as they are; ``y`` (n,), whole numbers from 0; and ``classes``, the
classes' names, which all sites share.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.array_files import DAMAGES, kind_of, read_arrays
from fedsilo.core.files.locations import Places, data_folder
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, split_rows
from fedsilo.datasets.silo.silos import DataSet, ImageReader, Silo, Split, cached_silo, save_silo

Arrays = tuple[npt.NDArray[Any], npt.NDArray[np.int64], list[str]]

_SHARE = 0.25  # share of test samples if there are no test folds
_MOST_BYTES = 2**34  # largest size of an array
_MAKER = 1  # raise it when the same settings make other arrays, so that no old cache is read


class OwnArrays(DataSet):
    """``arrays``: a site needs its own file only."""

    name = "arrays"
    origin = "own"
    silos_by_files = True
    settings = frozenset(SPLIT_KEYS)
    headline = ("balanced-accuracy", "accuracy", "auc", "calibration-error")

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the files, in alphabetical order."""
        folder = self._folder(places)
        if not (names := sorted(path.stem for path in folder.glob("*.npz"))):
            raise DataError(f"{folder} holds no SITE.npz: write one with x, y and classes")
        return names

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that reads a ``.npy`` file as one sample of the form of ``x``."""
        x = _read(self._folder(places) / f"{site}.npz")[0]
        forms = (x.shape[1:], x.shape[2:]) if x.shape[1] == 1 else (x.shape[1:],)

        def read(path: Path) -> npt.NDArray[Any]:
            # Opening a pipe would wait for ever
            if fault := file_fault(path):
                raise BrokenImageError(fault)
            try:
                sample = np.load(path, allow_pickle=False)
            except (OSError, *DAMAGES):
                sample = None
            # numpy opens an archive of arrays too, but returns another object
            if not isinstance(sample, np.ndarray):
                raise BrokenImageError("is not a NumPy array (.npy)")
            with np.errstate(over="ignore"):  # beyond float32 a number becomes infinite
                own = sample.astype(np.float32) if sample.dtype.kind == "f" else sample
            if own.dtype != x.dtype or own.shape not in forms:
                raise BrokenImageError(f"is {kind_of(sample)}, and samples are {x.shape[1:]}")
            if not np.isfinite(own).all():  # x has none either
                raise BrokenImageError("contains non-finite numbers")
            return own.reshape(x.shape[1:])

        return read

    def _folder(self, places: Places) -> Path:
        return data_folder(places, self.name, "with a file SITE.npz for each site")

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Read, split and cache a site's arrays."""
        path = self._folder(places) / f"{name}.npz"
        stamp, cut = path.stat(), [as_mapping(settings)[key] for key in sorted(SPLIT_KEYS)]
        x, y, classes = _read(path)
        facts = [_MAKER, name, str(path.resolve()), stamp.st_size, stamp.st_mtime_ns, cut]

        def fill(folder: Path) -> None:
            rows = split_rows(y, settings, _SHARE, settings.fold_seed, str(path))
            if len(rows.train) < 2:
                raise DataError(f"{path}: {len(rows.train)} training samples are left of {len(y)}")
            parts = {part: Split.of(x[own], y[own]) for part, own in vars(rows).items()}
            schema = json_digest([classes, x.shape[1:], str(x.dtype)])
            known = {"name": name, "distribution": name, "classes": classes, "schema": schema}
            save_silo(folder, parts, known)

        folder = places.cache / f"{self.name}-silos"
        return cached_silo(folder, name, facts, len(classes), fill)


def _read(path: Path) -> Arrays:
    return _check_arrays(str(path), **read_arrays(path, ("x", "y", "classes"), _MOST_BYTES))


def _check_arrays(
    where: str, x: npt.NDArray[Any], y: npt.NDArray[Any], classes: npt.NDArray[Any]
) -> Arrays:
    """Check a site's arrays; return samples (n, channels, height, width), labels (n,) and names."""
    if x.dtype.kind not in "fu" or x.ndim not in (3, 4) or (x.dtype.kind == "u" and x.itemsize > 1):
        raise DataError(
            f"{where}: x is {kind_of(x)}, and must be 8-bit numbers or floats (n, channels, "
            "height, width)"
        )
    with np.errstate(over="ignore"):  # beyond float32 a number becomes infinite
        x = x if x.dtype == np.uint8 else x.astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{where}: x contains non-finite numbers: remove those samples")
    names = [str(name) for name in classes.tolist()] if classes.ndim == 1 else []
    if classes.dtype.kind != "U" or len(set(names)) < max(2, len(names)):
        raise DataError(
            f"{where}: classes is {kind_of(classes)}, and must be two names or more, each once"
        )
    right = y.shape == (len(x),) and y.dtype.kind in "iu"
    if not right or (len(y) and not 0 <= y.min() <= y.max() < len(classes)):
        raise DataError(
            f"{where}: y is {kind_of(y)}, and must be a whole number from 0 to {len(classes) - 1} "
            f"for each of {len(x)} samples"
        )
    samples = x[:, None] if x.ndim == 3 else x
    return samples, y.astype(np.int64), names


def write_arrays(
    folder: Path, silos: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]
) -> None:
    """Write one file per site with its samples and labels; each different label is a class.

    Raises:
        DataError: the forms of samples differ between sites, or a sample has no label.
    """
    every = np.unique(np.concatenate([np.asarray(y).reshape(-1) for _, y in silos.values()]))
    classes = np.array([str(value) for value in every.tolist()])
    first, form = "", None
    for site, (x, y) in silos.items():
        x = _channels_first(np.asarray(x))
        first, form = (first, form) if form else (site, x.shape[1:])
        if len(y) != len(x) or np.ndim(y) != 1 or x.shape[1:] != form:
            raise DataError(
                f"silo '{site}' has samples {x.shape} and labels {np.shape(y)}: each sample needs "
                f"a label, and the form {form} that those of '{first}' have"
            )
        places = np.searchsorted(every, y)
        _check_arrays(f"silo '{site}'", x, places, classes)  # refused before a run begins
        np.savez(folder / f"{site}.npz", x=x, y=places, classes=classes)


def _channels_first(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Move the channels of images to the front if they are last."""
    # 4 is the most channels an image has, so that only the last axis can be the channels then
    last = x.ndim == 4 and x.shape[1] > 4 >= x.shape[-1]
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if last else x


ARRAYS = OwnArrays()
