"""What made-up data sets share: numbered images of each site, in an order that is always the same.

Each image is of a kind (a class, or what decides it) and shows a subject: a lesion, a patient, a
sequence. Some images show the subject of the one before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.images.dataset import ImageDataSet
from fedsilo.datasets.images.decoding import Decoded
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.silo.measures import Measure
from fedsilo.datasets.silo.silos import ImageReader, no_such_silo
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings


@dataclass(frozen=True)
class Plan:
    """Which images a phantom has.

    Attributes:
        phantom: the data set's name, which decides the order too.
        counts: site -> how many images there are of each kind.
        subject: what an image shows, as its group is called.
        again: share of images that show the subject of the one before.
        fewest: images of a site, however small the share in use.
    """

    phantom: str
    counts: Mapping[str, Sequence[int]]
    subject: str
    again: float
    fewest: int = 8

    def sequence(self, site: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return kind and subject of each image of a site."""
        return _sequence(self.phantom, site, tuple(self.counts[site]), self.again)


@lru_cache(maxsize=16)
def _sequence(
    phantom: str, site: str, counts: tuple[int, ...], again: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return even_sequence(counts, again, np.random.default_rng(derive_seed(0, phantom, site)))


def even_sequence(
    counts: Sequence[int], again: float, rng: np.random.Generator
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the kind of each image, and the number of what it shows.

    Each beginning of it has the kinds in nearly their proportions.

    Args:
        counts: how many images there are of each kind.
        again: share of images that show what the one before shows.
        rng: decides which.
    """
    wanted = np.array(counts)
    repeats = rng.random(wanted.sum()) < again
    used = np.zeros_like(wanted)
    kinds: list[int] = []
    shown: list[int] = []
    for number in range(wanted.sum()):
        repeated = bool(kinds) and repeats[number] and used[kinds[-1]] < wanted[kinds[-1]]
        if repeated:
            kind, subject = kinds[-1], shown[-1]
        else:
            behind = np.where(used < wanted, wanted * (number + 1) / wanted.sum() - used, -np.inf)
            kind, subject = int(behind.argmax()), shown[-1] + 1 if shown else 0
        kinds.append(kind)
        shown.append(subject)
        used[kind] += 1
    return tuple(kinds), tuple(shown)


class PhantomDataSet(ImageDataSet):
    """A data set of made-up images, which needs no files.

    Class attributes:
        plan: its images.
        version: raise it when the same number makes another image, so that no old cache is read.
    """

    plan: ClassVar[Plan]
    version: ClassVar[int] = 1
    origin = "made-up"

    @abstractmethod
    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the class of images of a kind."""

    def silo_names(self, settings: CommonSettings) -> list[str]:
        """Return all sites."""
        return list(self.plan.counts)

    def sites(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return all sites."""
        return list(self.plan.counts)

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Return the first images of a site: its number times the share, and not too few."""
        plan = self.plan
        if site not in plan.counts:
            raise no_such_silo(site, list(plan.counts))
        count = max(plan.fewest, round(sum(plan.counts[site]) * settings.sample_share))
        kinds, subjects = (part[:count] for part in plan.sequence(site))
        names = tuple(f"{site}/{number}" for number in range(count))
        return ImageIndex(
            where=f"{plan.phantom}, {site}",
            folder=Path(),
            names=names,
            labels=np.array([self.label(kind, site, settings) for kind in kinds], dtype=np.int64),
            groups=tuple(f"{site}/{plan.subject}-{subject}" for subject in subjects),
            safe_names=names,
        )

    @abstractmethod
    def read_file(self, path: Path, size: int, settings: CommonSettings) -> npt.NDArray[Any]:
        """Return an image's file (channels, size, size) as the data that this is a phantom of."""

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return the reading of real files: made-up images come from none."""
        size = settings.image_size or self.own_size(places)
        return lambda path: self.read_file(path, size, settings)

    def file_measures(self, name: str, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return nothing: there are no files."""
        return []

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the version: names and numbers decide the rest."""
        return [self.version]


def paint_each(
    index: ImageIndex,
    shape: tuple[int, ...],
    paint: Callable[[str, int], npt.NDArray[np.uint8]],
) -> Decoded:
    """Return the images of ``index``.

    Args:
        index: the images.
        shape: (channels, size, size) of each.
        paint: returns the image of a site's number, of that shape.
    """
    from threadpoolctl import threadpool_limits

    images = np.empty((len(index), *shape), dtype=np.uint8)
    # The products are small: several threads would wait for each other, and may round otherwise
    with threadpool_limits(1):
        for place, name in enumerate(index.names):
            site, number = name.split("/")
            images[place] = paint(site, int(number))
    return Decoded(images, np.arange(len(index)), ())
