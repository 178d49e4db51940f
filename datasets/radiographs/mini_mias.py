"""mini-MIAS: 322 real mammograms of 161 women (Suckling et al. 1994), parted by breast tissue.

The sites are the three tissues, so their looks differ as those of hospitals may. The files are the
user's, for research only: ``labels.csv`` and ``images/`` in the folder ``mini_mias`` of the data
directory.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, data_folder
from fedsilo.core.files.text_files import read_rows
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.image_data_set import Classes, Reader
from fedsilo.datasets.images.index import ImageIndex, take_share
from fedsilo.datasets.radiographs.dicom import read_radiograph
from fedsilo.datasets.radiographs.mammography import RadiographDataSet
from fedsilo.datasets.radiographs.radiograph_decoding import as_rendered, fit_square, read_grey
from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP
from fedsilo.datasets.silo.silos import ImageReader

SITES = {"F": "fatty", "G": "glandular", "D": "dense"}
CLASSES = {"not-malignant": ("N", "B"), "malignant": ("M",)}

_PROFILES = {"fatty": SHOULDERED, "glandular": SIGMOID, "dense": STEEP}
_COLUMNS = ("image", "patient", "tissue", "severity")
_BITS = 8


class MiniMias(RadiographDataSet):
    """``mini-mias``: a site needs the listing, and of the images only its own."""

    name = "mini-mias"
    settings = RadiographDataSet.settings | {"data.intensity-profiles"}
    size = 128

    def found(self, places: Places) -> str:
        """Name the listing."""
        listing = places.data and places.data / "mini_mias" / "labels.csv"
        return "labels.csv in mini_mias" if listing and listing.is_file() else ""

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return malignant against benign and normal."""
        return CLASSES

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the three tissues."""
        return list(SITES.values())

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Return the images of a tissue."""
        folder = _folder(places)
        listed = _listing(folder).items()
        rows = {image: row for image, row in listed if SITES[row["tissue"]] == site}
        names = tuple(rows)
        every = ImageIndex(
            where=f"mini-mias, {site}",
            folder=folder / "images",
            names=names,
            labels=np.array([row["severity"] == "M" for row in rows.values()], dtype=np.int64),
            groups=tuple(row["patient"] for row in rows.values()),
            safe_names=names,  # public names
        )
        return take_share(every, settings.sample_share)

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return the reading of a file, rendered by the tissue's profile."""
        rows = _listing(index.folder.parent)
        profiles = _PROFILES if settings.intensity_profiles else {}

        def read(name: str) -> npt.NDArray[np.int16]:
            picture = fit_square(read_grey(index.folder / name, _BITS), size)
            profile = profiles.get(SITES[rows[name]["tissue"]])
            return as_rendered(picture, profile, "mini-mias", name)

        return read

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return the reading of a file or DICOM of 8 bits, rendered by the site's profile."""
        size = settings.image_size or self.own_size(places)
        profile = _PROFILES.get(site) if settings.intensity_profiles else None

        def read(path: Path) -> npt.NDArray[Any]:
            picture = fit_square(read_radiograph(path, _BITS), size)
            return as_rendered(picture, profile, "mini-mias", f"{path.stem}.png")

        return read


def _folder(places: Places) -> Path:
    needs = "mini_mias with labels.csv and images"
    return data_folder(places, "mini-mias", needs) / "mini_mias"


def _listing(folder: Path) -> dict[str, dict[str, str]]:
    """Return each image's line, in file order."""
    path = folder / "labels.csv"
    rows: dict[str, dict[str, str]] = {}
    for number, row in read_rows(path, _COLUMNS):
        place = f"{path}, line {number}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+\.png", row["image"]):
            raise DataError(f"{place}, column 'image': it must be a PNG file's plain name")
        if row["image"] in rows:
            raise DataError(f"{place}: image {row['image']} is listed twice")
        if not row["patient"]:
            raise DataError(f"{place}, column 'patient': it is empty, and decides the split")
        severities = [severity for listed in CLASSES.values() for severity in listed]
        for column, known in (("tissue", list(SITES)), ("severity", severities)):
            if row[column] not in known:
                raise DataError(f"{place}, column '{column}': it must be one of {', '.join(known)}")
        rows[row["image"]] = row
    return rows


MINI_MIAS = MiniMias()
