"""The hospitals' own mammograms: ``mammography.yaml`` and each site's manifest (CSV).

Manifests are those of ``images`` (docs/mammograms.md). Files are grey PNG or TIFF, or DICOM, of the
declared bits; a picture is cropped, resized and padded as in the Fed-Align-CL paper.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsilo.datasets.images.headers import Header
from fedsilo.datasets.images.index import ImageIndex
from fedsilo.datasets.images.manifests import KEYS, Form, ManifestDataSet
from fedsilo.datasets.radiographs.dataset import RadiographDataSet
from fedsilo.datasets.radiographs.decoding import fit_square
from fedsilo.datasets.radiographs.dicom import radiograph_header, read_radiograph
from fedsilo.datasets.radiographs.vendor_profiles import Grey
from fedsilo.models.contract.settings import CommonSettings


class Mammography(ManifestDataSet, RadiographDataSet):
    """``mammography``: radiographs of 8 to 16 bits."""

    name = "mammography"
    origin = "own"
    form = Form("mammography.yaml", 2048, 0.2, bits=16, keys=(*KEYS, "bits"))

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
