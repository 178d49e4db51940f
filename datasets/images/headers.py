"""What image files are like before anything is done to them: width, height and bits a pixel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsilo.datasets.images.decoding import BrokenImageError, opened_image
from fedsilo.datasets.silo.measures import Measure

ALL = "all"  # files are counted over all splits
_FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "PPM")
_SIDES = (64.0, 128.0, 256.0, 512.0, 768.0, 1024.0, 1536.0, 2048.0, 3072.0, 4096.0)
_DEPTHS = (2.0, 9.0, 17.0, 25.0)
_BITS = {"1": 1, "L": 8, "P": 8, "LA": 16, "RGB": 24, "YCbCr": 24, "RGBA": 32, "CMYK": 32}


@dataclass(frozen=True)
class Header:
    """Pixels of a file's sides, and bits a pixel."""

    width: int
    height: int
    bits: int


def picture_header(path: Path) -> Header:
    """Return what an image file says of itself; its pixels are not decoded.

    Raises:
        BrokenImageError: it is missing, or no image.
    """
    with opened_image(path, _FORMATS) as image:
        bits = 16 if image.mode.startswith("I") else _BITS.get(image.mode, 0)
        return Header(image.width, image.height, bits)


def header_measures(paths: Iterable[Path], read: Callable[[Path], Header]) -> list[Measure]:
    """Return width, height and depth of the files that can be read."""
    headers: list[Header] = []
    for path in paths:
        try:
            headers.append(read(path))
        except BrokenImageError:
            continue  # they are counted among those left out
    named = {
        "width": ([h.width for h in headers], _SIDES),
        "height": ([h.height for h in headers], _SIDES),
        "bits a pixel": ([h.bits for h in headers], _DEPTHS),
    }
    return [
        Measure(name, {ALL: np.array(values, dtype=np.float64)}, edges)
        for name, (values, edges) in named.items()
    ]
