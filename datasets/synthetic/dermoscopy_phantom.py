"""Made-up dermoscopic images of six centres, with the sizes and diagnoses of the real ISIC 2019.

Sizes and label counts are those of FLamby's centres, so their label shift is real; the looks are
``datasets.synthetic.dermoscopy_pictures``'s. Image i of a centre is the same each time, whatever
the run. No patient is in them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from datasets.images.dataset import Classes, ImageDataSet
from datasets.images.decoding import Decoded, Pixels, shades_of_grey
from datasets.images.index import ImageIndex
from datasets.images.isic2019 import CENTRES, DIAGNOSES, class_of, classes_of
from datasets.io.locations import Places
from datasets.silo.silos import no_such_silo
from datasets.synthetic.dermoscopy_pictures import CAMERAS, render
from datasets.synthetic.primitives import even_sequence
from models.contract.seeding import derive_seed
from models.contract.settings import CommonSettings

# Images of each diagnosis in FLamby's centres, in the order of ``DIAGNOSES``
COUNTS = {
    "bcn": (2857, 4206, 2809, 737, 1138, 124, 111, 431),
    "vidir_molemax": (24, 3720, 2, 0, 124, 30, 54, 0),
    "vidir_modern": (680, 1832, 211, 21, 475, 51, 82, 11),
    "rosendahl": (342, 803, 296, 109, 490, 30, 3, 186),
    "msk4": (215, 415, 0, 0, 189, 0, 0, 0),
    "vienna_dias": (67, 350, 5, 0, 10, 4, 3, 0),
}

_GENERATOR = 1  # raise it when the same number makes another image, so that no old cache is read
_LEAST = 8  # images of a centre, however small the share
_SAME_LESION = 0.15  # share of images that show the lesion of the one before


class DermoscopyPhantom(ImageDataSet):
    """``dermoscopy-phantom``: needs no files."""

    name = "dermoscopy-phantom"
    settings = (ImageDataSet.settings | {"target"}) - {"broken-images"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return nevus against all others, or the eight diagnoses."""
        return classes_of(settings.target)

    def silo_names(self, settings: CommonSettings) -> list[str]:
        """Return the six centres."""
        return list(CENTRES)

    def sites(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the six centres."""
        return list(CENTRES)

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Return the first images of a centre: its real number times the share, at least 8."""
        if site not in CENTRES:
            raise no_such_silo(site, CENTRES)
        count = max(_LEAST, round(sum(COUNTS[site]) * settings.sample_share))
        diagnoses, lesions = (part[:count] for part in sequence(site))
        names = tuple(f"{site}/{number}" for number in range(count))
        return ImageIndex(
            where=f"dermoscopy-phantom, {site}",
            folder=Path(),
            names=names,
            labels=np.array([class_of(d, settings.target) for d in diagnoses], dtype=np.int64),
            groups=tuple(f"{site}/lesion-{lesion}" for lesion in lesions),
            told=names,
        )

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the generator's version: names and numbers decide the rest."""
        return [_GENERATOR]

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Make the images."""
        from threadpoolctl import threadpool_limits

        images = np.empty((len(index), 3, size, size), dtype=np.uint8)
        # The products are small: several threads would wait for each other, and may round otherwise
        with threadpool_limits(1):
            for place, name in enumerate(index.names):
                site, number = name.split("/")
                made = phantom_image(site, int(number), size)
                images[place] = shades_of_grey(made) if settings.colour_constancy else made
        return Decoded(images, np.arange(len(index)), ())


@lru_cache(maxsize=len(COUNTS))
def sequence(site: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return diagnosis and lesion of each image of a centre."""
    draw = np.random.default_rng(derive_seed(0, "dermoscopy-phantom", site))
    return even_sequence(COUNTS[site], _SAME_LESION, draw)


def phantom_image(site: str, number: int, size: int) -> Pixels:
    """Return image ``number`` of a centre as RGB (3, size, size), 0..255: the same each time."""
    diagnoses, lesions = sequence(site)
    lesion = np.random.default_rng(derive_seed(0, "phantom-lesion", site, lesions[number]))
    view = np.random.default_rng(derive_seed(0, "phantom-view", site, number))
    return render(DIAGNOSES[diagnoses[number]], CAMERAS[site], lesion, view, size)


DERMOSCOPY_PHANTOM = DermoscopyPhantom()
