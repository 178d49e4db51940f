"""Which images a site has: read from CSV listings, thinned, parted from the public ones.

Whether an image is used or public depends on a hash of its group's name (the patient or lesion), so
that it is the same at every site and in every run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.images.decoding import describe, log_names
from fedsilo.datasets.io.text_files import file_fault
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.seeding import derive_seed

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class ImageIndex:
    """A site's images, not yet decoded.

    Attributes:
        where: names the site in errors.
        folder: the images' folder.
        names: each image's file in ``folder``.
        labels: (n,) int64, each image's class.
        groups: what each image is of: a patient or lesion.
        safe_names: what each image is called in errors, which the server reads: a file's name may
            be a patient's.
        parts: the part (of ``SPLITS``) of each image where the user gives it, else empty.
    """

    where: str
    folder: Path
    names: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    groups: tuple[str, ...]
    safe_names: tuple[str, ...]
    parts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Rows) -> ImageIndex:
        """Return these images of it."""
        texts = (self.names, self.groups, self.safe_names)
        names, groups, safe_names = (tuple(all_[row] for row in rows) for all_ in texts)
        parts = tuple(self.parts[row] for row in rows) if self.parts else ()
        return ImageIndex(
            self.where, self.folder, names, self.labels[rows], groups, safe_names, parts
        )


def joined(where: str, parts: Sequence[ImageIndex]) -> ImageIndex:
    """Return the images of several sites, which are in one folder, as one index."""
    folder = parts[0].folder if parts else Path()
    names = tuple(name for index in parts for name in index.names)
    groups = tuple(group for index in parts for group in index.groups)
    labels = np.concatenate([np.empty(0, np.int64), *(index.labels for index in parts)])
    safe_names = []
    for index in parts:  # lines are counted from 1 in each site's manifest
        apart = "" if index.safe_names == index.names else f" of {index.where}"
        safe_names += [f"{name}{apart}" for name in index.safe_names]
    return ImageIndex(where, folder, names, labels, groups, tuple(safe_names))


def parted(index: ImageIndex, share: float) -> tuple[ImageIndex, ImageIndex]:
    """Return the images that a silo may hold, and those of the public part of that share."""
    public = in_public(index.groups, share)
    return index.take(np.flatnonzero(~public)), index.take(np.flatnonzero(public))


def in_public(groups: Sequence[str], share: float) -> npt.NDArray[np.bool_]:
    """Return for each image whether its group is in the public part of that share."""
    return np.array([_fraction("public-part", group) < share for group in groups], dtype=bool)


def take_share(index: ImageIndex, share: float) -> ImageIndex:
    """Return ``share`` of the groups of ``index``, and more if fewer than 2 images were left.

    The same groups each time; a larger share holds those of a smaller one.
    """
    if share == 1:
        return index
    sizes = Counter(index.groups)
    kept: set[str] = set()
    images = 0
    for group in sorted(sizes, key=lambda group: (_fraction("sample-share", group), group)):
        if images >= 2 and len(kept) >= round(share * len(sizes)):
            break
        kept.add(group)
        images += sizes[group]
    return index.take(np.flatnonzero([group in kept for group in index.groups]))


def _fraction(purpose: str, group: str) -> float:
    """Return a number in [0, 1) of the group's own."""
    return derive_seed(0, purpose, group) / 2**63


def check_copies(index: ImageIndex) -> None:
    """Refuse a given split that puts one file's content into two parts, by a ``DataError``."""
    seen: dict[str, tuple[int, str]] = {}
    copies: list[tuple[int, int]] = []
    for row, part in enumerate(index.parts):  # no parts: nothing to compare
        name = index.names[row]
        if file_fault(index.folder / name):
            continue  # as below
        try:
            content = hashlib.sha256((index.folder / name).read_bytes()).hexdigest()
        except OSError:
            continue  # reported when it is decoded
        other, there = seen.setdefault(content, (row, part))
        if there != part:
            copies.append((other, row))
    if copies:
        called = index.safe_names
        log_names(index.where, [(called[r], index.names[r]) for pair in copies for r in pair])
        pairs = [" and ".join(f"{called[r]} ({index.parts[r]})" for r in p) for p in copies]
        raise DataError(
            f"{index.where}: files of equal content are in two parts: {describe(pairs)}: keep "
            "one of each, or put both into one part"
        )
