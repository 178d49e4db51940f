"""List images with their masks, from a manifest or from the folders ``images`` and ``masks``.

Errors name the manifest's line or count the files of a folder, but never quote a file's name, which
may be a patient's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedsilo.core.errors import DataError
from fedsilo.core.one_line import format_count
from fedsilo.datasets.images.decoding import log_names
from fedsilo.datasets.images.folder_layout import are_parts, entries, subfolders
from fedsilo.datasets.images.index import ImageIndex, ListedImage, index_images
from fedsilo.datasets.images.manifests import Manifest

IMAGES, MASKS = "images", "masks"
LAYOUT = "SITE/images/* and SITE/masks/*, or SITE/{train,val,test}/images/* and .../masks/*"


@dataclass
class MaskManifest(Manifest):
    """The reader of a manifest with the columns ``image`` and ``mask``."""

    image_column: ClassVar[str] = "image"

    def label_columns(self) -> tuple[str, ...]:
        """Return the column that names the mask."""
        return ("mask",)

    def label(self, number: int, row: Mapping[str, str]) -> int:
        """Return 0 for every image, because pixels have classes here and images have none."""
        return 0

    def mask(self, number: int, row: Mapping[str, str]) -> str:
        """Return the path of an image's mask, relative to the data directory.

        Args:
            number: the image's line, for errors.
            row: column -> text.

        Raises:
            DataError: the cell in the column 'mask' is empty or has unprintable characters, or its
                path leads outside the data directory.
        """
        if not row["mask"]:
            raise DataError(
                f"{self.where}, line {number}, column 'mask': the image has no mask: name its "
                "mask, which is an empty one if there is nothing to mark, or remove the line"
            )
        return self.resolve(number, "mask", row["mask"])


def has_mask_folders(folder: Path) -> bool:
    """Tell whether a folder is a site with masks: it has subfolders named ``images`` and ``masks``.

    A folder whose subfolders are all named train, val or test is a site too, if each of them has
    ``images`` and ``masks``. Not all three need exist.

    Raises:
        DataError: a folder cannot be read. The error is also raised if the folder lacks ``images``
            or ``masks``, a subfolder's name is one that data sets use for a part, such as 'train'
            or 'Training', and not all subfolders are named train, val or test.
    """
    names = {inner.name for inner in subfolders(folder)}
    if {IMAGES, MASKS} <= names:
        return True
    tops = subfolders(folder)
    return bool(names) and are_parts(tops) and all(map(has_mask_folders, tops))


def list_mask_folders(folder: Path, data: Path) -> ImageIndex:
    """List the images in a site's folders ``images``, with their masks in the folders ``masks``.

    A mask has the same file name as its image, except for the ending. The images are ordered by
    part and name. Each image counts as a patient, because folders do not name patients.

    Args:
        folder: the site's folder.
        data: the data directory, to which the names in the index are relative.

    Raises:
        DataError: the site lacks these folders, an image has no mask, a mask has no image, or two
            files in a folder have the same name except for the ending.
    """
    if not has_mask_folders(folder):
        raise DataError(f"{folder} must have the folders of {LAYOUT}: sort the files into them")
    parts = {"": folder}
    if not (folder / IMAGES).is_dir():
        parts = {top.name: top for top in subfolders(folder)}
    images: list[ListedImage] = []
    for part, part_folder in parts.items():
        for image, mask in _pair_files(part_folder):
            name = image.relative_to(data).as_posix()
            safe_name = f"image {len(images) + 1}"
            mask_name = mask.relative_to(data).as_posix()
            images.append(ListedImage(name, 0, f"file {name}", safe_name, part, mask_name))
    return index_images(str(folder), data, images)


def _pair_files(folder: Path) -> list[tuple[Path, Path]]:
    """Pair each file in ``images`` with the file in ``masks`` that has the same name.

    The endings may differ.

    Returns:
        Pairs (image, mask), in the order of the images' names.

    Raises:
        DataError: a file has no counterpart, or two files in one folder differ only in the ending.
    """
    images, masks = _by_stem(folder / IMAGES), _by_stem(folder / MASKS)
    _check_partners(folder / IMAGES, images, masks, "mask", MASKS)
    _check_partners(folder / MASKS, masks, images, "image", IMAGES)
    return [(images[stem], masks[stem]) for stem in images]


def _by_stem(folder: Path) -> dict[str, Path]:
    """List the files directly in a folder: name without ending -> file, in the order of file names.

    Folders and hidden files are left out.

    Raises:
        DataError: two files have the same name without ending, or the folder cannot be read.
    """
    files: dict[str, Path] = {}
    for path in entries(folder):
        if path.is_dir():
            continue
        if path.stem in files:
            raise DataError(
                f"{folder}: two files have the same name but for the ending, so masks and images "
                "cannot be paired: rename one"
            )
        files[path.stem] = path
    return files


def _check_partners(
    folder: Path, files: Mapping[str, Path], partners: Mapping[str, Path], what: str, where: str
) -> None:
    """Check that each file has a partner in the other folder: a file of the same name.

    The endings may differ. The names of files without a partner are logged on this machine only.

    Args:
        folder: the path of the folder that contains ``files``, for errors.
        files: name without ending -> file.
        partners: name without ending -> file in the other folder.
        what: 'mask' or 'image', which is missing, for errors.
        where: the name of the other folder, for errors.

    Raises:
        DataError: files have no partner. The error has the number of these files.
    """
    lone: Sequence[str] = [stem for stem in files if stem not in partners]
    if lone:
        log_names(str(folder), [("a file without a partner", files[stem].name) for stem in lone])
        raise DataError(
            f"{folder}: {format_count(len(lone), 'file')} without {what} of the same name in "
            f"'{where}': add them, or remove the files; the site's log names them"
        )
