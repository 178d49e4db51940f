"""The silo maker of the UEFL paper (section 4): slices of one data set, shifted by distribution.

D1 is the data as it is, D2 is rotated 50 degrees clockwise, D3 120 degrees counter-clockwise
(bilinear, zero fill) and, for all but MNIST, gets N(0, 10^2) noise on the 0..255 scale. Silo s
takes the s-th slice of the training and of the test images, in file order.
"""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datasets.sources import Places, Pool, Source, find_places, open_pool, source_named
from datasets.storage import build_folder, write_atomically
from models.errors import DataError
from models.networks import Task
from models.seeding import generator
from models.settings import CommonSettings

VALIDATION_SHARE = 10  # the last tenth of a silo's training data is its validation part
SPLITS = ("train", "val", "test")

_ROTATION = {"D1": 0.0, "D2": -50.0, "D3": 120.0}  # degrees, counter-clockwise
_NOISE_STD = 10.0
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read


@dataclass(frozen=True)
class Split:
    """``images`` (n, channels, height, width) float32 and ``labels`` (n,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Silo:
    """What one hospital holds; ``fingerprints`` is a SHA-256 per split."""

    name: str
    distribution: str
    task: Task
    train: Split
    val: Split
    test: Split
    fingerprints: dict[str, str]

    def label_counts(self) -> dict[str, list[int]]:
        """Return, per split, how many samples each class has."""
        return {
            name: torch.bincount(getattr(self, name).labels, minlength=self.task.classes).tolist()
            for name in SPLITS
        }


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
        least = VALIDATION_SHARE if part == "train" else 1
        if 0 < size < least:
            raise DataError(
                f"a silo of {size} {part} images has no validation part: raise 'silo-{part}-size' "
                f"to at least {least}, or lower 'silos'"
            )
        if size < least or size * settings.silos > have:
            raise DataError(
                f"{settings.silos} silos of {max(size, least)} {part} images need "
                f"{settings.silos * max(size, least)}, and '{source.name}' has {have}: lower "
                f"'silos' or 'silo-{part}-size'"
            )
        sizes.append(size)
    return sizes[0], sizes[1]


def shift(images: npt.NDArray[Any], distribution: str, noise: bool, key: str) -> Tensor:
    """Rotate ``images`` (n, height, width; 0..255) for ``distribution`` and add its noise.

    ``key`` names the draw, so that a silo's noise does not depend on the run's seed.
    """
    tensor = torch.from_numpy(np.array(images, dtype=np.float32)).unsqueeze(1)
    angle = _ROTATION[distribution]
    if angle:
        # torchvision takes seconds to import, and only a silo's first making needs it
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.functional import rotate

        tensor = rotate(tensor, angle, InterpolationMode.BILINEAR)
    if distribution == "D3" and noise:
        draw = torch.randn(tensor.shape, generator=generator(0, "silo-noise", key))
        tensor = tensor + _NOISE_STD * draw
    return tensor


def load_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Return the silo ``name``, from the cache or made now.

    Raises:
        DataError: there is no such silo, a file is missing or unusable, or data are too few.
    """
    names = silo_names(settings.silos)
    if name not in names:
        raise DataError(f"there is no silo '{name}': {settings.silos} silos are {', '.join(names)}")
    places = places or find_places(settings.data_dir, settings.cache_dir)
    source = source_named(settings.dataset)
    pool, pool_key = open_pool(source, places)
    sizes = silo_sizes(source, pool, settings)
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
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    target = places.cache / f"{source.name}-{pool_key}-silos" / f"{name}-{key}"
    if not target.is_dir():
        making = _Making(source, pool, name, index, sizes, settings)
        build_folder(target, making.fill)
    return _open_silo(target, source)


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
        for name, split in parts.items():
            np.save(folder / f"{name}-images.npy", split.images.numpy())
            np.save(folder / f"{name}-labels.npy", split.labels.numpy())
        facts = {
            "name": self.name,
            "distribution": self._distribution(),
            "fingerprints": {name: _fingerprint(split) for name, split in parts.items()},
        }
        write_atomically(folder / "silo.json", json.dumps(facts))

    def _distribution(self) -> str:
        return distributions(self.settings.silos)[self.index]

    def _split(self, images: npt.NDArray[Any], labels: npt.NDArray[Any], part: str) -> Split:
        key = f"{self.source.name}/{self.name}/{part}"
        shifted = shift(images, self._distribution(), self.source.noise, key)
        if self.settings.pixel_scale == "standard":
            shifted = (shifted / 255 - self.source.mean) / self.source.std
        return Split(shifted, torch.from_numpy(np.array(labels, dtype=np.int64)))


def _fingerprint(split: Split) -> str:
    digest = hashlib.sha256(split.images.numpy().tobytes())
    digest.update(split.labels.numpy().tobytes())
    return digest.hexdigest()


def _open_silo(folder: Path, source: Source) -> Silo:
    try:
        facts = json.loads((folder / "silo.json").read_text())
        splits = {
            # Copy-on-write maps: tensors that share the page cache and cannot alter the file.
            name: Split(
                torch.from_numpy(np.load(folder / f"{name}-images.npy", mmap_mode="c")),
                torch.from_numpy(np.load(folder / f"{name}-labels.npy", mmap_mode="c")),
            )
            for name in SPLITS
        }
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"the cached silo {folder} is damaged ({error}): remove that folder, it is made again"
        ) from None
    channels, height, width = splits["train"].images.shape[1:]
    return Silo(
        name=facts["name"],
        distribution=facts["distribution"],
        task=Task((channels, height, width), source.classes),
        fingerprints=facts["fingerprints"],
        **splits,
    )
