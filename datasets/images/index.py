"""The index of a site's images, thinned to a share and separated from public images.

A hash of the group's name (the patient or lesion) decides whether an image is used or public. So
the decision is the same at every site and in every run.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.seeding import derive_seed
from fedsilo.datasets.images.decoding import describe, log_names

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class ImageIndex:
    """A site's images, not yet decoded.

    Attributes:
        where: names the site in errors.
        folder: the images' folder.
        names: each image's file in ``folder``.
        labels: (n,) int64, each image's class.
        groups: the patient or lesion of each image.
        safe_names: the name of each image in errors. The server reads errors, but the name of a
            file may be that of a patient.
        parts: the split (of ``SPLITS``) of each image if the user gives it, otherwise empty.
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
        """Select images by their rows, in the order of ``rows``."""
        texts = (self.names, self.groups, self.safe_names)
        names, groups, safe_names = (tuple(all_[row] for row in rows) for all_ in texts)
        parts = tuple(self.parts[row] for row in rows) if self.parts else ()
        return ImageIndex(
            self.where, self.folder, names, self.labels[rows], groups, safe_names, parts
        )


def join_indices(where: str, parts: Sequence[ImageIndex]) -> ImageIndex:
    """Join the indices of several sites whose images are in one folder."""
    folder = parts[0].folder if parts else Path()
    names = tuple(name for index in parts for name in index.names)
    groups = tuple(group for index in parts for group in index.groups)
    labels = np.concatenate([np.empty(0, np.int64), *(index.labels for index in parts)])
    safe_names = []
    for index in parts:
        # Each manifest counts lines from 1, so that a line needs the name of its site
        apart = "" if index.safe_names == index.names else f" of {index.where}"
        safe_names += [f"{name}{apart}" for name in index.safe_names]
    return ImageIndex(where, folder, names, labels, groups, tuple(safe_names))


def split_public(index: ImageIndex, share: float) -> tuple[ImageIndex, ImageIndex]:
    """Split an index into the images of the silo and the public images of that ``share``."""
    public = in_public(index.groups, share)
    return index.take(np.flatnonzero(~public)), index.take(np.flatnonzero(public))


def in_public(groups: Sequence[str], share: float) -> npt.NDArray[np.bool_]:
    """Tell for each image, (n,) bool, whether its group is in the public part of that share."""
    return np.array([_fraction("public-part", group) < share for group in groups], dtype=bool)


def take_share(index: ImageIndex, share: float) -> ImageIndex:
    """Keep ``share`` of the groups in ``index``, but at least 2 images.

    The choice is the same each time, and a larger share contains a smaller one.
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
    """Map a group's name to a number in [0, 1), evenly distributed."""
    return derive_seed(0, purpose, group) / 2**63


def find_copies(index: ImageIndex) -> list[tuple[int, int]]:
    """Find the files whose content equals that of an earlier file.

    Returns:
        Pairs of rows (first file with this content, its copy), in the order of the copies. Files
        that cannot be read are left out, because decoding reports them.
    """
    same_size: dict[int, list[int]] = {}
    for row, name in enumerate(index.names):
        path = index.folder / name
        if file_fault(path):
            continue
        try:
            same_size.setdefault(path.stat().st_size, []).append(row)
        except OSError:
            continue
    first: dict[str, int] = {}
    copies = []
    # Files of different sizes differ, so that most files need not be read here
    for rows in same_size.values():
        for row in rows if len(rows) > 1 else ():
            try:
                content = (index.folder / index.names[row]).read_bytes()
            except OSError:
                continue
            original = first.setdefault(hashlib.sha256(content).hexdigest(), row)
            if original != row:
                copies.append((original, row))
    return sorted(copies, key=lambda pair: pair[1])


def join_copies(index: ImageIndex) -> ImageIndex:
    """Put files of equal content, and so their whole groups, into one group.

    A split keeps a group in one part. Without this, a copy of a training image could be a test
    image, and the test accuracy would be too high. The site's log says how many copies there are.
    """
    copies = find_copies(index)
    if not copies:
        return index
    # Union-find: each group points to another of the same set, and a leader to itself
    leader = {group: group for group in index.groups}

    def find(group: str) -> str:
        while leader[group] != group:
            group = leader[group]
        return group

    for original, copy in copies:
        leader[find(index.groups[copy])] = find(index.groups[original])
    logging.getLogger("flwr").warning(
        "fedsilo: %s: %d of %d images are copies of another image; a split keeps copies in one "
        "part",
        index.where,
        len(copies),
        len(index),
    )
    return replace(index, groups=tuple(find(group) for group in index.groups))


def check_copies(index: ImageIndex) -> None:
    """Check that a given split keeps files of equal content in one part.

    Raises:
        DataError: files of equal content are in two parts; it names them by their safe names.
    """
    if not index.parts:
        return
    copies = []
    for original, copy in find_copies(index):
        if index.parts[original] != index.parts[copy]:
            copies.append((original, copy))
    if copies:
        called = index.safe_names
        log_names(index.where, [(called[r], index.names[r]) for pair in copies for r in pair])
        pairs = [" and ".join(f"{called[r]} ({index.parts[r]})" for r in p) for p in copies]
        raise DataError(
            f"{index.where}: files of equal content are in two parts: {describe(pairs)}: keep "
            "one of each, or put both into one part"
        )
