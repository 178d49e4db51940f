"""mini-MIAS: 322 real mammograms of 161 women (Suckling et al. 1994), divided by breast tissue.

The sites are the three tissues, whose images differ as images of different hospitals may. The user
provides the files, for research only: ``labels.csv`` and ``images/`` in the folder ``mini_mias`` of
the data directory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, data_folder
from fedsilo.core.files.text_files import read_rows
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.image_data_set import Classes, Reader
from fedsilo.datasets.images.index import ImageIndex, ListedImage, index_images, take_share
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
_SEVERITIES = (*CLASSES["not-malignant"], *CLASSES["malignant"])


class MiniMias(RadiographDataSet):
    """The data set ``mini-mias``; a site needs the whole listing, but only its own images."""

    name = "mini-mias"
    settings = RadiographDataSet.settings | {"data.intensity-profiles"}
    size = 128

    def found(self, places: Places) -> str:
        """Return 'labels.csv in mini_mias' if that file exists, otherwise ''."""
        if places.data and (places.data / "mini_mias" / "labels.csv").is_file():
            return "labels.csv in mini_mias"
        return ""

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return two classes: not malignant (normal or benign), and malignant."""
        return CLASSES

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the three tissues: fatty, glandular and dense."""
        return list(SITES.values())

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List a site's images, grouped by patient, for about 'split.sample-share' of the patients.

        A site is a kind of breast tissue. A hash of the patients' names chooses the patients. The
        label is 1 for a malignant finding, and 0 for a benign finding or none.

        Raises:
            DataError: the list of images, ``labels.csv``, is missing or invalid.
        """
        folder = _folder(places)
        images = []
        for name, row in _read_listing(folder).items():  # the names are public
            if SITES[row["tissue"]] == site:
                label = int(row["severity"] == "M")
                images.append(ListedImage(name, label, row["patient"], name))
        every = index_images(f"mini-mias, {site}", folder / "images", images)
        return take_share(every, settings.sample_share)

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that decodes an image of ``index`` by name to int16 (1, size, size).

        The function decodes the 8-bit grey file, crops its dark edges, and resizes the rest until
        the longer side has ``size`` pixels. If 'data.intensity-profiles' is set, the picture is
        rendered as a vendor's machine would show it. Each breast tissue has a vendor. The noise is
        the same in every run. The function raises ``BrokenImageError`` if the file is unusable.

        Raises:
            DataError: the list of images is missing or invalid.
        """
        rows = _read_listing(index.folder.parent)

        def read(name: str) -> npt.NDArray[np.int16]:
            picture = fit_square(read_grey(index.folder / name, _BITS), size)
            profile = None
            if settings.intensity_profiles:
                profile = _PROFILES[SITES[rows[name]["tissue"]]]
            return as_rendered(picture, profile, "mini-mias", name)

        return read

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that decodes a new 8-bit file or DICOM like the images of ``site``.

        A site is a kind of breast tissue. The function takes a path and returns int16 (1, size,
        size). It raises ``BrokenImageError`` for an unusable file.

        If 'data.intensity-profiles' is set, the picture is rendered like that of the site's vendor.
        The file's name without its ending seeds the noise. Nothing is rendered if ``site`` is not a
        tissue, such as ''.
        """
        size = settings.image_size or self.own_size(places)
        profile = None
        if settings.intensity_profiles:
            profile = _PROFILES.get(site)

        def read(path: Path) -> npt.NDArray[Any]:
            picture = fit_square(read_radiograph(path, _BITS), size)
            return as_rendered(picture, profile, "mini-mias", f"{path.stem}.png")

        return read


def _folder(places: Places) -> Path:
    needs = "mini_mias with labels.csv and images"
    return data_folder(places, "mini-mias", needs) / "mini_mias"


def _read_listing(folder: Path) -> dict[str, dict[str, str]]:
    """Read ``labels.csv``: image -> its row (column -> text), in the file's order.

    The columns are 'image', 'patient', 'tissue' and 'severity'.

    Raises:
        DataError: the file is missing, a cell has an impossible value, or an image is listed twice.
    """
    path = folder / "labels.csv"
    rows: dict[str, dict[str, str]] = {}
    for number, row in read_rows(path, _COLUMNS):
        fault = _row_fault(row)
        if row["image"] in rows:
            fault = f": image {row['image']} is listed twice: remove one of the lines"
        if fault:
            raise DataError(f"{path}, line {number}{fault}")
        rows[row["image"]] = row
    return rows


def _row_fault(row: Mapping[str, str]) -> str:
    """Describe the first invalid column of a line of ``labels.csv``, or return '' if all are valid.

    The caller puts the description after the file and the line. The image must be the plain name of
    a PNG file. The patient must not be empty. Tissue must be F, G or D, and severity N, B or M.
    Whether the file exists is not checked.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+\.png", row["image"]):
        return ", column 'image': the value must be a PNG file's plain name: correct it"
    if not row["patient"]:
        return ", column 'patient': the value decides the split, but is empty: fill it in"
    for column, known in (("tissue", SITES), ("severity", _SEVERITIES)):
        if row[column] not in known:
            return f", column '{column}': the value must be one of {', '.join(known)}: correct it"
    return ""


MINI_MIAS = MiniMias()
