"""PneumoniaMNIST: 5,856 chest X-rays of 28x28 pixels (Yang et al. 2023), cut into three vendors.

MedMNIST's own split is kept: its training, validation and test images are each dealt out to the
sites class by class, and each site renders its images by its vendor's profile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.images.dataset import check_image_size
from fedsilo.datasets.io.array_files import Wanted, read_arrays
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
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping

CLASSES = ("normal", "pneumonia")

_PROFILES = {"vendor-a": SHOULDERED, "vendor-b": SIGMOID, "vendor-c": STEEP}
_ADVICE = "run 'fedsilo fetch pneumoniamnist --data-dir DIR'"
_FILE = "pneumoniamnist.npz"
_SIDE = 28  # pixels
_MAKER = 1  # raise it when the same settings make other arrays, so that no old cache is read
_MOST = 60_000  # images of a part, ten times what there are
_ARRAYS = {
    "images": Wanted("u", 1, ((None, _SIDE, _SIDE),), _MOST, f"uint8 (n, {_SIDE}, {_SIDE})"),
    "labels": Wanted("iu", 8, ((None,), (None, 1)), _MOST, "a whole number for each image"),
}

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

    def check(self, settings: CommonSettings) -> None:
        """Refuse images too small."""
        check_image_size(settings)

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
    wanted = {f"{part}_{kind}": what for part in SPLITS for kind, what in _ARRAYS.items()}
    try:
        arrays = read_arrays(path, wanted)
    except DataError as error:
        raise DataError(f"{error}; {_ADVICE}") from None
    return {part: _labelled(path, part, arrays) for part in SPLITS}


def _labelled(path: Path, part: str, arrays: dict[str, npt.NDArray[Any]]) -> Labelled:
    """Check a part's arrays; each site needs an image of each class."""
    images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    if len(labels) != len(images):
        raise DataError(
            f"{path}: {part}_labels is {labels.dtype} {labels.shape}, and must be a whole number "
            f"for each of {len(images)} images; {_ADVICE}"
        )
    flat = labels.reshape(-1).astype(np.int64)
    counts = [int((flat == label).sum()) for label in range(len(CLASSES))]
    if sum(counts) < len(flat) or min(counts) < len(_PROFILES):
        raise DataError(
            f"{path}: {part}_labels must be 0 or 1, each at least {len(_PROFILES)} times: there "
            f"are {counts} of {len(flat)}; {_ADVICE}"
        )
    return images, flat


PNEUMONIAMNIST = PneumoniaMnist()
