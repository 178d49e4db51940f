"""PneumoniaMNIST: 5,856 chest X-rays of 28x28 pixels (Yang et al. 2023), cut into three vendors.

MedMNIST's own split is kept: its training, validation and test images are each dealt out to the
sites class by class, and each site renders its images by its vendor's profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.images.dataset import check_image_size
from fedsilo.datasets.io.array_files import Wanted, read_arrays
from fedsilo.datasets.io.digests import json_digest
from fedsilo.datasets.io.locations import Places, PublicFiles, RemoteFile, find_files
from fedsilo.datasets.radiographs.dataset import HEADLINE
from fedsilo.datasets.radiographs.decoding import as_int16, resize
from fedsilo.datasets.radiographs.dicom import read_radiograph
from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP
from fedsilo.datasets.silo.cache import cached_silo
from fedsilo.datasets.silo.silos import (
    SPLITS,
    DataSet,
    ImageReader,
    Silo,
    Split,
    no_such_silo,
    save_silo,
)
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping

CLASSES = ("normal", "pneumonia")

_PROFILES = {"vendor-a": SHOULDERED, "vendor-b": SIGMOID, "vendor-c": STEEP}
_FILE = RemoteFile("pneumoniamnist.npz", "28209eda62fecd6e6a2d98b1501bb15f")
_SIDE = 28  # pixels
_MAKER = 1  # raise it when the same settings make other arrays, so that no old cache is read
_MOST = 60_000  # images of a part, ten times what there are
_ARRAYS = {
    "images": Wanted("u", 1, ((None, _SIDE, _SIDE),), _MOST, f"uint8 (n, {_SIDE}, {_SIDE})"),
    "labels": Wanted("iu", 8, ((None,), (None, 1)), _MOST, "a whole number for each image"),
}

Labelled = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class _MedMnistFiles:
    """The public file, as MedMNIST publishes it."""

    name: str = "pneumoniamnist"
    folder: str = "pneumoniamnist"
    url: str = "https://zenodo.org/records/10519652/files/"
    licence: str = "CC BY 4.0"
    terms: str = ""
    files: tuple[RemoteFile, ...] = (_FILE,)


class PneumoniaMnist(DataSet):
    """``pneumoniamnist``: a site needs the whole file."""

    name = "pneumoniamnist"
    settings = frozenset(
        {"image-size", "fold-seed", "use-test", "sample-share", "intensity-profiles"}
    )
    headline = HEADLINE

    @property
    def files(self) -> PublicFiles:
        """The one file."""
        return _MedMnistFiles()

    def silo_names(self, settings: CommonSettings) -> list[str]:
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

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Cut the silo from the file, once."""
        if name not in _PROFILES:
            raise no_such_silo(name, list(_PROFILES))
        path = find_files(self.files, places) / _FILE.name
        stamp, values = path.stat(), as_mapping(settings)
        chosen = {key: values[key] for key in sorted(self.settings)}
        facts = [_MAKER, name, str(path.resolve()), stamp.st_size, stamp.st_mtime_ns, chosen]
        folder, making = places.cache / "pneumoniamnist-silos", _Making(path, name, settings)
        return cached_silo(folder, name, facts, len(CLASSES), making.fill)


@dataclass(frozen=True)
class _Making:
    """The making of one silo's folder."""

    path: Path
    name: str
    settings: CommonSettings

    @property
    def size(self) -> int:
        return self.settings.image_size or _SIDE

    def fill(self, folder: Path) -> None:
        parts = {part: self._split(part, *pool) for part, pool in read_parts(self.path).items()}
        facts = {
            "name": self.name,
            "distribution": self.name,
            "classes": CLASSES,
            "schema": json_digest([CLASSES, self.size]),
        }
        save_silo(folder, parts, facts)

    def _split(self, part: str, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any]) -> Split:
        import torch

        rows = self._rows(part, labels)
        if part == "test" and not self.settings.use_test:
            rows = rows[:0]
        made = np.empty((len(rows), 1, self.size, self.size), dtype=np.int16)
        for place, row in enumerate(rows):
            made[place, 0] = self._image(part, int(row), images[row])
        return Split(torch.from_numpy(made), torch.from_numpy(labels[rows]))

    def _rows(self, part: str, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the site's images of a part: of each class every third, in random order."""
        site = list(_PROFILES).index(self.name)
        dealt = []
        for label in range(len(CLASSES)):
            key = derive_seed(self.settings.fold_seed, "pneumoniamnist", part, label)
            shuffled = np.random.default_rng(key).permutation(np.flatnonzero(labels == label))
            own = shuffled[site :: len(_PROFILES)]
            dealt.append(own[: max(1, round(self.settings.sample_share * len(own)))])
        return np.sort(np.concatenate(dealt))

    def _image(self, part: str, row: int, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int16]:
        picture = resize(pixels / np.float32(255), self.size, self.size)
        if self.settings.intensity_profiles:
            rng = np.random.default_rng(derive_seed(0, "vendor-noise", self.name, part, row))
            picture = _PROFILES[self.name].render(picture, rng)
        return as_int16(picture)


def read_parts(path: Path) -> dict[str, Labelled]:
    """Return each part's images (n, 28, 28) uint8 and labels (n,), by the names of ``SPLITS``.

    Raises:
        DataError: the file is damaged, or an array is missing or of another kind.
    """
    wanted = {f"{part}_{kind}": what for part in SPLITS for kind, what in _ARRAYS.items()}
    try:
        arrays = read_arrays(path, wanted)
    except DataError as error:
        raise DataError(f"{error}; {_advice()}") from None
    return {
        part: _labelled(path, part, arrays[f"{part}_images"], arrays[f"{part}_labels"])
        for part in SPLITS
    }


def _labelled(
    path: Path, part: str, images: npt.NDArray[Any], labels: npt.NDArray[Any]
) -> Labelled:
    """Check a part's arrays; each site needs an image of each class."""
    if len(labels) != len(images):
        raise DataError(
            f"{path}: {part}_labels is {labels.dtype} {labels.shape}, and must be a whole number "
            f"for each of {len(images)} images; {_advice()}"
        )
    flat = labels.reshape(-1).astype(np.int64)
    counts = [int((flat == label).sum()) for label in range(len(CLASSES))]
    if sum(counts) < len(flat) or min(counts) < len(_PROFILES):
        raise DataError(
            f"{path}: {part}_labels must be 0 or 1, each at least {len(_PROFILES)} times: there "
            f"are {counts} of {len(flat)}; {_advice()}"
        )
    return images, flat


def _advice() -> str:
    return "run 'fedsilo fetch pneumoniamnist --data-dir DIR'"


PNEUMONIAMNIST = PneumoniaMnist()
