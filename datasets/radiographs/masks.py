"""The hospitals' own images with masks: ``masks.yaml``, and a manifest or two folders per site.

docs/segmentation.md describes both. An image and its mask are cropped to their central square and
resized together, the mask by its nearest pixels.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator

from fedsilo.core.errors import DataError
from fedsilo.core.files.declarations import check_content, fault
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import SEGMENTATION
from fedsilo.datasets.images.declaration import distinct_names, resolve_inside
from fedsilo.datasets.images.decoding import (
    PICTURES,
    BrokenImageError,
    Pixels,
    opened_image,
    refuse_wide,
)
from fedsilo.datasets.images.folder_layout import subfolders
from fedsilo.datasets.images.image_data_set import Reader
from fedsilo.datasets.images.index import ImageIndex, take_share
from fedsilo.datasets.radiographs.dicom import is_dicom
from fedsilo.datasets.radiographs.endovascular import (
    central_square,
    read_picture,
    shrink,
    shrink_mask,
)
from fedsilo.datasets.radiographs.mammography import DeepDeclaration, DeepManifests
from fedsilo.datasets.radiographs.mask_files import (
    LARGEST_VALUE,
    MOST_CLASSES,
    read_class_mask,
    value_table,
)
from fedsilo.datasets.radiographs.mask_listings import (
    LAYOUT,
    MaskManifest,
    has_mask_folders,
    list_mask_folders,
)
from fedsilo.datasets.radiographs.masked_images import MaskedDataSet, split_masks
from fedsilo.datasets.radiographs.vendor_profiles import Grey
from fedsilo.datasets.silo.declared_silos import ClassLists, read_declared
from fedsilo.datasets.silo.silos import Silo, Split

_RENDERING = 1  # raise it when a file gives other pixels, so that no old cache is read
# Without masks.yaml: two classes, as most programs write masks
_USUAL_CLASSES = {"background": ["0"], "foreground": ["1", "255"]}


def _indices_as_lists(content: Any) -> Any:
    """Give a list of class names the pixel values 0, 1, ..., and return anything else unchanged."""
    if isinstance(content, list):
        return {name: [str(number)] for number, name in enumerate(distinct_names(content))}
    return content


def _check_values(classes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Check that there are at most 255 classes, and that their pixel values are whole numbers.

    Args:
        classes: class -> the pixel values that mean the class in masks, as strings of digits.
            Whether two classes share a value is not checked here.

    Returns:
        ``classes``, unchanged.

    Raises:
        ValueError: there are more than 255 classes, or a value is not a whole number from 0 to
            65535.
    """
    if len(classes) > MOST_CLASSES:
        raise fault(f"under 'classes' there must be at most {MOST_CLASSES} classes")
    for values in classes.values():
        for value in values:
            if not value.isdecimal() or int(value) > LARGEST_VALUE:
                raise fault(
                    f"under 'classes' each value must be a whole number from 0 to {LARGEST_VALUE}, "
                    "which pixels of the class have"
                )
    return classes


class MaskDeclaration(DeepDeclaration):
    """The content of ``masks.yaml``.

    Attributes:
        sites: site -> its manifest or its folder, relative to the data directory.
        classes: class name -> the pixel values in masks that mean this class; the first class is
            the background. A list of names gives them the values 0, 1, 2, ...
        colour: whether images have three channels, red, green and blue, instead of one.
    """

    classes: Annotated[
        ClassLists, BeforeValidator(_indices_as_lists), AfterValidator(_check_values)
    ]
    colour: bool = False


class MaskImages(DeepManifests, MaskedDataSet):
    """The data set ``masks``: images of 8 to 16 bits, each with a mask of classes."""

    name = "masks"
    file = "masks.yaml"
    tasks: ClassVar[tuple[str, ...]] = (SEGMENTATION,)
    settings = DeepManifests.settings - {"data.standardise"}  # its task has no numbers
    model: ClassVar[type[MaskDeclaration]] = MaskDeclaration

    def declaration(self, places: Places) -> MaskDeclaration:
        """Read ``masks.yaml``, which describes the data set, or derive its content from folders.

        The folders in the data directory are used only if the file does not exist. Each folder with
        ``images`` and ``masks`` is then a site.

        Raises:
            DataError: the file is invalid. Without the file, no folder has ``images`` and
                ``masks``, or the name of one that has them cannot be a site's name.
        """
        return _read_declaration(self.files_folder(places))

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List a site's images with their masks, for about 'split.sample-share' of the patients.

        A hash of the patients' names chooses them. An image counts as a patient by itself if no
        manifest (list of images) names its patient.

        Raises:
            DataError: the site's manifest or folder is missing, invalid or outside the data
                directory, or an image and a mask cannot be paired.
        """
        folder, declared = self.files_folder(places), self.declaration(places)
        listing = resolve_inside("", declared.sites[site])
        if listing is None:
            raise DataError(
                f"{folder / self.file}: the manifest or folder of site '{site}' is outside the "
                "data directory: move it there"
            )
        if (folder / listing).is_dir():
            index = list_mask_folders(folder / listing, folder)
        else:
            index = MaskManifest(folder, listing, declared.classes, self.file).read()
        return take_share(index, settings.sample_share)

    def gives_validation(self, settings: CommonSettings, places: Places) -> bool:
        """Tell whether any site on this machine has images in the part 'val'.

        The parts come from the site's manifest (its list of images), or from its folders named
        train, val and test. A site is skipped if its manifest or folder is not in the data
        directory, which ``places`` names. Images that the setting 'split.sample-share' leaves out
        do not count.

        Raises:
            DataError: ``masks.yaml`` is invalid, or a site's manifest or folder is invalid.
        """
        folder = self.files_folder(places)
        for site, listing in self.declaration(places).sites.items():
            if (folder / listing).exists() and "val" in self.index(site, settings, places).parts:
                return True
        return False

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the facts that decide the pixels: files, masks, depth, colour and the decoder."""
        declared = _read_declaration(index.folder)
        masks = dataclasses.replace(index, names=index.masks)
        pixels = [declared.bits, declared.colour, index.masks, _RENDERING]
        return [*super().content(index), *super().content(masks), *pixels]

    def bits(self, index: ImageIndex) -> int:
        """Return the bits per pixel that ``masks.yaml`` in ``index.folder`` states, by default 8.

        Raises:
            DataError: ``masks.yaml`` is invalid.
        """
        return _read_declaration(index.folder).bits

    def channels_of(self, index: ImageIndex) -> int:
        """Return the number of channels: 1 or 3 of the image, plus 1 if ``index`` has masks."""
        channels = 1
        if _read_declaration(index.folder).colour:
            channels = 3
        return channels + bool(index.masks)

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that maps an image's name to its pixels, uint8 (channels, size, size).

        There is one grey channel, or three channels if ``masks.yaml`` declares colour. If ``index``
        has masks, a last channel has the class index of each pixel. Image and mask are cut to their
        central square and resized, the mask by taking the nearest pixel. The function raises
        ``BrokenImageError`` if the image or its mask is unusable.

        Raises:
            DataError: ``masks.yaml`` is invalid.
        """
        declared = _read_declaration(index.folder)
        table = value_table(declared.classes)
        masks = dict(zip(index.names, index.masks, strict=False))

        def read(name: str) -> Pixels:
            channels = _read_channels(index.folder / name, declared)
            planes = [shrink(central_square(channel), size) for channel in channels]
            if name in masks:
                height, width = channels[0].shape
                mask = read_class_mask(index.folder / masks[name], height, width, table)
                planes.append(shrink_mask(central_square(mask), size))
            return np.stack(planes)

        return read

    def content_notes(self, index: ImageIndex, parts: Mapping[str, Split]) -> list[str]:
        """Return a list with one note if all masks of the site are empty, otherwise []."""
        for split in parts.values():
            if split.inputs[:, -1].any():
                return []
        return [f"{index.where}: all masks are empty, so this site trains only the background"]

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the images of a site, with their masks as labels (n, size, size)."""
        return split_masks(self.load_arrays(name, settings, places))

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the images of a site with their masks as labels, for any task of the run."""
        return self.load_masked(name, settings, places)


def _read_declaration(folder: Path) -> MaskDeclaration:
    """Read ``masks.yaml`` in the data directory, or derive its content from the folders.

    The file describes the data set. If it does not exist, each folder with ``images`` and ``masks``
    is a site with the folder's name. There are two classes: pixel value 0 is the background, and
    values 1 and 255 are the foreground. Images then have 8 bits without colour.

    Raises:
        DataError: the file is unreadable or invalid. Without the file, no folder has ``images`` and
            ``masks``, or the name of one that has them cannot be a site's name.
    """
    if (folder / MaskImages.file).exists():
        return read_declared(folder / MaskImages.file, MaskDeclaration)
    sites = {top.name: top.name for top in subfolders(folder) if has_mask_folders(top)}
    if not sites:
        raise DataError(
            f"{folder} has neither {MaskImages.file} nor folders of images and masks: write the "
            f"file, or sort the files into {LAYOUT}"
        )
    declared: MaskDeclaration = check_content(
        MaskDeclaration,
        {"sites": sites, "classes": _USUAL_CLASSES},
        lambda sentence: DataError(
            f"{folder}: its folders are taken as sites: {sentence}: rename the folder, or name the "
            f"sites in {MaskImages.file}"
        ),
        quoted=True,
    )
    return declared


def _read_channels(path: Path, declared: MaskDeclaration) -> list[Grey]:
    """Decode an image to its channels, each (height, width) float32, from 0 to 1.

    If ``declared``, the content of ``masks.yaml``, says that the images have colour, the channels
    are red, green and blue. Otherwise there is one grey channel.

    Raises:
        BrokenImageError: the file is missing or damaged, or does not have an allowed format or the
            declared depth. With colour, a DICOM is refused too.
    """
    if not declared.colour:
        return [read_picture(path, declared.bits)]
    if is_dicom(path):
        raise BrokenImageError("is DICOM, which is read as grey, but 'colour' is true")
    return _read_colours(path)


def _read_colours(path: Path) -> list[Grey]:
    """Decode an 8-bit image to its red, green and blue channels, in this order, from 0 to 1.

    Each channel is (height, width) float32. The image is turned upright by its EXIF data. An image
    that is not RGB is converted to RGB, without its alpha channel.

    Raises:
        BrokenImageError: the file is missing or damaged, or has more than 8 bits per channel.
    """
    from PIL import ImageOps

    with opened_image(path, PICTURES) as image:
        refuse_wide(image)
        ImageOps.exif_transpose(image, in_place=True)
        pixels = np.array(image.convert("RGB"), dtype=np.float32) / np.float32(255)
    return [pixels[..., channel] for channel in range(3)]


MASK_IMAGES = MaskImages()
