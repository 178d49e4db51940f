"""PneumoniaMNIST: 5,856 chest X-rays of 28x28 pixels (Yang et al. 2023), divided among 3 vendors.

MedMNIST's own split is kept: the images of each part are dealt to the three sites class by class.
Each site renders its images with its vendor's profile.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.datasets.downloads.public_files import public_data
from fedsilo.datasets.radiographs.dicom import read_radiograph
from fedsilo.datasets.radiographs.mammography import HEADLINE
from fedsilo.datasets.radiographs.radiograph_decoding import as_rendered, resize
from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP
from fedsilo.datasets.shifted import medmnist
from fedsilo.datasets.shifted.medmnist import SIDE, Labelled
from fedsilo.datasets.silo.silos import DataSet, ImageReader, Silo, Split, cached_silo, save_silo

CLASSES = ("normal", "pneumonia")

_PROFILES = {"vendor-a": SHOULDERED, "vendor-b": SIGMOID, "vendor-c": STEEP}
_ADVICE = "run 'fedsilo fetch pneumoniamnist --data-dir DIR'"
_FILE = "pneumoniamnist.npz"
_MOST_BYTES = 60_000 * SIDE**2  # largest size of a split's images, ten times the real one
_MAKER = 1  # raise it when the same settings make other arrays, so that no old cache is read


class PneumoniaMnist(DataSet):
    """The data set ``pneumoniamnist``; every site needs the complete file."""

    name = "pneumoniamnist"
    settings = frozenset(
        {
            "data.image-size",
            "split.fold-seed",
            "split.use-test",
            "split.sample-share",
            "data.intensity-profiles",
        }
    )
    headline = HEADLINE

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the three vendors' names."""
        return list(_PROFILES)

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that decodes a user's image like the images of ``site``.

        The function takes the path of an 8-bit DICOM, or of an 8-bit grey PNG or TIFF. It resizes
        the whole image, and returns int16 (1, size, size). It raises ``BrokenImageError`` for an
        unusable file.

        If 'data.intensity-profiles' is set and ``site`` is a vendor's name, the picture is rendered
        like that of this vendor's machine: blur, noise and tone curve. The noise is the same each
        time for the same site and file name.
        """
        size = settings.image_size or SIDE
        profile = None
        if settings.intensity_profiles:
            profile = _PROFILES.get(site)

        def read(path: Path) -> npt.NDArray[Any]:
            picture = resize(read_radiograph(path, 8), size, size)
            return as_rendered(picture, profile, site, path.name)

        return read

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Open a site's silo in the cache, or create it there from ``pneumoniamnist.npz``.

        A site is a vendor. To create the silo, the site's images are selected and resized to int16
        (1, size, size). If 'data.intensity-profiles' is set, the images are rendered as the
        vendor's machine would show them.

        Raises:
            DataError: the file is missing or unusable.
        """
        path = public_data()[self.name].find(places) / _FILE
        stamp, values = path.stat(), as_mapping(settings)
        chosen = {key: values[key] for key in sorted(self.settings)}
        facts = [_MAKER, name, str(path.resolve()), stamp.st_size, stamp.st_mtime_ns, chosen]
        size = settings.image_size or SIDE
        profile = None
        if settings.intensity_profiles:
            profile = _PROFILES[name]

        def fill(folder: Path) -> None:
            parts = {}
            for part, (images, labels) in read_parts(path).items():
                rows = _rows(name, part, labels, settings)
                made = np.empty((len(rows), 1, size, size), dtype=np.int16)
                for place, row in enumerate(rows):
                    picture = resize(images[row] / np.float32(255), size, size)
                    made[place] = as_rendered(picture, profile, name, part, int(row))
                parts[part] = Split.of(made, labels[rows])
            facts = {"name": name, "distribution": name, "classes": CLASSES}
            save_silo(folder, parts, {**facts, "schema": json_digest([CLASSES, size])})

        folder = places.cache / "pneumoniamnist-silos"
        return cached_silo(folder, name, facts, len(CLASSES), fill)


def _rows(
    site: str, part: str, labels: npt.NDArray[np.int64], settings: CommonSettings
) -> npt.NDArray[np.int64]:
    """Choose a site's images of one part: a random third of each class, or a share of that third.

    Each class is shuffled in the same way at every site, seeded by 'split.fold-seed'. Its images
    are then dealt to the three sites in turn, so no image is at two sites. Of its third, a site
    keeps the share 'split.sample-share', but at least one image.

    Args:
        site: the name of the site, which is a vendor.
        part: 'train', 'val' or 'test'. The result for 'test' is empty if 'split.use-test' is false.
        labels: the label of each image of the part, (n,).
        settings: the settings that are named here.

    Returns:
        Row indices into ``labels``, ascending.
    """
    dealt = []
    for label in range(len(CLASSES)):
        key = derive_seed(settings.fold_seed, "pneumoniamnist", part, label)
        # All sites shuffle alike, so no image is at two sites
        shuffled = np.random.default_rng(key).permutation(np.flatnonzero(labels == label))
        own = shuffled[list(_PROFILES).index(site) :: len(_PROFILES)]
        dealt.append(own[: max(1, round(settings.sample_share * len(own)))])
    rows = np.sort(np.concatenate(dealt))
    if part == "test" and not settings.use_test:
        return rows[:0]
    return rows


def read_parts(path: Path) -> dict[str, Labelled]:
    """Read the published file ``pneumoniamnist.npz``: part -> its images and labels.

    The parts are 'train', 'val' and 'test'. Images are (n, 28, 28) uint8, and labels (n,) int64.

    Raises:
        DataError: the file is damaged, an array is missing or has another type or shape, or a class
            has fewer than three images, one for each site.
    """
    try:
        parts = medmnist.read_parts(path, len(CLASSES), most=_MOST_BYTES)
        for part, (_, labels) in parts.items():
            counts = np.bincount(labels, minlength=len(CLASSES)).tolist()
            if min(counts) < len(_PROFILES):
                raise DataError(
                    f"{path}: {part}_labels must be 0 or 1, each at least {len(_PROFILES)} times, "
                    f"but there are {counts} of {len(labels)}"
                )
    except DataError as error:
        raise DataError(f"{error}: {_ADVICE}") from None
    return parts


PNEUMONIAMNIST = PneumoniaMnist()
