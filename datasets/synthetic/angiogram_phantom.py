"""Made-up angiograms of four sources, with a mask of the catheter each, after the FedEFM paper.

A class is a source and what it shows, so that no two sites have a class in common: the paper's
unseen data at 100 %. The looks are ``datasets.synthetic.angiogram_pictures``'s. Frame i of a source
is the same each time, whatever the run. No patient is in them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsilo.datasets.images.dataset import Classes, ImageDataSet
from fedsilo.datasets.images.decoding import Decoded, Pixels
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.radiographs.endovascular import read_square
from fedsilo.datasets.radiographs.masks import MaskedDataSet, MaskedSilo, masked_silo
from fedsilo.datasets.synthetic.angiogram_pictures import render
from fedsilo.datasets.synthetic.phantom import PhantomDataSet, Plan, paint_each
from fedsilo.datasets.synthetic.vessel_trees import ANATOMIES
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings

# Frames of each anatomy, in the order of ``ANATOMIES``: people and animals are rarer than models
COUNTS = {
    "human": (140, 120, 180),
    "animal": (120, 90, 110),
    "silicone": (180, 160, 120),
    "simulation": (200, 200, 200),
}
CLASSES = tuple(f"{source}-{anatomy}" for source in COUNTS for anatomy in ANATOMIES)

PLAN = Plan("angiogram-phantom", COUNTS, subject="sequence", again=0.35, fewest=12)


class AngiogramPhantom(PhantomDataSet, MaskedDataSet):
    """``angiogram-phantom``: needs no files."""

    name = PLAN.phantom
    plan = PLAN
    settings = ImageDataSet.settings - {"broken-images", "colour-constancy"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the twelve pairs of a source and an anatomy."""
        return {name: (name,) for name in CLASSES}

    def own_size(self, places: Places) -> int:
        """Return 64."""
        return 64

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the class of a source's anatomy."""
        return len(ANATOMIES) * list(COUNTS).index(site) + kind

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Make the images."""
        return _painted(index, size, channels=1)

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> Pixels:
        """Return an angiogram of 8 bits."""
        return read_square(path, 8, size)[None]

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> MaskedSilo:
        """Return the same frames in the same parts, each with its mask, which may be empty."""
        return masked_silo(_WithMasks().load(name, settings, places))


class _WithMasks(AngiogramPhantom):
    """Its images have the mask as their second channel."""

    name = "angiogram-phantom-masked"

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Make the images and masks."""
        return _painted(index, size, channels=2)


def _painted(index: ImageIndex, size: int, channels: int) -> Decoded:
    """Return the first channels (n, channels, size, size) of image and mask."""

    def paint(site: str, number: int) -> Pixels:
        return np.stack(phantom_frame(site, number, size))[:channels]

    return paint_each(index, (channels, size, size), paint)


def phantom_frame(site: str, number: int, size: int) -> tuple[Pixels, Pixels]:
    """Return frame ``number`` of a source, 0..255, and its mask, 0 or 1, each (size, size)."""
    anatomies, sequences = PLAN.sequence(site)
    sequence = np.random.default_rng(derive_seed(0, "phantom-tree", site, sequences[number]))
    frame = np.random.default_rng(derive_seed(0, "phantom-frame", site, number))
    return render(site, ANATOMIES[anatomies[number]], sequence, frame, size)


ANGIOGRAM_PHANTOM = AngiogramPhantom()
