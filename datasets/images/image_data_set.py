"""Load silos of images: list a site's files, split them by patient or lesion, decode and cache.

The images of one group (a patient or lesion) stay in one part. A hash of the group's name decides
whether it is public, so that a group at two sites is public at both sites or at neither.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.datasets.images.decoding import (
    Decoded,
    Fault,
    ImageHeader,
    check_faults,
    decode_each,
    decode_image,
    header_measures,
    picture_header,
)
from fedsilo.datasets.images.index import (
    ImageIndex,
    check_copies,
    find_copies,
    join_copies,
    join_indices,
    split_public,
)
from fedsilo.datasets.silo.measures import Measure
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, RowSplit, cut_fold, split_rows
from fedsilo.datasets.silo.silos import (
    SPLITS,
    DataSet,
    ImageReader,
    Silo,
    Split,
    cached_silo,
    save_silo,
    strata_of,
)

SMALLEST_IMAGE = 16  # pixels of a side
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read

Classes = Mapping[str, Sequence[str]]
Reader = Callable[[str], npt.NDArray[Any]]


@dataclass(frozen=True)
class _ImageSplit:
    """The rows of a silo's images by part, and notes on them for the site's log."""

    rows: RowSplit
    notes: Sequence[str]


class ImageDataSet(DataSet):
    """A data set whose sites list images with the same classes.

    Class attributes:
        size: side of an image in pixels, unless the settings name one.
        share: share of test images if there are no test folds.
        channels, dtype: number of channels and type of a decoded image.
    """

    settings = frozenset(
        {
            *SPLIT_KEYS,
            "data.image-size",
            "data.colour-constancy",
            "data.broken-images",
            "split.sample-share",
            "split.public-share",
        }
    )
    headline = ("balanced-accuracy", "accuracy", "auc", "calibration-error")
    size: ClassVar[int] = 224
    share: ClassVar[float] = 0.25
    channels: ClassVar[int] = 3
    dtype: ClassVar[type[np.generic]] = np.uint8

    @abstractmethod
    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return class name -> labels that mean this class, in class order."""

    @abstractmethod
    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List the images of an existing site, thinned to 'split.sample-share'.

        Raises:
            DataError: the listing is missing or invalid.
        """

    def task(self, places: Places) -> str:
        """Return the name of the task that the labels are for."""
        return CLASSIFICATION

    def declared_outcome(self, places: Places) -> FeatureStatistics | None:
        """Return the mean and deviation that the files declare for a numeric outcome, or None."""
        return None

    def own_size(self, places: Places) -> int:
        """Return the side of an image in pixels that applies if the settings do not name one."""
        return self.size

    def own_share(self, places: Places) -> float:
        """Return the share of test images that applies if there are no test folds."""
        return self.share

    def content(self, index: ImageIndex) -> list[Any]:
        """Return facts about the image files that change when a file changes, for a cache key.

        The first fact is the absolute path of the folder that contains the images. The second is a
        list: for each file its size in bytes and its modification time in ns, or None if the file
        is missing. File contents are not read.
        """
        stamps = [file_stamp(index.folder / name) for name in index.names]
        return [str(index.folder.resolve()), stamps]

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that decodes an image of ``index``: name -> (channels, size, size).

        The function raises ``BrokenImageError`` for an image that cannot be used.
        """
        return lambda name: decode_image(index.folder / name, size, settings.colour_constancy)

    def channels_of(self, index: ImageIndex) -> int:
        """Return the number of channels of each array that ``reader`` returns for ``index``."""
        return self.channels

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Decode all images of ``index`` to ``size`` pixels per side.

        Broken images are left out, and the result lists them as ``faults``. Decoding runs in one
        thread, so that the rounding is the same in every run.
        """
        from threadpoolctl import threadpool_limits

        shape = (self.channels_of(index), size, size)
        read = self.reader(index, size, settings)
        # Several threads wait for each other in small products, and may round differently
        with threadpool_limits(1):
            return decode_each(index.names, shape, self.dtype, read)

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that decodes any file, by path, in the same way as the silos' images.

        The function returns (channels, size, size), where the size is that of the silos' images. It
        raises ``BrokenImageError`` for a broken file. All sites have the same function, so ``site``
        is ignored.
        """
        size = settings.image_size or self.own_size(places)
        folder = self.files_folder(places)

        def read(path: Path) -> npt.NDArray[Any]:
            # Joining the folder and an absolute path gives this path, so any file can be
            # decoded
            name = str(path.resolve())
            lone = ImageIndex("", folder, (name,), np.zeros(1, np.int64), (name,), (name,))
            return self.reader(lone, size, settings)(name)

        return read

    def content_notes(self, index: ImageIndex, parts: Mapping[str, Split]) -> list[str]:
        """Return sentences for the site's log about its decoded images, by default none."""
        return []

    def files_folder(self, places: Places) -> Path:
        """Return the folder of the image files, or ``Path()`` if the data set has none."""
        return Path()

    def header(self, path: Path) -> ImageHeader:
        """Read width, height and bits per pixel (of all channels together) from a file's header.

        Raises:
            BrokenImageError: the file is missing, is not an image, or has too many pixels.
        """
        return picture_header(path)

    def file_measures(self, name: str, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return width, height and bits per pixel of a site's own files, for histograms."""
        own, _ = self._split_off_public(name, settings, places)
        return header_measures([own.folder / file for file in own.names], self.header)

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Open a site's silo in the cache, or create it there from the site's images.

        Images set aside as public by 'split.public-share' are left out. If the site's list of
        images names parts (train, val or test), these parts are used. Files of equal content stay
        in the same part, and the site's log has their number.

        Raises:
            DataError: the list of images is invalid, equal files are in two of the named parts,
                broken images may not be skipped, or fewer than 2 training images are left.
        """
        own, _ = self._split_off_public(name, settings, places)

        def rows() -> _ImageSplit:
            copies = find_copies(own)
            check_copies(own, copies)
            groups = join_copies(own, copies).groups
            notes = []
            if copies:
                notes.append(
                    f"{own.where}: {len(copies)} of {len(own)} images are copies of another image; "
                    "a split keeps copies in one part"
                )
            strata = strata_of(own.labels, self.task(places))
            if own.parts:
                return _ImageSplit(_split_as_given(own, groups, settings, strata), notes)
            share, seed = self.own_share(places), settings.fold_seed
            chosen = split_rows(strata, settings, share, seed, own.where, groups)
            return _ImageSplit(chosen, notes)

        return self._open_cached("silo", name, own, rows, settings, places)

    def _split_off_public(
        self, site: str, settings: CommonSettings, places: Places
    ) -> tuple[ImageIndex, ImageIndex]:
        """Divide a site's images into the images of its silo and the public images, in this order.

        Public images are in no silo, so that weights can be pretrained on them. About
        'split.public-share' of the groups (such as patients) are public, chosen by a hash of their
        names. Groups that share copies of a file count as one. Share 0 makes no image public.

        Raises:
            DataError: the site's list of images is missing or invalid.
        """
        index = self.index(site, settings, places)
        if settings.public_share:
            index = join_copies(index, find_copies(index))
        return split_public(index, settings.public_share)

    def public(self, settings: CommonSettings, places: Places) -> Split:
        """Load the public images of all sites as one split, for pretraining.

        No silo contains a public image. 'split.public-share' sets their share.

        Raises:
            SettingError: 'split.public-share' is 0.
            DataError: no image is public, or an image cannot be decoded and may not be skipped.
        """
        if settings.public_share == 0:
            raise SettingError("'split.public-share' must be above 0, but is 0: name a share")
        parts = []
        for site in self.silo_names(settings, places):
            parts.append(self._split_off_public(site, settings, places)[1])
        public = join_indices(f"{self.name}, public part", parts)
        if not len(public):
            raise DataError(f"{public.where}: it has no image: raise 'split.public-share'")
        # All of its images train
        every = np.arange(len(public))
        rows = _ImageSplit(RowSplit(every, every[:0], every[:0]), [])
        return self._open_cached("public", "public", public, lambda: rows, settings, places).train

    def _open_cached(
        self,
        kind: str,
        name: str,
        index: ImageIndex,
        rows: Callable[[], _ImageSplit],
        settings: CommonSettings,
        places: Places,
    ) -> Silo:
        """Open a silo in the cache. If the cache lacks it, decode its images and write it first.

        Args:
            kind: 'silo' for a site's images, or 'public' for the public images. Public images are
                not split, so the settings of the split do not matter for them.
            name: the silo's name.
            index: the images.
            rows: a function that returns the rows of each part and notes for the log. It is called
                only if the silo must be written.
            settings: the run's settings.
            places: the folders for data and cache.

        Raises:
            DataError: broken images may not be skipped, or a site's silo has fewer than 2 training
                images.
        """
        size = settings.image_size or self.own_size(places)
        classes = self.classes(settings, places)
        listed = [[name, sorted(labels)] for name, labels in classes.items()]
        task, outcome = self.task(places), self.declared_outcome(places)
        extra: list[Any] = []  # a silo of classes keeps the key of earlier versions
        if task != CLASSIFICATION:
            extra = [task]
        if outcome:
            extra += [outcome.mean.tolist(), outcome.std.tolist()]

        def fill(target: Path) -> None:
            split = rows()
            parts, faults = self._decode_parts(index, split.rows, size, settings)
            if kind == "silo" and len(parts["train"]) < 2:
                raise DataError(
                    f"{index.where}: {len(parts['train'])} training images are left "
                    f"({faults} were left out as broken), but at least 2 are needed: add images, "
                    "or lower the test, validation or public share"
                )
            facts: dict[str, Any] = {"name": name, "distribution": name, "classes": list(classes)}
            schema = json_digest([listed, size, *extra])
            facts |= {"dropped": faults, "schema": schema, "task": task}
            if outcome:
                mean, std = outcome.mean.tolist(), outcome.std.tolist()
                facts["declared"] = {"mean": mean, "std": std}
            save_silo(target, parts, facts, [*split.notes, *self.content_notes(index, parts)])

        # The public part is not split, so the settings of the split do not matter to it
        # How a numeric outcome is standardised does not change the silo
        read = self.settings - {"data.standardise"}
        folder = f"{name}-silo"
        if kind == "public":
            # The public part is the same for every split, so it is decoded and stored once
            read = read - frozenset(SPLIT_KEYS)
            folder = "all-public"
        values = as_mapping(settings)
        # All that decides pixels or split: any change makes another folder in the cache
        key = [
            *(_MAKER, self.name, name, kind, size, self.own_share(places)),
            *(listed, {key: values[key] for key in sorted(read)}),
            [index.names, index.labels.tolist(), index.groups, index.parts],
            self.content(index),
            *extra,
        ]
        return cached_silo(places.cache / f"{self.name}-silos", folder, key, len(classes), fill)

    def _decode_parts(
        self, index: ImageIndex, rows: RowSplit, size: int, settings: CommonSettings
    ) -> tuple[dict[str, Split], int]:
        """Decode the images of each part (train, val and test), and count the broken ones.

        ``rows`` has the row indices of each part's images in ``index``. ``size`` is in pixels per
        side.

        Returns:
            A dictionary, part -> decoded images with their labels, and the number of broken images
            that were left out of all parts together.

        Raises:
            DataError: images are broken, and 'data.broken-images' is not 'skip'.
        """
        parts: dict[str, Split] = {}
        faults: list[Fault] = []
        for part, own in vars(rows).items():
            chosen = index.take(own)
            decoded = self.decode(chosen, size, settings)
            faults += decoded.faults
            parts[part] = Split.of(decoded.images, chosen.labels[decoded.kept])
        count = sum(map(len, vars(rows).values()))
        safe_names = dict(zip(index.names, index.safe_names, strict=True))
        check_faults(faults, count, safe_names, settings.broken_images, index.where)
        return parts, len(faults)


def file_stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's size in bytes and modification time in ns, so that changes can be noticed.

    The result is None if there is no file, or if its folder cannot be read.
    """
    try:
        stamp = path.stat()
    except OSError:
        return None
    return stamp.st_size, stamp.st_mtime_ns


def _split_as_given(
    index: ImageIndex,
    groups: Sequence[str],
    settings: CommonSettings,
    strata: npt.NDArray[np.int64],
) -> RowSplit:
    """Split images into the parts that the user gave, and cut missing parts out of 'train'.

    A missing part (val or test) is cut only if the settings have folds for it, and otherwise stays
    empty. The test fold is cut first.

    Args:
        index: the images, with their parts.
        groups: the group of each image. Copies of a file share a group.
        settings: the numbers of folds and the chosen folds. If 'split.use-test' is false, the test
            part is empty.
        strata: the stratum (such as the class) of each image, (n,). Folds keep the shares of the
            strata.

    Raises:
        DataError: the user gave images of a part, but folds are set for this part too. The error is
            also raised if there are too few images for the folds.
    """
    # A test fold is cut before the validation fold, which comes from the rows that are left
    given = np.array(index.parts)
    rows = {part: np.flatnonzero(given == part) for part in SPLITS}
    for kind, folds in (("test", settings.test_folds), ("val", settings.val_folds)):
        if not folds:
            continue
        if len(rows[kind]):
            raise DataError(
                f"{index.where} gives {kind} images itself: set 'split.{kind}-folds' to 0, or put "
                "them into 'train' in its column 'split'"
            )
        rows["train"], rows[kind] = cut_fold(
            kind, rows["train"], strata, settings, index.where, groups
        )
    if not settings.use_test:
        rows["test"] = rows["test"][:0]
    return RowSplit(rows["train"], rows["val"], rows["test"])
