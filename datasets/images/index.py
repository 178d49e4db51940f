"""The index of a site's images, before decoding: thinned to a share, and without public images.

A hash of the group's name (patient or lesion) decides whether an image is used, and whether it is
public. So the decision is the same at every site and in every run.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.seeding import derive_seed
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.datasets.images.decoding import describe, log_names
from fedsilo.models.tasks.task import task_class

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class ImageIndex:
    """A site's images before decoding, one entry per image in each field.

    Attributes:
        where: the site's name for errors.
        folder: the images' folder.
        names: each image's file, relative to ``folder``.
        labels: each image's label as its task has it, such as a class, (n,) int64.
        groups: the patient or lesion of each image.
        safe_names: a name for each image in errors, which the server may read. A file's own name
            may be that of a patient.
        parts: each image's split (of ``SPLITS``) if the user gives it; otherwise empty.
        masks: each image's mask, a file relative to ``folder``; empty if images have no masks.
    """

    where: str
    folder: Path
    names: tuple[str, ...]
    labels: npt.NDArray[Any]
    groups: tuple[str, ...]
    safe_names: tuple[str, ...]
    parts: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Rows) -> ImageIndex:
        """Return an index of the images at the row indices ``rows``, in that order.

        If this index has no parts (train, val, test) or no masks, the result has none either.
        """
        return replace(
            self,
            names=_pick(self.names, rows),
            labels=self.labels[rows],
            groups=_pick(self.groups, rows),
            safe_names=_pick(self.safe_names, rows),
            parts=_pick(self.parts, rows),
            masks=_pick(self.masks, rows),
        )


@dataclass(frozen=True)
class ListedImage:
    """One image of an ``ImageIndex``; that class explains the fields."""

    name: str
    label: Any  # an int for a class, a float for a number, a list of 0 and 1 for findings
    group: str
    safe_name: str
    part: str = ""
    mask: str = ""


def index_images(
    where: str, folder: Path, images: Sequence[ListedImage], task: str = CLASSIFICATION
) -> ImageIndex:
    """Build the index of a site's images from a list of images, in the list's order.

    Parts (train, val or test) must be given for all images or for no image, and so must masks. The
    caller ensures this.

    Args:
        where: the site's name for errors.
        folder: the folder that the images' names are relative to.
        images: the images.
        task: the task's name, which decides the type of the labels, such as int64 for
            classification.
    """
    return ImageIndex(
        where=where,
        folder=folder,
        names=tuple(image.name for image in images),
        labels=np.array([image.label for image in images], dtype=task_class(task).label_type),
        groups=tuple(image.group for image in images),
        safe_names=tuple(image.safe_name for image in images),
        parts=tuple(image.part for image in images if image.part),
        masks=tuple(image.mask for image in images if image.mask),
    )


def _pick(texts: tuple[str, ...], rows: Rows) -> tuple[str, ...]:
    """Return the strings at the row indices ``rows``, or () if there are no strings."""
    if not texts:
        return texts
    return tuple(texts[row] for row in rows)


def join_indices(where: str, parts: Sequence[ImageIndex]) -> ImageIndex:
    """Concatenate the image indices of several sites whose images are all in one folder.

    Parts (train, val or test) and masks are dropped. The result is empty if ``parts`` is empty.

    Errors show an image by its safe name, such as "the image of line 3", which may repeat at
    another site. " of " and the site's ``where`` are added to it. Safe names that are file names
    stay unchanged.

    Args:
        where: a name for the joined index in errors.
        parts: the indices, all with the same folder.
    """
    names: list[str] = []
    groups: list[str] = []
    safe_names: list[str] = []
    labels: list[npt.NDArray[Any]] = []
    for index in parts:
        names += index.names
        groups += index.groups
        labels.append(index.labels)
        # Each manifest counts lines from 1, so a line needs the name of its site
        place = "" if index.safe_names == index.names else f" of {index.where}"
        safe_names += [f"{name}{place}" for name in index.safe_names]
    folder, joined = Path(), np.empty(0, np.int64)
    if parts:
        folder, joined = parts[0].folder, np.concatenate(labels)
    return ImageIndex(where, folder, tuple(names), joined, tuple(groups), tuple(safe_names))


def split_public(index: ImageIndex, share: float) -> tuple[ImageIndex, ImageIndex]:
    """Divide an index into a silo's images and public images, in this order.

    Public images are in no silo, so that weights can be pretrained on them. A group of images, such
    as a patient's, stays on one side. About ``share`` of the groups are public, chosen by a hash of
    their names. With share 0 none is public, and with share 1 all are.
    """
    public = in_public(index.groups, share)
    return index.take(np.flatnonzero(~public)), index.take(np.flatnonzero(public))


def in_public(groups: Sequence[str], share: float) -> npt.NDArray[np.bool_]:
    """Tell for each image, as bool (n,), whether its group (such as a patient) is public.

    Public images are in no silo. A group is public if a hash of its name, from 0 to 1, is below
    ``share``. The answer is the same at every site. A group that is public at one share is also
    public at every larger share.
    """
    return np.array([_fraction("public-part", group) < share for group in groups], dtype=bool)


def take_share(index: ImageIndex, share: float) -> ImageIndex:
    """Keep the images of about ``share`` of the groups (such as patients), for smaller experiments.

    The number of groups is rounded. More groups are kept if these have fewer than 2 images
    together. A hash of the groups' names chooses the groups, so a larger share keeps every group
    that a smaller share keeps. A share of 1 returns the index unchanged.
    """
    if share == 1:
        return index
    # Each group has a fixed number in [0, 1), and those with the smallest are kept: so a larger
    # share only adds groups, and a new image of another group changes nothing for the old ones
    sizes = Counter(index.groups)
    kept: set[str] = set()
    images = 0
    # Two groups with the same number are ordered by their names
    for group in sorted(sizes, key=lambda group: (_fraction("sample-share", group), group)):
        if images >= 2 and len(kept) >= round(share * len(sizes)):
            break
        kept.add(group)
        images += sizes[group]
    return index.take(np.flatnonzero([group in kept for group in index.groups]))


def _fraction(purpose: str, group: str) -> float:
    """Hash a group's name to a number in [0, 1), evenly distributed and specific to ``purpose``."""
    return derive_seed(0, purpose, group) / 2**63


def find_copies(index: ImageIndex) -> list[tuple[int, int]]:
    """Find files with the same content as an earlier file of the index.

    Only files of equal size are read. Unreadable files are skipped, because decoding reports them.

    Returns:
        Pairs of rows (first file with this content, its copy), in the order of the copies' rows.
        The list is empty if all files differ.
    """
    first: dict[str, int] = {}
    copies = []
    for rows in _rows_by_size(index):
        if len(rows) == 1:
            # Files of different sizes differ, so most files need not be read here
            continue
        for row in rows:
            with suppress(OSError):
                content = (index.folder / index.names[row]).read_bytes()
                # A digest instead of the content, because all images together may exceed the memory
                original = first.setdefault(hashlib.sha256(content).hexdigest(), row)
                if original != row:
                    copies.append((original, row))
    return sorted(copies, key=operator.itemgetter(1))


def _rows_by_size(index: ImageIndex) -> Iterable[list[int]]:
    """Group the rows of readable files by file size in bytes.

    The rows of a group are in ascending order, and a group may consist of a single row. Rows of
    unreadable files are left out.
    """
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(index.names):
        path = index.folder / name
        if file_fault(path):
            continue
        with suppress(OSError):
            rows.setdefault(path.stat().st_size, []).append(row)
    return rows.values()


def join_copies(index: ImageIndex, copies: Sequence[tuple[int, int]]) -> ImageIndex:
    """Merge the groups of images that have equal files, because a split keeps a group in one part.

    Otherwise a copy of a training image could be a test image, and the measured accuracy would be
    too high. The merged group gets the name of one of its groups. Without copies the index is
    returned unchanged.

    Args:
        index: the images.
        copies: pairs of row indices of equal files, from ``find_copies``.
    """
    if not copies:
        return index
    # Union-find: each group points to another of the same set, and a leader to itself
    leader = {group: group for group in index.groups}

    def find(group: str) -> str:
        while leader[group] != group:
            group = leader[group]
        return group

    # A patient whose image is a copy of another patient's is joined with that patient
    for original, copy in copies:
        leader[find(index.groups[copy])] = find(index.groups[original])
    return replace(index, groups=tuple(find(group) for group in index.groups))


def check_copies(index: ImageIndex, copies: Sequence[tuple[int, int]]) -> None:
    """Check that the user's own split keeps files of equal content in one part.

    The parts are train, val and test. If the user did not give parts, nothing is checked.

    Args:
        index: the images.
        copies: pairs of row indices of equal files, from ``find_copies``.

    Raises:
        DataError: two equal files are in different parts. The error shows a safe name for each
            file. The real file names are logged on this machine only.
    """
    if not index.parts:
        return
    pairs = []
    files = []
    for original, copy in copies:
        if index.parts[original] == index.parts[copy]:
            continue
        named = []
        for row in (original, copy):
            files.append((index.safe_names[row], index.names[row]))
            named.append(f"{index.safe_names[row]} ({index.parts[row]})")
        pairs.append(" and ".join(named))
    if pairs:
        log_names(index.where, files)
        raise DataError(
            f"{index.where}: files of equal content are in two parts: {describe(pairs)}: keep "
            "one of each, or put both into one part"
        )
