"""The base class of synthetic data sets: numbered images of each site, in a fixed order.

Each image has a kind, which is the class or decides the class, and shows a subject, such as a
lesion, a patient or a sequence. Some images show the same subject as the image before.
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
    """Order images so that any first part of the sequence has nearly the same shares of the kinds.

    The kind of an image decides its class. Each image gets the kind that is furthest behind its
    share of all images, and on a tie the first such kind. With probability ``again``, however, an
    image repeats the kind and the subject of the previous image. A subject is for example a
    patient.

    Args:
        counts: number of images of each kind.
        again: the probability of a repetition. It does not happen if all images of the kind are
            already placed.
        rng: draws which images repeat a subject.

    Returns:
        The kind of each image, and the number of each image's subject, from 0 in order of
        appearance.
    """
    wanted = np.array(counts)
    # Drawn for all images at once, so that one image's kind does not change the draws of the next
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
        subject: a word for the subject of an image, used in the names of groups.
        again: share of images that show the same subject as the image before.
        fewest: least number of images of a site, however small 'split.sample-share' is.
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
        """Return the class index of images of a kind."""

    @abstractmethod
    def image(
        self, site: str, number: int, size: int, settings: CommonSettings
    ) -> npt.NDArray[Any]:
        """Draw image ``number`` of a site, (channels, size, size), the same in every run."""

    @abstractmethod
    def read_file(self, path: Path, size: int, settings: CommonSettings) -> npt.NDArray[Any]:
        """Decode a real image file to (channels, size, size), as the real data set does."""

    def sequence(self, site: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the kind and the subject's number of each image of a site."""
        return _sequence(self.key, site, tuple(self.counts[site]), self.again)

    def generators(
        self, site: str, number: int
    ) -> tuple[int, np.random.Generator, np.random.Generator]:
        """Return an image's kind, and two random generators to draw the image with.

        The first generator draws the features of the image's subject, such as a patient. The second
        draws those of the single image. Both are new at each call, so images of one subject get
        equal numbers from the first generator. The seeds do not depend on the run's seed.

        Args:
            site: the site's name.
            number: the image's index at the site, from 0.
        """
        kinds, subjects = self.sequence(site)
        subject = derive_seed(0, self.key, "subject", site, subjects[number])
        image = derive_seed(0, self.key, "image", site, number)
        return kinds[number], np.random.default_rng(subject), np.random.default_rng(image)

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of all sites."""
        return list(self.counts)

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List the first images of a site, as many as 'split.sample-share' of all its images.

        At least ``self.fewest`` images are listed, or all if the site has fewer. Images of one
        subject, such as a patient, are a group.
        """
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
        """Return a function that draws the image with a given name, such as 'city/12'.

        The name has the site and the image's number. The function returns (channels, size, size).
        The same name, ``size`` and settings always give the same image. ``index`` is not used.
        """

        def make(name: str) -> npt.NDArray[Any]:
            site, number = name.split("/")
            return self.image(site, int(number), size, settings)

        return make

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that decodes the file of a real, not drawn, image for a prediction.

        The function takes a path, and returns (channels, size, size). It raises
        ``BrokenImageError`` for a file that cannot be read. ``site`` is not used.
        """
        size = settings.image_size or self.own_size(places)
        return lambda path: self.read_file(path, size, settings)

    def file_measures(self, name: str, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return [], because the images are drawn and not read from files."""
        return []

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the version, because otherwise only names and numbers decide the pixels."""
        return [self.version]
