"""Silos of radiographs, one channel of 16 bits, and the hospitals' own: ``mammography.yaml``.

Each site has a manifest (CSV) as those of ``images`` are (docs/mammograms.md). Files are grey PNG
or TIFF, or DICOM, of the declared bits; a picture is cropped, resized and padded as in the
Fed-Align-CL paper. Networks standardise each image by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.datasets.images.dataset import ImageDataSet
from fedsilo.datasets.images.decoding import Decoded, Header, decode_each
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.images.manifests import Form, ManifestDataSet
from fedsilo.datasets.radiographs.decoding import as_int16, fit_square
from fedsilo.datasets.radiographs.dicom import radiograph_header, read_radiograph
from fedsilo.datasets.radiographs.vendor_profiles import Grey
from fedsilo.models.contract.settings import CommonSettings

HEADLINE = ("auc", "average-precision", "balanced-accuracy", "accuracy")

_RENDERING = 1  # raise it when a file or a profile gives other pixels, so that no old cache is read


class RadiographDataSet(ImageDataSet):
    """Images of one channel, as int16."""

    settings = ImageDataSet.settings - {"colour-constancy"}
    headline = HEADLINE

    @abstractmethod
    def reader(
        self, index: ImageIndex, size: int, settings: CommonSettings
    ) -> Callable[[str], Grey]:
        """Return what makes of an image's name its picture (size, size), 0..1.

        It raises a ``BrokenImageError`` for an image that cannot be used.
        """

    def content(self, index: ImageIndex) -> list[Any]:
        """Return what decides the pixels: the files, and how they are rendered."""
        return [*super().content(index), _RENDERING]

    def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
        """Return the images (k, 1, size, size) int16."""
        from threadpoolctl import threadpool_limits

        read = self.reader(index, size, settings)

        def decode(name: str) -> npt.NDArray[np.int16]:
            return as_int16(read(name))[None]

        # Several threads would only wait for each other in small products, and may round otherwise
        with threadpool_limits(1):
            return decode_each(index.names, (1, size, size), np.int16, decode)


class Mammography(ManifestDataSet, RadiographDataSet):
    """``mammography``: radiographs of 8 to 16 bits."""

    name = "mammography"
    origin = "own"
    form = Form("mammography.yaml", 2048, 0.2, bits=16)

    def header(self, path: Path) -> Header:
        """Return what a file says of itself, DICOM or picture."""
        return radiograph_header(path)

    def content(self, index: ImageIndex) -> list[Any]:
        """Return what decides the pixels: the files, and the declared bits."""
        return [*super().content(index), self.declaration(index.folder).bits]

    def reader(
        self, index: ImageIndex, size: int, settings: CommonSettings
    ) -> Callable[[str], Grey]:
        """Return the reading of a file."""
        bits = self.declaration(index.folder).bits

        def read(name: str) -> Grey:
            return fit_square(read_radiograph(index.folder / name, bits), size)

        return read


MAMMOGRAPHY = Mammography()
