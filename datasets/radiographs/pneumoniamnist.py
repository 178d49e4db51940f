"""PneumoniaMNIST: 5,856 chest X-rays of 28x28 pixels (Yang et al. 2023), cut into three vendors.

MedMNIST's own split is kept: its training, validation and test images are each dealt out to the
sites class by class, and each site renders its images by its vendor's profile.
"""

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.io.public_files import public_data
from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.datasets.radiographs.decoding import as_int16, resize
from fedsilo.datasets.radiographs.dicom import read_radiograph
from fedsilo.datasets.radiographs.mammography import HEADLINE
from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP
from fedsilo.datasets.silo.silos import (
    SPLITS,
    DataSet,
    ImageReader,
    Silo,
    Split,
    cached_silo,
    save_silo,
)
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping

CLASSES = ("normal", "pneumonia")

_PROFILES = {"vendor-a": SHOULDERED, "vendor-b": SIGMOID, "vendor-c": STEEP}
_ADVICE = "run 'fedsilo fetch pneumoniamnist --data-dir DIR'"
_FILE = "pneumoniamnist.npz"
_SIDE = 28  # pixels
_MAKER = 1  # raise it when the same settings make other arrays, so that no old cache is read
_MOST_BYTES = 60_000 * _SIDE**2  # of a part's images, ten times what there are
_KINDS = ("images", "labels")
# What numpy lets through of damaged headers, of its own and of Python's tokenizer
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, MemoryError),
    *(RecursionError, SyntaxError, tokenize.TokenError),
)

Labelled = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class PneumoniaMnist(DataSet):
    """``pneumoniamnist``: a site needs the complete file."""

    name = "pneumoniamnist"
    settings = frozenset(
        {"image-size", "fold-seed", "use-test", "sample-share", "intensity-profiles"}
    )
    headline = HEADLINE

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the three vendors."""
        return list(_PROFILES)

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return the reading of a grey file or DICOM of 8 bits, rendered by the site's profile."""
        size = settings.image_size or _SIDE
        profile = _PROFILES.get(site) if settings.intensity_profiles else None

        def read(path: Path) -> npt.NDArray[Any]:
            picture = resize(read_radiograph(path, 8), size, size)
            if profile:
                key = derive_seed(0, "vendor-noise", site, path.name)
                picture = profile.render(picture, np.random.default_rng(key))
            return as_int16(picture)[None]

        return read

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Cut the silo from the file, once."""
        import torch

        path = public_data()[self.name].find(places) / _FILE
        stamp, values = path.stat(), as_mapping(settings)
        chosen = {key: values[key] for key in sorted(self.settings)}
        facts = [_MAKER, name, str(path.resolve()), stamp.st_size, stamp.st_mtime_ns, chosen]
        size = settings.image_size or _SIDE

        def fill(folder: Path) -> None:
            parts = {}
            for part, (images, labels) in read_parts(path).items():
                rows = _rows(name, part, labels, settings)
                made = np.empty((len(rows), 1, size, size), dtype=np.int16)
                for place, row in enumerate(rows):
                    picture = resize(images[row] / np.float32(255), size, size)
                    if settings.intensity_profiles:
                        key = derive_seed(0, "vendor-noise", name, part, int(row))
                        picture = _PROFILES[name].render(picture, np.random.default_rng(key))
                    made[place, 0] = as_int16(picture)
                parts[part] = Split(torch.from_numpy(made), torch.from_numpy(labels[rows]))
            facts = {"name": name, "distribution": name, "classes": CLASSES}
            save_silo(folder, parts, {**facts, "schema": json_digest([CLASSES, size])})

        folder = places.cache / "pneumoniamnist-silos"
        return cached_silo(folder, name, facts, len(CLASSES), fill)


def _rows(
    site: str, part: str, labels: npt.NDArray[np.int64], settings: CommonSettings
) -> npt.NDArray[np.int64]:
    """Return a site's images of a part: of each class every third, in random order."""
    dealt = []
    for label in range(len(CLASSES)):
        key = derive_seed(settings.fold_seed, "pneumoniamnist", part, label)
        shuffled = np.random.default_rng(key).permutation(np.flatnonzero(labels == label))
        own = shuffled[list(_PROFILES).index(site) :: len(_PROFILES)]
        dealt.append(own[: max(1, round(settings.sample_share * len(own)))])
    rows = np.sort(np.concatenate(dealt))
    return rows[:0] if part == "test" and not settings.use_test else rows


def read_parts(path: Path) -> dict[str, Labelled]:
    """Return each part's images (n, 28, 28) uint8 and labels (n,), by the names of ``SPLITS``.

    Raises:
        DataError: the file is damaged, or an array is missing or of another kind.
    """
    try:
        arrays = _arrays(path, [f"{part}_{kind}" for part in SPLITS for kind in _KINDS])
        return {part: _labelled(path, part, arrays) for part in SPLITS}
    except DataError as error:
        raise DataError(f"{error}; {_ADVICE}") from None


def _arrays(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of an npz file, without pickles and none larger than a part can be."""
    try:
        with zipfile.ZipFile(path) as archive:  # a small file may unpack to any size
            large = {e.filename for e in archive.infolist() if e.file_size > _MOST_BYTES}
        if large := large & {f"{name}.npy" for name in names}:
            raise DataError(f"{path}: {min(large)} is larger than {_MOST_BYTES} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            for name in names:
                if name not in arrays.files:
                    raise DataError(f"{path}: array '{name}' is missing")
            return {name: arrays[name] for name in names}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except _DAMAGES as error:
        raise DataError(f"{path} is damaged or no npz file ({one_line(error, 100)})") from None
    except (NotImplementedError, RuntimeError):  # other compressions, a password
        raise DataError(f"{path} is packed in a way that numpy does not write") from None


def _labelled(path: Path, part: str, arrays: dict[str, npt.NDArray[Any]]) -> Labelled:
    """Check a part's arrays; each site needs an image of each class."""
    images, labels = (arrays[f"{part}_{kind}"] for kind in _KINDS)
    right = isinstance(images, np.ndarray) and images.dtype == np.uint8
    if not right or images.shape[1:] != (_SIDE, _SIDE):
        raise DataError(
            f"{path}: {part}_images is {_kind_of(images)}, and must be uint8 (n, {_SIDE}, {_SIDE})"
        )
    if (
        not isinstance(labels, np.ndarray)
        or labels.dtype.kind not in "iu"
        or (labels.shape not in ((len(images),), (len(images), 1)))
    ):
        raise DataError(
            f"{path}: {part}_labels is {_kind_of(labels)}, and must be a whole number for each of "
            f"{len(images)} images"
        )
    flat = labels.reshape(-1).astype(np.int64)
    counts = [int((flat == label).sum()) for label in range(len(CLASSES))]
    if sum(counts) < len(flat) or min(counts) < len(_PROFILES):
        raise DataError(
            f"{path}: {part}_labels must be 0 or 1, each at least {len(_PROFILES)} times: there "
            f"are {counts} of {len(flat)}"
        )
    return images, flat


def _kind_of(array: Any) -> str:
    """Say what an archive's member is; numpy returns one that is no array as bytes."""
    known = isinstance(array, np.ndarray)
    return one_line(f"{array.dtype} {array.shape}", 100) if known else "no array"


PNEUMONIAMNIST = PneumoniaMnist()
