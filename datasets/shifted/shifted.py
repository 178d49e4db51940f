"""The silo maker of the UEFL paper (section 4): slices of one data set, shifted by distribution.

D1 is the data as it is, D2 is rotated 50 degrees clockwise, D3 120 degrees counter-clockwise
(bilinear, zero fill) and, for all but MNIST, gets N(0, 10^2) noise on the 0..255 scale. Silo s
takes the s-th slice of the training and of the test images, in file order.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datasets.io.locations import Places, PublicFiles
from datasets.shifted.pools import SOURCES, Pool, Source, open_pool
from datasets.silo.cache import cached_silo
from datasets.silo.silos import DataSet, Silo, Split, no_such_silo, save_silo
from models.contract.errors import DataError
from models.contract.seeding import generator
from models.contract.settings import CommonSettings
from models.contract.settings_schema import keys_with

VALIDATION_SHARE = 10  # the last tenth of a silo's training data is its validation part

_ROTATION = {"D1": 0.0, "D2": -50.0, "D3": 120.0}  # degrees, counter-clockwise
_NOISE_STD = 10.0
_MAKER = 3  # raise it when the same settings make other arrays, so that no old cache is read


def distributions(silos: int) -> list[str]:
    """Return each silo's distribution: nine and five as in the paper, else in turn."""
    if silos == 9:
        return ["D1"] * 3 + ["D2"] * 3 + ["D3"] * 3
    if silos == 5:
        return ["D1"] * 3 + ["D2", "D3"]
    return [f"D{1 + index % 3}" for index in range(silos)]


def silo_names(silos: int) -> list[str]:
    """Return the paper's names (its table 5): s1a, s1b, ... for D1, s2a, ... for D2."""
    seen: dict[str, int] = {}
    names = []
    for distribution in distributions(silos):
        count = seen.get(distribution, 0)
        seen[distribution] = count + 1
        names.append(f"s{distribution[1:]}{_letters(count)}")
    return names


def _letters(index: int) -> str:
    tail = string.ascii_lowercase[index % 26]
    return tail if index < 26 else _letters(index // 26 - 1) + tail


def silo_sizes(source: Source, pool: Pool, settings: CommonSettings) -> tuple[int, int]:
    """Return training and test images a silo.

    Raises:
        DataError: the data set is too small for so many silos of that size.
    """
    sizes = []
    for part, asked, usual, have in (
        ("train", settings.silo_train_size, source.train_size, len(pool.train_labels)),
        ("test", settings.silo_test_size, source.test_size, len(pool.test_labels)),
    ):
        size = asked or usual or have // settings.silos
        smallest = VALIDATION_SHARE if part == "train" else 1
        if 0 < size < smallest:
            raise DataError(
                f"a silo of {size} {part} images has no validation part: raise 'silo-{part}-size' "
                f"to at least {smallest}, or lower 'silos'"
            )
        if size < smallest or size * settings.silos > have:
            raise DataError(
                f"{settings.silos} silos of {max(size, smallest)} {part} images need "
                f"{settings.silos * max(size, smallest)}, and '{source.name}' has {have}: lower "
                f"'silos' or 'silo-{part}-size'"
            )
        sizes.append(size)
    return sizes[0], sizes[1]


def shift(images: npt.NDArray[Any], distribution: str, noise: bool, key: str) -> Tensor:
    """Rotate ``images`` (n, height, width; 0..255) for ``distribution`` and add its noise.

    ``key`` names the generator, so that a silo's noise does not depend on the run's seed.
    """
    tensor = torch.from_numpy(np.array(images, dtype=np.float32)).unsqueeze(1)
    angle = _ROTATION[distribution]
    if angle:
        # torchvision takes seconds to import, and only a silo's first making needs it
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.functional import rotate

        tensor = rotate(tensor, angle, InterpolationMode.BILINEAR)
    if distribution == "D3" and noise:
        grain = torch.randn(tensor.shape, generator=generator(0, "silo-noise", key))
        tensor = tensor + _NOISE_STD * grain
    return tensor


def scaled(pixels: Tensor, source: Source, settings: CommonSettings) -> Tensor:
    """Return ``pixels`` (n, 1, height, width; 0..255) as ``settings.pixel_scale`` asks."""
    raw = settings.pixel_scale == "raw"
    return pixels if raw else (pixels / 255 - source.mean) / source.std


@dataclass(frozen=True)
class ShiftedImages(DataSet):
    """Silos cut from one pool of images."""

    source: Source

    settings = frozenset({"pixel-scale", *keys_with(CommonSettings, "silo")})
    headline = ("accuracy", "entropy", "loss", "perplexity")

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.name

    @property
    def files(self) -> PublicFiles | None:
        """The source's files."""
        return self.source if self.source.files else None

    def silo_names(self, settings: CommonSettings) -> list[str]:
        """Return as many names as ``settings.silos`` says."""
        return silo_names(settings.silos)

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Cut the silo from the pool, once."""
        names = silo_names(settings.silos)
        if name not in names:
            raise no_such_silo(name, names)
        pool, pool_key = open_pool(self.source, places)
        sizes = silo_sizes(self.source, pool, settings)
        index = names.index(name)
        facts = [
            _MAKER,
            pool_key,
            index,
            name,
            sizes,
            distributions(settings.silos)[index],
            settings.pixel_scale,
        ]
        folder = places.cache / f"{self.source.name}-{pool_key}-silos"
        making = _Making(self.source, pool, name, index, sizes, settings)
        return cached_silo(folder, name, facts, self.source.classes, making.fill)


@dataclass(frozen=True)
class _Making:
    """The making of one silo's folder."""

    source: Source
    pool: Pool
    name: str
    index: int
    sizes: tuple[int, int]
    settings: CommonSettings

    def fill(self, folder: Path) -> None:
        train_size, test_size = self.sizes
        validation = train_size // VALIDATION_SHARE
        train = slice(self.index * train_size, (self.index + 1) * train_size - validation)
        val = slice(train.stop, train.stop + validation)
        test = slice(self.index * test_size, (self.index + 1) * test_size)
        pool = self.pool
        parts = {
            "train": self._split(pool.train_images[train], pool.train_labels[train], "train"),
            "val": self._split(pool.train_images[val], pool.train_labels[val], "val"),
            "test": self._split(pool.test_images[test], pool.test_labels[test], "test"),
        }
        save_silo(folder, parts, {"name": self.name, "distribution": self._distribution()})

    def _distribution(self) -> str:
        return distributions(self.settings.silos)[self.index]

    def _split(self, images: npt.NDArray[Any], labels: npt.NDArray[Any], part: str) -> Split:
        key = f"{self.source.name}/{self.name}/{part}"
        shifted = shift(images, self._distribution(), self.source.noise, key)
        inputs = scaled(shifted, self.source, self.settings)
        return Split(inputs, torch.from_numpy(np.array(labels, dtype=np.int64)))


DIGITS, MNIST, FMNIST = (ShiftedImages(SOURCES[name]) for name in ("digits", "mnist", "fmnist"))
