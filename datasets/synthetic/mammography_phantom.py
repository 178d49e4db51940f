"""Made-up mammograms of three vendors, with the sizes and malignancies of the Fed-Align-CL paper.

Counts are those of its table I; the looks are ``datasets.synthetic.mammogram_pictures``'s, rendered
by each vendor's profile. Image i of a site is the same each time, whatever the run. No patient is
in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from datasets.images.dataset import Classes
from datasets.images.index import ImageIndex
from datasets.io.locations import Places
from datasets.radiographs.dataset import RadiographDataSet
from datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP, Grey
from datasets.silo.silos import no_such_silo
from datasets.synthetic.mammogram_pictures import draw_breast, render
from datasets.synthetic.primitives import even_sequence
from models.contract.seeding import derive_seed
from models.contract.settings import CommonSettings

COUNTS = {"hologic": (730, 730), "siemens": (287, 123), "ge": (421, 431)}  # of each class
CLASSES = {"not-malignant": ("benign", "normal"), "malignant": ("malignant",)}

_PROFILES = {"hologic": SIGMOID, "siemens": STEEP, "ge": SHOULDERED}
_GENERATOR = 1  # raise it when the same number makes another image, so that no old cache is read
_LEAST = 8  # images of a site, however small the share
_SAME_PATIENT = 0.3  # share of images that show the breast of the one before


class MammographyPhantom(RadiographDataSet):
    """``mammography-phantom``: needs no files."""

    name = "mammography-phantom"
    settings = (RadiographDataSet.settings | {"intensity-profiles"}) - {"broken-images"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return malignant against benign and normal."""
        return CLASSES

    def silo_names(self, settings: CommonSettings) -> list[str]:
        """Return the three vendors."""
        return list(COUNTS)

    def sites(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the three vendors."""
        return list(COUNTS)

    def own_size(self, places: Places) -> int:
        """Return 256."""
        return 256

    def own_share(self, places: Places) -> float:
        """Return the paper's share of test images."""
        return 0.2

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Return the first images of a site: the paper's number times the share, at least 8."""
        if site not in COUNTS:
            raise no_such_silo(site, list(COUNTS))
        count = max(_LEAST, round(sum(COUNTS[site]) * settings.sample_share))
        labels, patients = (part[:count] for part in sequence(site))
        names = tuple(f"{site}/{number}" for number in range(count))
        return ImageIndex(
            where=f"mammography-phantom, {site}",
            folder=Path(),
            names=names,
            labels=np.array(labels, dtype=np.int64),
            groups=tuple(f"{site}/patient-{patient}" for patient in patients),
            told=names,
        )

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the generator's version: names and numbers decide the rest."""
        return [_GENERATOR]

    def reader(
        self, index: ImageIndex, size: int, settings: CommonSettings
    ) -> Callable[[str], Grey]:
        """Return the drawing of an image."""

        def draw(name: str) -> Grey:
            site, number = name.split("/")
            return phantom_mammogram(site, int(number), size, settings.intensity_profiles)

        return draw


@lru_cache(maxsize=len(COUNTS))
def sequence(site: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return class and patient of each image of a site."""
    draw = np.random.default_rng(derive_seed(0, "mammography-phantom", site))
    return even_sequence(COUNTS[site], _SAME_PATIENT, draw)


def phantom_mammogram(site: str, number: int, size: int, profile: bool = True) -> Grey:
    """Return image ``number`` of a site (size, size), 0..1: the same each time.

    Args:
        site: a key of ``COUNTS``.
        number: from 0.
        size: pixels of a side.
        profile: whether the site's vendor renders it.
    """
    labels, patients = sequence(site)
    keys = ("phantom-breast", patients[number]), ("phantom-mammogram", number)
    patient, view = (np.random.default_rng(derive_seed(0, kind, site, n)) for kind, n in keys)
    picture = render(draw_breast(patient, bool(labels[number])), view, size)
    if not profile:
        return picture
    noise = np.random.default_rng(derive_seed(0, "vendor-noise", site, number))
    return _PROFILES[site].render(picture, noise)


MAMMOGRAPHY_PHANTOM = MammographyPhantom()
