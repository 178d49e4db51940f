"""The base of synthetic data sets: numbered images of each site, in a fixed order.

Each image is of a kind (a class, or what decides it) and shows a subject: a lesion, a patient, a
sequence. Some images show the subject of the one before.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.files.locations import Places
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.image_data_set import ImageDataSet, Reader
from fedsilo.datasets.images.index import ImageIndex, ListedImage, index_images
from fedsilo.datasets.silo.measures import Measure
from fedsilo.datasets.silo.silos import ImageReader


def even_sequence(
    counts: Sequence[int], again: float, rng: np.random.Generator
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the kind and the subject's number of each image.

    The first n images have the kinds in nearly their proportions, for every n.

    Args:
        counts: number of images of each kind.
        again: share of images that show the subject of the one before.
        rng: decides which.
    """
    wanted = np.array(counts)
    repeats = rng.random(wanted.sum()) < again
    used = np.zeros_like(wanted)
    kinds: list[int] = []
    subjects: list[int] = []
    for number in range(wanted.sum()):
        if kinds and repeats[number] and used[kinds[-1]] < wanted[kinds[-1]]:
            kind, subject = kinds[-1], subjects[-1]
        else:
            # The kind that is furthest behind its proportion, unless all its images are there
            behind = np.where(used < wanted, wanted * (number + 1) / wanted.sum() - used, -np.inf)
            kind = int(behind.argmax())
            subject = subjects[-1] + 1 if subjects else 0
        kinds.append(kind)
        subjects.append(subject)
        used[kind] += 1
    return tuple(kinds), tuple(subjects)


@lru_cache(maxsize=16)
def _sequence(
    key: str, site: str, counts: tuple[int, ...], again: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return even_sequence(counts, again, np.random.default_rng(derive_seed(0, key, site)))


class PhantomDataSet(ImageDataSet):
    """A data set of synthetic images, which needs no files.

    Class attributes:
        key: part of every seed.
        counts: site -> number of images of each kind.
        subject: what an image shows, as its group is called.
        again: share of images that show the subject of the one before.
        fewest: images of a site, however small 'split.sample-share' is.
        version: raise it when the same number makes another image, so that no old cache is read.
    """

    key: ClassVar[str]
    counts: ClassVar[Mapping[str, Sequence[int]]]
    subject: ClassVar[str]
    again: ClassVar[float]
    fewest: ClassVar[int] = 8
    channels = 1
    version: ClassVar[int] = 2
    origin = "made-up"

    @abstractmethod
    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the class of images of a kind."""

    @abstractmethod
    def image(
        self, site: str, number: int, size: int, settings: CommonSettings
    ) -> npt.NDArray[Any]:
        """Return an image (channels, size, size): the same for every run."""

    @abstractmethod
    def read_file(self, path: Path, size: int, settings: CommonSettings) -> npt.NDArray[Any]:
        """Return an image's file (channels, size, size) as the real data set reads it."""

    def sequence(self, site: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return kind and subject of each image of a site."""
        return _sequence(self.key, site, tuple(self.counts[site]), self.again)

    def generators(
        self, site: str, number: int
    ) -> tuple[int, np.random.Generator, np.random.Generator]:
        """Return the kind of an image, and the generators of its subject and of the image."""
        kinds, subjects = self.sequence(site)
        subject = derive_seed(0, self.key, "subject", site, subjects[number])
        image = derive_seed(0, self.key, "image", site, number)
        return kinds[number], np.random.default_rng(subject), np.random.default_rng(image)

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return all sites."""
        return list(self.counts)

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Return the first images of a site: 'split.sample-share' of them, and not too few."""
        count = max(self.fewest, round(sum(self.counts[site]) * settings.sample_share))
        kinds, subjects = self.sequence(site)
        images = []
        for number in range(min(count, len(kinds))):
            name = f"{site}/{number}"
            label = self.label(kinds[number], site, settings)
            group = f"{site}/{self.subject}-{subjects[number]}"
            images.append(ListedImage(name, label, group, name))
        return index_images(f"{self.key}, {site}", Path(), images)

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that makes the image of a name, ``site/number``."""

        def make(name: str) -> npt.NDArray[Any]:
            site, number = name.split("/")
            return self.image(site, int(number), size, settings)

        return make

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return the reading of real files, since synthetic images have none."""
        size = settings.image_size or self.own_size(places)
        return lambda path: self.read_file(path, size, settings)

    def file_measures(self, name: str, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return nothing: there are no files."""
        return []

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the version: names and numbers decide the rest."""
        return [self.version]
