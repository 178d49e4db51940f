"""Folders of images as torchvision's users have them: folders name the sites, parts and classes.

``SITE/CLASS/*``, ``SITE/{train,val,test}/CLASS/*``, or both without sites, which is one silo to
cut others from. It is the same as the manifests that ``fedsilo manifest folder`` writes, made
when it is read.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsilo.core.errors import DataError, FileNamesError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.locations import Places, data_folder, find_places
from fedsilo.core.one_line import format_count, one_line, quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.folder_layout import (
    ENDINGS,
    LAYOUTS,
    are_parts,
    check_class_names,
    count_unread,
    pictures,
    subfolders,
)
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet
from fedsilo.datasets.images.index import ImageIndex, take_share
from fedsilo.datasets.silo.declared_silos import site_name_fault
from fedsilo.datasets.silo.silos import Silo

MANIFEST = "manifest.csv"
COLUMNS = ("path", "label", "patient", "split")
ALONE = "folder"  # the silo of images without a site
_DECLARATION = "images.yaml"


@dataclass(frozen=True)
class Image:
    """An image: its file, label and patient, and its part, empty where the source has none."""

    path: Path
    label: str
    patient: str = ""
    split: str = ""


def read_folder(folder: Path) -> dict[str, list[Image]]:
    """List the images of each site in the order of their paths.

    Raises:
        DataError: the layout is none of the three, a class is empty, or there is only one.
    """
    tops = subfolders(folder)
    if not tops:
        raise DataError(f"{folder} holds no folders: sort the images into {LAYOUTS}")
    without_sites = are_parts(tops) or any(map(pictures, tops))
    sites = {ALONE: folder} if without_sites else {top.name: top for top in tops}
    if fault := next(filter(None, map(site_name_fault, sites)), None):
        raise DataError(f"{folder}: {fault}: rename the folder")
    found = {site: _read_site(own) for site, own in sites.items()}
    if len(classes := _classes(found)) < 2:
        raise DataError(
            f"{folder} has one class, '{one_line(classes[0], 60)}': a classifier needs two; sort "
            f"the images into {LAYOUTS}"
        )
    return found


def _read_site(folder: Path) -> list[Image]:
    """List the images of one site, part by part and class by class."""
    images = []
    for part, part_folder in _part_folders(folder).items():
        class_folders = subfolders(part_folder)
        if not class_folders:
            raise DataError(
                f"{part_folder} holds no folder of a class: sort the images into {LAYOUTS}"
            )
        check_class_names(part_folder, [one.name for one in class_folders])
        for class_folder in class_folders:
            files = pictures(class_folder)
            if not files:
                raise DataError(
                    f"{class_folder} holds no image ({', '.join(ENDINGS)}), but a folder next to "
                    f"it does: add some, remove it, or sort all images into {LAYOUTS}"
                )
            images += [Image(file, class_folder.name, split=part) for file in files]
    return images


def _part_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of a site's splits by name; without splits it is one, named ''."""
    tops = subfolders(folder)
    if are_parts(tops):
        return {top.name: top for top in tops}
    return {"": folder}


def _classes(sites: Mapping[str, Sequence[Image]]) -> list[str]:
    return sorted({image.label for images in sites.values() for image in images})


class FolderImages(ImageDataSet):
    """``folder``: 8-bit images in colour, sorted into folders; a site needs its own folder only."""

    name = "folder"
    origin = "own"
    silos_by_files = True

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the names of the classes' folders, in alphabetical order."""
        return {name: [name] for name in _classes(self._sites(places))}

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the sites' folders, in alphabetical order."""
        return list(self._sites(places))

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Return a silo; if the folders name no sites, all images belong to the asking site."""
        if list(self._sites(places)) == [ALONE]:
            return self._load(name, settings, places)
        return super().load(name, settings, places)

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List the site's folder."""
        folder, sites = self.files_folder(places), self._sites(places)
        images = sites[ALONE] if list(sites) == [ALONE] else sites[site]
        numbers, places_of = Counter[str](), {c: at for at, c in enumerate(_classes(sites))}
        called = []
        for image in images:
            own = "/".join(filter(None, (image.split, image.label)))
            numbers[own] += 1
            called.append(f"image {numbers[own]} of '{one_line(own, 60)}'")
        names = tuple(image.path.relative_to(folder).as_posix() for image in images)
        index = ImageIndex(
            where=str(folder if list(sites) == [ALONE] else folder / site),
            folder=folder,
            names=names,
            labels=np.array([places_of[image.label] for image in images], dtype=np.int64),
            groups=tuple(f"file {name}" for name in names),
            safe_names=tuple(called),
            parts=tuple(image.split for image in images) if images[0].split else (),
        )
        return take_share(index, settings.sample_share)

    def gives_validation(self, settings: CommonSettings, places: Places) -> bool:
        """Tell whether a site has a folder ``val``."""
        return any(one.split == "val" for images in self._sites(places).values() for one in images)

    def notices(self, settings: CommonSettings) -> list[str]:
        """Say which files are not read, and if the folders name no sites, which leaves one silo."""
        places = find_places(settings.data_dir, settings.cache_dir)
        try:
            sites = self._sites(places)
        except DataError:
            return []
        sentences = self._unread_files(sites, places)
        if settings.partition == "own" and list(sites) == [ALONE]:
            sentences.append(
                "the folders name classes and no sites, so that all images are one silo: --set "
                "partition=dirichlet cuts several from it"
            )
        return sentences

    def _unread_files(self, sites: Mapping[str, Sequence[Image]], places: Places) -> list[str]:
        """Return a sentence for each class folder that has files which are not read."""
        data, sentences = self.files_folder(places), []
        for images in sites.values():
            for class_folder in dict.fromkeys(image.path.parent for image in images):
                name = class_folder.relative_to(data).as_posix()
                for reason, count in count_unread(class_folder).items():
                    files = format_count(count, "file")
                    sentences.append(f"folder '{one_line(name, 80)}': {files} {reason} not read")
        return sentences

    def files_folder(self, places: Places) -> Path:
        """Return the data directory, where the folders are."""
        return data_folder(places, self.name, f"of images sorted into {LAYOUTS}")

    def _sites(self, places: Places) -> dict[str, list[Image]]:
        """List the images by site, or raise a ``DataError`` if the sites' classes differ."""
        folder = self.files_folder(places)
        try:
            sites = read_folder(folder)
        except DataError as error:
            raise FileNamesError(str(error)) from None
        (first, of_first), *others = ((site, _classes({site: own})) for site, own in sites.items())
        for site, own in others:
            if odd := sorted(set(own) ^ set(of_first)):
                raise FileNamesError(
                    f"{folder} was read as SITE/CLASS/*, but only one of the sites '{first}' and "
                    f"'{site}' has the class '{one_line(odd[0], 60)}': give all sites folders of "
                    "the same classes; if the outer folders are classes, put the images directly "
                    "into them; or run 'fedsilo manifest folder', whose images.yaml lists the "
                    "classes of all sites"
                )
        return sites


def write_folder_manifests(folder: Path) -> dict[Path, Counter[str]]:
    """Write each site's manifest and ``images.yaml`` into ``folder``.

    Returns:
        For each manifest how many images each label has.

    Raises:
        DataError: as of ``read_folder``, or a file already exists. Nothing is written then.
    """
    sites = read_folder(folder)
    classes = _classes(sites)
    if odd := [name for name in classes if name != name.lstrip() or not name.isprintable()]:
        raise DataError(
            f"{folder}: class {quote_value(odd[0])} must not begin with a space or have characters "
            "that cannot be printed, because no manifest can name its files: rename its folders"
        )
    own = {site: Path("" if site == ALONE else site) / MANIFEST for site in sites}
    declaration = folder / _DECLARATION
    refuse_existing(declaration, *(folder / manifest for manifest in own.values()))
    for site, images in sites.items():
        write_images(folder / own[site], images)
    listed = {site: manifest.as_posix() for site, manifest in own.items()}
    facts = {"sites": listed, "classes": classes}
    write_atomically(
        declaration,
        "".join(f"{k}: {json.dumps(v, ensure_ascii=False)}\n" for k, v in facts.items()),
    )
    return {
        folder / own[site]: Counter(image.label for image in images)
        for site, images in sites.items()
    }


def refuse_existing(*paths: Path) -> None:
    """Refuse to write a file that already exists, by a ``DataError``."""
    for path in paths:
        if path.exists():
            raise DataError(f"{path} already exists: remove it to write it again")


def write_images(manifest: Path, images: Sequence[Image]) -> None:
    """Write a manifest of images below its folder; the parts only if all of them have one."""
    rows = [
        [one.path.relative_to(manifest.parent).as_posix(), one.label, one.patient, one.split]
        for one in images
    ]
    width = len(COLUMNS) if all(one.split for one in images) else len(COLUMNS) - 1
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(row[:width] for row in [COLUMNS, *rows])
    write_atomically(manifest, text.getvalue())


FOLDER = FolderImages()
