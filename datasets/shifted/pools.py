"""Decode public images once into a pool of memory-mapped arrays, and split them between tracks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import json_digest, open_sealed
from fedsilo.datasets.downloads.public_files import PublicFiles, public_data

FloatImages = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Facts = list[list[Any]]  # name, size and time of change of each file

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_OPTIONAL = ("train_tracks", "val_images", "val_labels")
_SHARE = 10  # one of this many tracks per label validates


@dataclass(frozen=True)
class Pool:
    """Images on the 0..255 scale, and labels (n,), in the order that silos take them.

    Grey images are (n, height, width), colour images (n, height, width, 3). ``train_tracks`` (n,)
    numbers the track that each training image belongs to; None if there are no tracks. If
    ``val_images`` is None, some training images validate.
    """

    train_images: FloatImages
    train_labels: npt.NDArray[Any]
    test_images: FloatImages
    test_labels: npt.NDArray[Any]
    train_tracks: npt.NDArray[Any] | None = None
    val_images: FloatImages | None = None
    val_labels: npt.NDArray[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public data set: how its files are decoded, and how the UEFL notes cut its pool.

    Attributes:
        name: the data set's name.
        classes: number of labels.
        mean, std: published statistics of the training pixels on the 0..1 scale, per channel.
        decode: function that takes a folder and returns its pool.
        train_size, test_size: images per silo, or 0 to share the pool equally.
        noise: whether distribution D3 has noise.
        forms: further folder names that may hold the same images in another form.
        listed: function that lists the facts of the files in a folder, if some of the files are
            enough; None if all are needed.
        class_names: the names of the labels; empty if they have none.
    """

    name: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    decode: Callable[[Path], Pool]
    train_size: int = 0
    test_size: int = 0
    noise: bool = True
    forms: tuple[str, ...] = ()
    listed: Callable[[Path], Facts] | None = None
    class_names: tuple[str, ...] = ()

    @property
    def public(self) -> PublicFiles:
        """The source's files and their origin."""
        return public_data()[self.name]


def facts_of(folder: Path, names: Iterable[str]) -> Facts:
    """Return name, size and time of each named file in ``folder``, to notice later if it changes.

    Returns:
        [name, size in bytes, modification time in ns] of each file, in the order of ``names``.
        Missing files are left out.
    """
    facts: Facts = []
    for name in names:
        path = folder / name
        if path.is_file():
            stamp = path.stat()
            facts.append([name, stamp.st_size, stamp.st_mtime_ns])
    return facts


def locate(source: Source, places: Places) -> tuple[Path, Facts]:
    """Find the folder that contains a public data set's files, and list these files.

    If ``source.listed`` is None, all files must be in the data set's folder. A data set without
    files gives ``Path()`` and an empty list.

    Otherwise some of the files are enough. The function ``source.listed`` lists those in the data
    set's folder and in each folder of ``source.forms``. The folder with the most files is chosen,
    and on a tie the first.

    Returns:
        The folder, and [name, size in bytes, modification time in ns] of each file.

    Raises:
        DataError: no data directory is named, a needed file is missing, or no folder has any file.
            The error explains how to get the files.
    """
    if source.listed is None:
        folder = source.public.find(places)
        return folder, facts_of(folder, [file.name for file in source.public.files])
    names = (source.public.folder, *source.forms)
    folders = [source.public.data_dir(places) / name for name in names]
    best: Facts = []
    folder = folders[0]
    for candidate in folders:
        facts = source.listed(candidate)
        if len(facts) > len(best):
            folder, best = candidate, facts
    if not best:
        raise DataError(
            f"no training files of '{source.name}' in {' or '.join(map(str, folders))}: "
            f"{source.public.advice()}"
        )
    return folder, best


def source_key(source: Source, folder: Path, facts: Sequence[Any]) -> str:
    """Return a key of 16 digits: a digest of the source's folder, file names, sizes and times."""
    # A source without files, such as the digits, comes with a package: it has no folder
    place = str(folder.resolve()) if facts else ""
    return json_digest([source.name, place, facts])[:16]


def open_pool(source: Source, places: Places) -> tuple[Pool, str]:
    """Open a public data set's decoded images from the cache, and decode them into it if missing.

    The arrays are memory-mapped read-only.

    Returns:
        The pool of images, and its key of 16 digits. The key changes if a file's name, size, time
        or folder changes.

    Raises:
        DataError: files are missing or unusable.
    """
    folder, facts = locate(source, places)
    key = source_key(source, folder, facts)
    target = places.cache / f"{source.name}-{key}"

    def fill(work: Path) -> None:
        pool = source.decode(folder)
        for name in (*_ARRAYS, *_OPTIONAL):
            if getattr(pool, name) is not None:
                np.save(work / f"{name}.npy", getattr(pool, name))

    def read(found: Path) -> Pool:
        arrays = {}
        for name in (*_ARRAYS, *_OPTIONAL):
            path = found / f"{name}.npy"
            if name in _ARRAYS or path.exists():
                arrays[name] = np.load(path, mmap_mode="r")
        return Pool(**arrays)

    return open_sealed(target, fill, read), key


def cut_by_track(tracks: npt.NDArray[Any], validation: int, where: str) -> tuple[Rows, Rows]:
    """Choose whole tracks for validation, so that no track is in both training and validation.

    A track is a series of frames of one object. The tracks are visited in the order of their last
    images, from the end. A track is taken if all taken images then number at most ``validation``.
    If no track fits, only the smallest track is taken.

    Args:
        tracks: track number of each image, (n,).
        validation: the largest number of validation images.
        where: the silo's name for errors.

    Returns:
        Indices of the training images and of the validation images, both ascending.

    Raises:
        DataError: all images belong to one track.
    """
    numbers, counts = np.unique(tracks, return_counts=True)
    if len(numbers) < 2:
        raise DataError(
            f"{where}: all {len(tracks)} training images are frames of one track, so no image is "
            "left to validate: raise 'split.silo-train-size'"
        )
    size = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    chosen: set[int] = set()
    left = validation
    # Visits each track once, in the order of their last frames, from the end on. A track that is
    # too large is skipped, and smaller ones further on may still fit
    for track in dict.fromkeys(reversed(tracks.tolist())):
        if size[track] <= left:
            chosen.add(track)
            left -= size[track]
    if not chosen:
        chosen = {int(numbers[counts.argmin()])}
    validates = np.isin(tracks, list(chosen))
    return np.flatnonzero(~validates), np.flatnonzero(validates)


def hold_out_tracks(tracks: npt.NDArray[Any], labels: npt.NDArray[Any]) -> tuple[Rows, Rows]:
    """Hold out the last tenth of each label's tracks (series of frames) for validation.

    The tracks of a label are in the order of their first images. The tenth is rounded down, but is
    at least one track. If a label has only one track, this track stays in training.

    Args:
        tracks: track number of each image, (n,). All images of a track have the same label.
        labels: label of each image, (n,).

    Returns:
        Indices of the training images and of the validation images, both ascending.
    """
    chosen: list[int] = []
    for label in np.unique(labels):
        # The label's tracks, in the order of their first images
        of_label = list(dict.fromkeys(tracks[labels == label].tolist()))
        if len(of_label) > 1:
            # Never 0, so that every label with two tracks or more is validated
            count = max(1, len(of_label) // _SHARE)
            chosen += of_label[-count:]
    validates = np.isin(tracks, chosen)
    return np.flatnonzero(~validates), np.flatnonzero(validates)
