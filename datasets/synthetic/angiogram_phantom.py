"""Made-up angiograms of four sources, with a mask of the catheter each, after the FedEFM paper.

A class is a source and what it shows, so that no two sites have a class in common: the paper's
unseen data at 100 %. The looks are ``datasets.synthetic.angiogram_pictures``'s. Frame i of a source
is the same each time, whatever the run. No patient is in them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from datasets.images.dataset import Classes, ImageDataSet
from datasets.images.decoding import Decoded, Pixels
from datasets.images.index import ImageIndex
from datasets.io.locations import Places
from datasets.radiographs.masks import MaskedDataSet, MaskedSilo, masked_silo
from datasets.silo.silos import no_such_silo
from datasets.synthetic.angiogram_pictures import render
from datasets.synthetic.primitives import even_sequence
from datasets.synthetic.vessel_trees import ANATOMIES
from models.contract.seeding import derive_seed
from models.contract.settings import CommonSettings

# Frames of each anatomy, in the order of ``ANATOMIES``: people and animals are rarer than models
COUNTS = {
    "human": (140, 120, 180),
    "animal": (120, 90, 110),
    "silicone": (180, 160, 120),
    "simulation": (200, 200, 200),
}
CLASSES = tuple(f"{source}-{anatomy}" for source in COUNTS for anatomy in ANATOMIES)

_GENERATOR = 1  # raise it when the same number makes another image, so that no old cache is read
_LEAST = 12  # frames of a source, however small the share
_SAME_SEQUENCE = 0.35  # share of frames of the sequence of the one before


class AngiogramPhantom(ImageDataSet, MaskedDataSet):
    """``angiogram-phantom``: needs no files."""

    name = "angiogram-phantom"
    settings = ImageDataSet.settings - {"broken-images", "colour-constancy"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the twelve pairs of a source and an anatomy."""
        return {name: (name,) for name in CLASSES}

    def silo_names(self, settings: CommonSettings) -> list[str]:
        """Return the four sources."""
        return list(COUNTS)

    def sites(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the four sources."""
        return list(COUNTS)

    def own_size(self, places: Places) -> int:
        """Return 64."""
        return 64

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Return the first frames of a source: its number times the share, at least 12."""
        if site not in COUNTS:
            raise no_such_silo(site, list(COUNTS))
        count = max(_LEAST, round(sum(COUNTS[site]) * settings.sample_share))
        anatomies, sequences = (part[:count] for part in frames(site))
        names = tuple(f"{site}/{number}" for number in range(count))
        first = len(ANATOMIES) * list(COUNTS).index(site)
        return ImageIndex(
            where=f"{AngiogramPhantom.name}, {site}",
            folder=Path(),
            names=names,
            labels=np.array(anatomies, dtype=np.int64) + first,
            groups=tuple(f"{site}/sequence-{sequence}" for sequence in sequences),
            told=names,
        )

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the generator's version: names and numbers decide the rest."""
        return [_GENERATOR]

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Make the images."""
        return _drawn(index, size, channels=1)

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> MaskedSilo:
        """Return the same frames in the same parts, each with its mask, which may be empty."""
        return masked_silo(_WithMasks().load(name, settings, places))


class _WithMasks(AngiogramPhantom):
    """Its images have the mask as their second channel."""

    name = "angiogram-phantom-masked"

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Make the images and masks."""
        return _drawn(index, size, channels=2)


def _drawn(index: ImageIndex, size: int, channels: int) -> Decoded:
    """Return the first channels (n, channels, size, size) of image and mask."""
    from threadpoolctl import threadpool_limits

    images = np.empty((len(index), channels, size, size), dtype=np.uint8)
    # The products are small: several threads would wait for each other, and may round otherwise
    with threadpool_limits(1):
        for place, name in enumerate(index.names):
            site, number = name.split("/")
            images[place] = np.stack(phantom_frame(site, int(number), size))[:channels]
    return Decoded(images, np.arange(len(index)), ())


@lru_cache(maxsize=len(COUNTS))
def frames(site: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return anatomy and sequence of each frame of a source."""
    draw = np.random.default_rng(derive_seed(0, "angiogram-phantom", site))
    return even_sequence(COUNTS[site], _SAME_SEQUENCE, draw)


def phantom_frame(site: str, number: int, size: int) -> tuple[Pixels, Pixels]:
    """Return frame ``number`` of a source, 0..255, and its mask, 0 or 1, each (size, size)."""
    anatomies, sequences = frames(site)
    sequence = np.random.default_rng(derive_seed(0, "phantom-tree", site, sequences[number]))
    frame = np.random.default_rng(derive_seed(0, "phantom-frame", site, number))
    return render(site, ANATOMIES[anatomies[number]], sequence, frame, size)


ANGIOGRAM_PHANTOM = AngiogramPhantom()
