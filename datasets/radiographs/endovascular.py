"""The hospitals' own angiograms: ``endovascular.yaml``, and a manifest (CSV) per source.

Manifests are like those of ``images``, with a further column ``mask`` (docs/endovascular.md). An
image becomes 8-bit grey. Its central square is resized; the mask's is sampled at the nearest
pixels.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.text_files import read_rows
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.declaration import stored_name
from fedsilo.datasets.images.decoding import (
    BrokenImageError,
    Decoded,
    Pixels,
    is_wide,
    opened_image,
)
from fedsilo.datasets.images.image_data_set import Reader
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.radiographs.dicom import is_dicom, read_dicom
from fedsilo.datasets.radiographs.mammography import DeepManifests
from fedsilo.datasets.radiographs.masked_images import MaskedDataSet, masked_silo
from fedsilo.datasets.radiographs.radiograph_decoding import read_grey, resize
from fedsilo.datasets.radiographs.vendor_profiles import Grey
from fedsilo.datasets.silo.silos import Silo

_RENDERING = 1  # raise it when a file gives other pixels, so that no old cache is read

Mask = npt.NDArray[np.bool_]


class Endovascular(DeepManifests, MaskedDataSet):
    """The data set ``endovascular``: images of 8 to 16 bits, some of which have masks."""

    name = "endovascular"
    tasks: ClassVar[tuple[str, ...]] = MaskedDataSet.tasks
    settings = DeepManifests.settings - {"data.standardise"}  # no task here has numbers
    file = "endovascular.yaml"
    columns: ClassVar[tuple[str, ...]] = ("mask",)

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the facts that decide the pixels: files, declared bits and decoder's version."""
        return [*super().content(index), self.bits(index), _RENDERING]

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that decodes an image by name to uint8 (1, size, size)."""
        bits = self.bits(index)
        return lambda name: read_square(index.folder / name, bits, size)[None]

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the images with masks, each in the same part as in the silo without masks."""
        return masked_silo(_WithMasks().load_arrays(name, settings, places))


class _WithMasks(Endovascular):
    """The same data set, but only the images with masks, whose second channel is the mask."""

    name = "endovascular-masked"
    channels = 2

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """List all images of a site, even those without masks.

        The split into training, validation and test images is then the same as for classification.
        Images without masks are left out when ``decode`` decodes them. At least one image must have
        a mask.

        Raises:
            DataError: no listed image has a mask, or the manifest (the list of images) is invalid.
        """
        index = super().index(site, settings, places)
        if not read_masks(index).keys() & set(index.names):
            raise DataError(
                f"{index.where}, column 'mask': no image in use has a mask, but segmentation "
                "needs some: name the masks' files there"
            )
        return index

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the facts that decide the pixels, including the files of the masks."""
        masks = read_masks(index)
        files = dataclasses.replace(index, names=tuple(masks.values()))
        return [*super().content(index), masks, super().content(files)]

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that decodes an image and its mask to uint8 (2, size, size).

        The function takes the image's name in ``index``. The first channel is the grey image, and
        the second the mask, 0 or 1. The central square of each is resized, the mask by taking the
        nearest pixel. The function raises ``BrokenImageError`` if the image or its mask is
        unusable, and ``KeyError`` for an image without a mask.
        """
        bits, masks = self.bits(index), read_masks(index)

        def read(name: str) -> Pixels:
            picture = read_picture(index.folder / name, bits)
            mask = _read_mask(picture, index.folder / masks[name])
            image = shrink(central_square(picture), size)
            return np.stack([image, shrink_mask(central_square(mask), size)])

        return read

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Decode the images that have a mask, each to its grey image and its mask.

        The result's images are (k, 2, size, size), for k decoded images. Images without masks are
        left out without a fault, and broken ones with a fault. ``Decoded.kept`` has the positions
        of the decoded images in the whole ``index``.

        Raises:
            DataError: the manifest cannot be read, or a mask is outside the data directory.
        """
        masks = read_masks(index)
        rows = np.flatnonzero([name in masks for name in index.names])
        decoded = super().decode(index.take(rows), size, settings)
        return dataclasses.replace(decoded, kept=rows[decoded.kept])


def read_masks(index: ImageIndex) -> dict[str, str]:
    """Read from a site's manifest (its list of images) which images have a mask.

    The manifest is the file ``index.where``. Images whose cell in the column 'mask' is empty are
    left out. A missing image or mask is not an error.

    Returns:
        Image -> its mask, both relative to ``index.folder``. If a file exists only under another
        Unicode form of its name (NFC or NFD), the result has that form. The name of a missing file
        stays as it is.

    Raises:
        DataError: the manifest cannot be read, or a mask is outside the data directory.
    """
    manifest = Path(index.where)
    masks = {}
    for number, row in read_rows(manifest, ("path", "label")):
        if not row.get("mask"):
            continue
        image = os.path.relpath(manifest.parent / row["path"], index.folder)
        mask = os.path.relpath(manifest.parent / row["mask"], index.folder)
        if "\0" in mask or mask.split(os.sep)[0] == os.pardir:
            raise DataError(
                f"{index.where}, line {number}, column 'mask': the file is outside the data "
                "directory, or this is not a file name: move it there, or correct the name"
            )
        masks[stored_name(index.folder, image)] = stored_name(index.folder, mask)
    return masks


def read_picture(path: Path, bits: int) -> Grey:
    """Decode an image file or a DICOM to a grey image, (height, width), float32, from 0 to 1.

    Args:
        path: the file. With 8 bits it must be a DICOM, PNG or JPEG, and colours of a PNG or JPEG
            are converted to grey. With more bits it must be a DICOM, or a grey PNG or TIFF.
        bits: the number of bits per pixel that the user declares, 8 to 16.

    Raises:
        BrokenImageError: the file is missing or damaged, or does not have an allowed format or the
            declared depth.
    """
    if is_dicom(path):
        return read_dicom(path, bits)
    if bits > 8:
        return read_grey(path, bits)
    return _read_8_bits(path)


def read_square(path: Path, bits: int, size: int) -> Pixels:
    """Decode the central square of an image file or DICOM to grey pixels, uint8 (size, size).

    ``bits`` is the number of bits per pixel that the user declares.

    Raises:
        BrokenImageError: the file is missing or damaged, or does not have an allowed format or the
            declared depth.
    """
    return shrink(central_square(read_picture(path, bits)), size)


def _read_8_bits(path: Path) -> Grey:
    """Decode an 8-bit PNG or JPEG to grey, (height, width), float32, from 0 to 1.

    The picture is turned upright by its EXIF data.

    Raises:
        BrokenImageError: the file is missing or damaged, or has more than 8 bits per channel.
    """
    from PIL import ImageOps

    with opened_image(path, ("PNG", "JPEG")) as image:
        if is_wide(image):
            raise BrokenImageError(
                "must have 8 bits per pixel, as 'bits' declares, but has more: correct 'bits'"
            )
        ImageOps.exif_transpose(image, in_place=True)
        upright = image.convert("L")
        image.close()  # its pixels take four times as much
    picture: Grey = np.array(upright, dtype=np.float32)
    # The division is in place, because a picture may have 89 million pixels
    picture /= np.float32(255)
    return picture


def _read_mask(picture: Grey, path: Path) -> Mask:
    """Read a PNG as a mask for ``picture``: a bool array (height, width), True for marked pixels.

    A pixel is marked if any of its stored values, except alpha, is above 0. Of ``picture`` only the
    size matters.

    Raises:
        BrokenImageError: the file cannot be read, or its size differs from the picture's.
    """
    try:
        with opened_image(path, ("PNG",)) as image:
            height, width = picture.shape
            if image.size != (width, height):  # before it is decoded
                raise BrokenImageError(
                    f"has {image.width}x{image.height} pixels, but its image {width}x{height}"
                )
            values = np.asarray(image)
            bands = np.array(image.getbands())
    except BrokenImageError as error:
        raise BrokenImageError(f"has a mask that {error}") from None
    if values.ndim == 3:
        # The alpha band does not count: an opaque background is background
        values = values[..., bands != "A"].max(axis=2)
    return values > 0


def central_square(picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of the largest central square of a picture or mask (height, width, ...).

    If the surplus is odd, one more row or column is cut at the bottom or right.
    """
    height, width = picture.shape[:2]
    side = min(height, width)
    top = (height - side) // 2
    left = (width - side) // 2
    return picture[top : top + side, left : left + side]


def shrink(square: Grey, size: int) -> Pixels:
    """Resize a square picture of 0..1 to (size, size), 0..255: bilinear, antialiased."""
    pixels: Pixels = np.rint(resize(square, size, size).clip(0, 1) * 255).astype(np.uint8)
    return pixels


def shrink_mask(square: npt.NDArray[Any], size: int) -> Pixels:
    """Resize a square mask of classes to (size, size), uint8, by taking the nearest pixel."""
    # The centre of each new pixel, in pixels of the old picture; a mean would blur the mask's edge
    places = ((np.arange(size) + 0.5) * len(square) / size).astype(np.int64)
    return square[np.ix_(places, places)].astype(np.uint8)


ENDOVASCULAR = Endovascular()
