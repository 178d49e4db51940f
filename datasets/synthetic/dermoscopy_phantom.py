"""Made-up dermoscopic images of six centres, with the sizes and diagnoses of the real ISIC 2019.

Sizes and label counts are those of FLamby's centres, so their label shift is real; the looks are
``datasets.synthetic.dermoscopy_pictures``'s. Image i of a centre is the same each time, whatever
the run. No patient is in them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsilo.datasets.images.dataset import Classes, ImageDataSet
from fedsilo.datasets.images.decoding import Decoded, Pixels, decode_image, shades_of_grey
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.images.isic2019 import DIAGNOSES, class_of, classes_of
from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.synthetic.dermoscopy_pictures import CAMERAS, render
from fedsilo.datasets.synthetic.phantom import PhantomDataSet, Plan, paint_each
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings

# Images of each diagnosis in FLamby's centres, in the order of ``DIAGNOSES``
COUNTS = {
    "bcn": (2857, 4206, 2809, 737, 1138, 124, 111, 431),
    "vidir_molemax": (24, 3720, 2, 0, 124, 30, 54, 0),
    "vidir_modern": (680, 1832, 211, 21, 475, 51, 82, 11),
    "rosendahl": (342, 803, 296, 109, 490, 30, 3, 186),
    "msk4": (215, 415, 0, 0, 189, 0, 0, 0),
    "vienna_dias": (67, 350, 5, 0, 10, 4, 3, 0),
}

PLAN = Plan("dermoscopy-phantom", COUNTS, subject="lesion", again=0.15)


class DermoscopyPhantom(PhantomDataSet):
    """``dermoscopy-phantom``: needs no files."""

    name = PLAN.phantom
    plan = PLAN
    settings = (ImageDataSet.settings | {"target"}) - {"broken-images"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return nevus against all others, or the eight diagnoses."""
        return classes_of(settings.target)

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the class of a diagnosis."""
        return class_of(kind, settings.target)

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Make the images."""

        def paint(site: str, number: int) -> Pixels:
            image = phantom_image(site, number, size)
            return shades_of_grey(image) if settings.colour_constancy else image

        return paint_each(index, (3, size, size), paint)

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> Pixels:
        """Return a photograph."""
        return decode_image(path, size, settings.colour_constancy)


def phantom_image(site: str, number: int, size: int) -> Pixels:
    """Return image ``number`` of a centre as RGB (3, size, size), 0..255: the same each time."""
    diagnoses, lesions = PLAN.sequence(site)
    lesion = np.random.default_rng(derive_seed(0, "phantom-lesion", site, lesions[number]))
    view = np.random.default_rng(derive_seed(0, "phantom-view", site, number))
    return render(DIAGNOSES[diagnoses[number]], CAMERAS[site], lesion, view, size)


DERMOSCOPY_PHANTOM = DermoscopyPhantom()
