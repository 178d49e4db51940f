"""Images sorted into folders as for torchvision: folders name the sites, parts and classes.

The layouts are ``SITE/CLASS/*``, ``SITE/{train,val,test}/CLASS/*``, or one of them without sites,
which gives one silo to cut further silos from. Reading folders gives the same result as reading the
manifests that ``fedsilo manifest folder`` writes.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsilo.core.errors import DataError, FileNamesError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.locations import Places, data_folder, find_places
from fedsilo.core.files.site_names import find_by_site, is_visible, normalise_name
from fedsilo.core.one_line import format_count, one_line, quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.folder_layout import (
    ENDINGS,
    LAYOUTS,
    are_parts,
    check_class_names,
    check_no_class_folders,
    count_loose,
    count_unread,
    pictures,
    subfolders,
)
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet
from fedsilo.datasets.images.index import ImageIndex, ListedImage, index_images, take_share
from fedsilo.datasets.silo.silos import Silo

MANIFEST = "manifest.csv"
COLUMNS = ("path", "label", "patient", "split")
ALONE = "folder"  # the silo of images without a site
_DECLARATION = "images.yaml"


@dataclass(frozen=True)
class Image:
    """An image file with its label, its patient ('' if unknown) and its part ('' if not given)."""

    path: Path
    label: str
    patient: str = ""
    split: str = ""


def read_folder(folder: Path) -> dict[str, list[Image]]:
    """List the images of each site in a folder, sorted by part, class and file name.

    Subfolders are parts if all of them are named 'train', 'val' or 'test'. Otherwise all subfolders
    are classes if at least one has images directly in it. In these two layouts all images belong to
    one site named 'folder'. In any other layout each subfolder is a site. The sites need not have
    the same classes.

    Raises:
        DataError: the folders match no layout, a name is invalid, a class has no image, or there is
            only one class.
    """
    tops = subfolders(folder)
    if not tops:
        raise DataError(f"{folder} does not contain folders: sort the images into {LAYOUTS}")
    # Folders that are parts, or hold images directly, are not sites: there is only one site then
    if are_parts(tops):
        folders = {ALONE: folder}
    elif any(map(pictures, tops)):
        check_no_class_folders(tops)
        folders = {ALONE: folder}
    else:
        folders = find_by_site({top.name: top for top in tops})
    sites = {site: _read_site(site_folder) for site, site_folder in folders.items()}
    classes = _classes(sites)
    if len(classes) < 2:
        raise DataError(
            f"{folder} has one class, '{one_line(classes[0], 60)}', but a classifier needs two: "
            f"sort the images into {LAYOUTS}"
        )
    return sites


def _read_site(folder: Path) -> list[Image]:
    """List the images of one site, ordered by part, class and file name.

    A site without folders for parts (train, val, test) has class folders directly in it.

    Raises:
        DataError: a part has no class folders, a class folder has no image, or the class folders
            look like years or like images and masks.
    """
    images = []
    for part, part_folder in _part_folders(folder).items():
        class_folders = subfolders(part_folder)
        if not class_folders:
            raise DataError(
                f"{part_folder} has no folder for a class: sort the images into {LAYOUTS}"
            )
        check_class_names(part_folder, [folder.name for folder in class_folders])
        for class_folder in class_folders:
            files = pictures(class_folder)
            if not files:
                raise DataError(
                    f"{class_folder} has no image ({', '.join(ENDINGS)}), but a folder next to "
                    f"it does: add some, remove it, or sort all images into {LAYOUTS}"
                )
            # A Mac writes an umlaut as a letter and an accent; elsewhere it is the same class
            label = normalise_name(class_folder.name)
            images += [Image(file, label, split=part) for file in files]
    return images


def _part_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each part of a site: 'train', 'val' or 'test' -> folder.

    If ``folder`` has no such subfolders, the result is '' -> ``folder``.

    Raises:
        DataError: some subfolders look like parts of a split, but not all are named train, val or
            test.
    """
    tops = subfolders(folder)
    if are_parts(tops):
        return {top.name: top for top in tops}
    return {"": folder}


def _classes(sites: Mapping[str, Sequence[Image]]) -> list[str]:
    """Return the labels of all sites' images, each once, in alphabetical order."""
    labels: set[str] = set()
    for images in sites.values():
        labels.update(image.label for image in images)
    return sorted(labels)


class FolderImages(ImageDataSet):
    """The data set ``folder``: 8-bit colour images in folders; a site needs only its own folder."""

    name = "folder"
    origin = "own"
    silos_by_files = True

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the names of the class folders, in alphabetical order: name -> [name].

        Each class has its name as its only label.

        Raises:
            DataError: the folders match no layout, or the sites' classes differ.
        """
        return {name: [name] for name in _classes(self._list_sites(places))}

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the sites' names in the order of their folders, or only 'folder' without them.

        There are no site folders if the subfolders of the data directory are classes or parts
        (train, val, test). All images then belong to one site with the name 'folder'.

        Raises:
            DataError: the folders match no layout, or the sites' classes differ.
        """
        return list(self._list_sites(places))

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load a site's silo, which is its decoded training, validation and test images.

        If there are no site folders, any ``name`` is accepted, and its silo has all images.

        Raises:
            DataError: the folders match no layout, the sites' classes differ, no site has this
                name, too few training images are left, or broken images may not be skipped.
        """
        if list(self._list_sites(places)) == [ALONE]:
            return self._load(name, settings, places)
        return super().load(name, settings, places)

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List a site's images, reduced to about the share that 'split.sample-share' sets.

        Hashes of the file names choose the images. Each image counts as a patient, because folders
        do not name patients. If there are no site folders, any ``site`` is accepted, and all images
        of the data directory are listed.

        Raises:
            DataError: the folders match no layout, or the sites' classes differ.
        """
        folder = self.files_folder(places)
        sites = self._list_sites(places)
        if list(sites) == [ALONE]:  # all images belong to the asking site
            site = ALONE
        classes = _classes(sites)
        numbers: Counter[str] = Counter()
        images = []
        for image in sites[site]:
            name = image.path.relative_to(folder).as_posix()
            # Errors name an image by its place and a number, because a file may name a patient
            place = f"{image.split}/{image.label}".removeprefix("/")
            numbers[place] += 1
            safe_name = f"image {numbers[place]} of '{one_line(place, 60)}'"
            label = classes.index(image.label)
            # No patient is known, so each file is a group
            images.append(ListedImage(name, label, f"file {name}", safe_name, image.split))
        index = index_images(str(_folder_of(site, sites, folder)), folder, images)
        return take_share(index, settings.sample_share)

    def gives_validation(self, settings: CommonSettings, places: Places) -> bool:
        """Tell whether any site has a folder ``val`` with images for validation.

        Without site folders, the data directory's folder ``val`` counts.

        Raises:
            DataError: the folders match no layout, or the sites' classes differ.
        """
        for images in self._list_sites(places).values():
            if any(image.split == "val" for image in images):
                return True
        return False

    def notices(self, settings: CommonSettings) -> list[str]:
        """List notices for the user: the files that are not read, and the lack of site folders.

        Unread files give one sentence for each folder and reason. Without site folders, a last
        sentence says that all images are one silo. This last sentence is left out unless
        'split.partition' is 'own'. The list is empty if the folders cannot be read.
        """
        places = find_places(settings.data_dir, settings.cache_dir)
        try:
            sites = self._list_sites(places)
        except DataError:
            return []
        sentences = self.unread_files(settings, places)
        if settings.partition == "own" and list(sites) == [ALONE]:
            sentences.append(
                "the folders name classes and no sites, so all images are one silo: --set "
                "split.partition=dirichlet cuts several from it"
            )
        return sentences

    def unread_files(self, settings: CommonSettings, places: Places) -> list[str]:
        """Describe the files that are not read, in one sentence for each folder and reason.

        Not read are images outside a class folder, files in subfolders of a class folder, and files
        of other types. The list is empty if every file is read.

        Raises:
            DataError: the folders match no layout, or the sites' classes differ.
        """
        data = self.files_folder(places)
        class_folders: dict[Path, None] = {}
        above: set[Path] = set()
        for images in self._list_sites(places).values():
            for image in images:
                class_folders[image.path.parent] = None
        # An image in a folder above the classes has no label
        for class_folder in class_folders:
            above.update(path for path in class_folder.parents if path.is_relative_to(data))
        sentences = []
        for folder, count in count_loose(sorted(above)).items():
            images_there = format_count(count, "image")
            sentences.append(
                f"{_name_folder(folder, data)}: {images_there} next to folders not read"
            )
        for folder in class_folders:
            for reason, count in count_unread(folder).items():
                files = format_count(count, "file")
                sentences.append(f"{_name_folder(folder, data)}: {files} {reason} not read")
        return sentences

    def files_folder(self, places: Places) -> Path:
        """Return the data directory, which contains the folders of sites, parts or classes.

        Raises:
            DataError: no data directory is named.
        """
        return data_folder(places, self.name, f"of images sorted into {LAYOUTS}")

    def _list_sites(self, places: Places) -> dict[str, list[Image]]:
        """List the images of each site in the data directory: site -> images.

        All sites must have the same classes. Folders may be named after patients. An error that
        shows their names is therefore a ``FileNamesError``, a special ``DataError``.

        Raises:
            FileNamesError: the folders match no layout, or two sites have different classes.
            DataError: no data directory is named.
        """
        folder = self.files_folder(places)
        try:
            sites = read_folder(folder)
        except DataError as error:
            raise FileNamesError(str(error)) from None
        # Class numbers follow from the folders' names, so all sites must have the same folders
        first, *others = sites
        classes = _classes({first: sites[first]})
        for site in others:
            odd = sorted(set(classes).symmetric_difference(_classes({site: sites[site]})))
            if odd:
                raise FileNamesError(
                    f"{folder} was read as SITE/CLASS/*, but only one of the sites '{first}' and "
                    f"'{site}' has the class '{one_line(odd[0], 60)}': give all sites folders of "
                    "the same classes; if the outer folders are classes, put the images directly "
                    "into them; or run 'fedsilo manifest folder', whose images.yaml lists the "
                    "classes of all sites"
                )
        return sites


def _folder_of(site: str, sites: Mapping[str, Sequence[Image]], data: Path) -> Path:
    """Return a site's folder, which is the first folder below ``data`` in the path of its images.

    The site's name is not enough, because special characters may be encoded in the folder's name.
    If the only site is 'folder' (``ALONE``), there are no site folders, and the result is ``data``.

    Args:
        site: the site's name.
        sites: site -> its images, at least one image each.
        data: the data directory, which contains the images.
    """
    if list(sites) == [ALONE]:
        return data
    return data / sites[site][0].path.relative_to(data).parts[0]


def _name_folder(folder: Path, data: Path) -> str:
    """Name a folder relative to the data directory, for messages."""
    name = data.name if folder == data else folder.relative_to(data).as_posix()
    return f"folder '{one_line(name, 80)}'"


def write_folder_manifests(
    folder: Path, labels: Mapping[str, str] | None = None
) -> dict[Path, Counter[str]]:
    """Write a manifest (a list of images) for each site, and ``images.yaml`` into ``folder``.

    Each manifest, ``manifest.csv``, is in its site's folder. ``images.yaml`` lists the manifests
    and the classes, so that the data set 'images' can read the same files.

    Args:
        folder: the folder that ``read_folder`` reads.
        labels: name of a class folder -> class. A folder that is not in ``labels`` names its own
            class.

    Returns:
        Path of a manifest -> number of images of each class.

    Raises:
        DataError: ``read_folder`` refuses the folder, one of the files already exists, or a class
            name begins with a space or has an invisible character. Nothing is written then.
    """
    sites = read_folder(folder)
    for site, images in sites.items():
        sites[site] = [_relabel(image, labels or {}) for image in images]
    classes = _classes(sites)
    for name in classes:
        if name != name.lstrip() or not is_visible(name):
            raise DataError(
                f"{folder}: class {quote_value(name)} must not begin with a space or have "
                "characters that cannot be seen, because no manifest can name its files: rename "
                "its folders"
            )
    listed = {}
    for site in sites:
        own = _folder_of(site, sites, folder)
        listed[site] = (own / MANIFEST).relative_to(folder).as_posix()
    declaration = folder / _DECLARATION
    # All of them before the first is written, so that nothing is written by half
    refuse_existing(declaration, *(folder / manifest for manifest in listed.values()))
    counts = {}
    for site, images in sites.items():
        manifest = folder / listed[site]
        write_images(manifest, images)
        counts[manifest] = Counter(image.label for image in images)
    lines = ""
    for key, value in {"sites": listed, "classes": classes}.items():
        lines += f"{key}: {json.dumps(value, ensure_ascii=False)}\n"
    write_atomically(declaration, lines)
    return counts


def _relabel(image: Image, labels: Mapping[str, str]) -> Image:
    return replace(image, label=labels.get(image.label, image.label))


def refuse_existing(*paths: Path) -> None:
    """Check that nothing exists at these paths yet, so that no file is overwritten.

    Raises:
        DataError: a file or folder exists at one of the paths. The error names the first such path.
    """
    for path in paths:
        if path.exists():
            raise DataError(f"{path} already exists: remove it to write it again")


def write_images(manifest: Path, images: Sequence[Image]) -> None:
    """Write a manifest (CSV): a header, then the path, label, patient and split of each image.

    The paths are relative to the manifest's folder, which must contain all images. An unknown
    patient gives an empty cell. The column 'split' is left out unless every image has a split. An
    existing file is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    width = len(COLUMNS)
    if not all(image.split for image in images):
        width -= 1  # the last column is the part
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS[:width])
    for image in images:
        path = image.path.relative_to(manifest.parent).as_posix()
        writer.writerow([path, image.label, image.patient, image.split][:width])
    write_atomically(manifest, text.getvalue())


FOLDER = FolderImages()
