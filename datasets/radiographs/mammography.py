"""Silos of 16-bit grey radiographs, and hospitals' own mammograms: ``mammography.yaml``.

Each site has a manifest (CSV) like those of ``images`` (docs/mammograms.md). Files are DICOM, or
grey PNG or TIFF, with the declared bits; a picture is cropped, resized and padded as in the
Fed-Align-CL paper. Networks standardise each image by itself.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.files.declarations import number, whole
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.declaration import LARGEST_IMAGE, Declaration
from fedsilo.datasets.images.decoding import ImageHeader
from fedsilo.datasets.images.image_data_set import SMALLEST_IMAGE, ImageDataSet, Reader
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.images.manifests import ManifestDataSet
from fedsilo.datasets.radiographs.dicom import radiograph_header, read_radiograph
from fedsilo.datasets.radiographs.radiograph_decoding import as_int16, fit_square
from fedsilo.datasets.silo.declared_silos import read_declared

HEADLINE = ("auc", "average-precision", "balanced-accuracy", "accuracy")

_RENDERING = 1  # raise it when a file or a profile gives other pixels, so that no old cache is read


class RadiographDataSet(ImageDataSet):
    """A data set of images with one channel, stored as int16 (see ``Split``)."""

    settings = ImageDataSet.settings - {"data.colour-constancy"}
    headline = HEADLINE
    channels = 1
    dtype = np.int16

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the facts that decide the pixels: the files, and the version of the rendering."""
        return [*super().content(index), _RENDERING]


class DeepDeclaration(Declaration):
    """The content of a declaration file that also states the bits per pixel of all files."""

    bits: Annotated[int, whole(8, 16)] = 8


class DeepManifests(ManifestDataSet):
    """A data set of manifests whose files are DICOM, or pictures of 8 to 16 bits."""

    settings = ManifestDataSet.settings - {"data.colour-constancy"}
    model: ClassVar[type[DeepDeclaration]] = DeepDeclaration
    channels = 1

    def header(self, path: Path) -> ImageHeader:
        """Read width, height and bits per pixel from the header of a DICOM or a picture.

        Raises:
            BrokenImageError: the file is missing or damaged, or its header lacks one of these
                values.
        """
        return radiograph_header(path)

    def bits(self, index: ImageIndex) -> int:
        """Return the bits per pixel that the user's declaration file states for all images.

        The file is in ``index.folder``.

        Raises:
            DataError: the declaration is missing or invalid.
        """
        return read_declared(index.folder / self.file, self.model).bits


class MammogramsDeclaration(DeepDeclaration):
    """The content of a declaration file for mammograms, with their defaults."""

    image_size: Annotated[int, whole(SMALLEST_IMAGE, LARGEST_IMAGE)] = 2048
    test_share: Annotated[float, number(0.0, 0.9)] = 0.2
    bits: Annotated[int, whole(8, 16)] = 16


class Mammography(DeepManifests, RadiographDataSet):
    """The data set ``mammography``: the user's radiographs of 8 to 16 bits."""

    name = "mammography"
    file = "mammography.yaml"
    model = MammogramsDeclaration

    def content(self, index: ImageIndex) -> list[Any]:
        """Return the facts that decide the pixels: the files, and the declared bits."""
        return [*super().content(index), self.bits(index)]

    def reader(self, index: ImageIndex, size: int, settings: CommonSettings) -> Reader:
        """Return a function that decodes an image by name to int16 (1, size, size).

        The function crops the dark edges, and resizes the rest until the longer side has ``size``
        pixels. The remaining area gets the darkest value. Brightness 0..1 is stored as
        -32768..32767. The function raises ``BrokenImageError`` if the file is unusable or all
        pixels are equal.
        """
        bits = self.bits(index)

        def read(name: str) -> npt.NDArray[np.int16]:
            return as_int16(fit_square(read_radiograph(index.folder / name, bits), size))[None]

        return read


MAMMOGRAPHY = Mammography()
