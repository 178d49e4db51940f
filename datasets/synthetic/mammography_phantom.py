"""Made-up mammograms of three vendors, with the sizes and malignancies of the Fed-Align-CL paper.

Counts are those of its table I; the looks are ``datasets.synthetic.mammogram_pictures``'s, rendered
by each vendor's profile. Image i of a site is the same each time, whatever the run. No patient is
in them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.images.dataset import Classes
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.radiographs.dataset import RadiographDataSet
from fedsilo.datasets.radiographs.decoding import as_int16, fit_square
from fedsilo.datasets.radiographs.dicom import read_radiograph
from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP, Grey
from fedsilo.datasets.synthetic.mammogram_pictures import random_breast, render
from fedsilo.datasets.synthetic.phantom import PhantomDataSet, Plan
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings

COUNTS = {"hologic": (730, 730), "siemens": (287, 123), "ge": (421, 431)}  # of each class
CLASSES = {"not-malignant": ("benign", "normal"), "malignant": ("malignant",)}

PLAN = Plan("mammography-phantom", COUNTS, subject="patient", again=0.3)

_PROFILES = {"hologic": SIGMOID, "siemens": STEEP, "ge": SHOULDERED}


class MammographyPhantom(PhantomDataSet, RadiographDataSet):
    """``mammography-phantom``: needs no files."""

    name = PLAN.phantom
    plan = PLAN
    settings = (RadiographDataSet.settings | {"intensity-profiles"}) - {"broken-images"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return malignant against benign and normal."""
        return CLASSES

    def own_size(self, places: Places) -> int:
        """Return 256."""
        return 256

    def own_share(self, places: Places) -> float:
        """Return the paper's share of test images."""
        return 0.2

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the kind: it is the class."""
        return kind

    def reader(
        self, index: ImageIndex, size: int, settings: CommonSettings
    ) -> Callable[[str], Grey]:
        """Return what paints an image."""

        def paint(name: str) -> Grey:
            site, number = name.split("/")
            return phantom_mammogram(site, int(number), size, settings.intensity_profiles)

        return paint

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> npt.NDArray[np.int16]:
        """Return a radiograph of 16 bits, which some machine has rendered already."""
        return as_int16(fit_square(read_radiograph(path, 16), size))[None]


def phantom_mammogram(site: str, number: int, size: int, profile: bool = True) -> Grey:
    """Return image ``number`` of a site (size, size), 0..1: the same each time.

    Args:
        site: a key of ``COUNTS``.
        number: from 0.
        size: pixels of a side.
        profile: whether the site's vendor renders it.
    """
    labels, patients = PLAN.sequence(site)
    keys = ("phantom-breast", patients[number]), ("phantom-mammogram", number)
    patient, view = (np.random.default_rng(derive_seed(0, kind, site, n)) for kind, n in keys)
    picture = render(random_breast(patient, bool(labels[number])), view, size)
    if not profile:
        return picture
    noise = np.random.default_rng(derive_seed(0, "vendor-noise", site, number))
    return _PROFILES[site].render(picture, noise)


MAMMOGRAPHY_PHANTOM = MammographyPhantom()
