"""Cut the silos of the UEFL paper (section 4): slices of one data set, each with its own shift.

D1 is the data unchanged; D2 is rotated by 50 degrees clockwise; D3 is rotated by 120 degrees
counter-clockwise (both bilinear, zero fill) and, except for MNIST and MedMNIST, gets N(0, 10^2)
noise on the 0..255 scale, independent per colour channel. Silo s takes the s-th slice of the
training images and of the test images, in the pool's order.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.seeding import generator
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import keys_with
from fedsilo.datasets.images.decoding import PICTURES, opened_image, refuse_wide
from fedsilo.datasets.shifted.pools import Pool, Source, cut_by_track, locate, open_pool
from fedsilo.datasets.shifted.sources import SOURCES
from fedsilo.datasets.silo.measures import Measure, picture_measures
from fedsilo.datasets.silo.silos import DataSet, ImageReader, Silo, Split, cached_silo, save_silo

if TYPE_CHECKING:
    from torch import Tensor

VALIDATION_SHARE = 10  # the last tenth of a silo's training data is its validation part

_LEAST = {"train": VALIDATION_SHARE, "test": 1}  # images of a silo that can be used
_ROTATION = {"D1": 0.0, "D2": -50.0, "D3": 120.0}  # degrees, counter-clockwise
_NOISE_STD = 10.0
_MAKER = 3  # raise it when the same settings make other arrays, so that no old cache is read


def distributions(silos: int) -> list[str]:
    """Return the distribution of each silo, which decides how its images are shifted.

    "D1" leaves images unchanged. "D2" rotates them by 50 degrees clockwise. "D3" rotates them by
    120 degrees counter-clockwise, and adds noise in some data sets. For five and nine silos, the
    order is that of the paper on the method UEFL:

    - Nine silos: D1, D1, D1, D2, D2, D2, D3, D3, D3.
    - Five silos: D1, D1, D1, D2, D3.
    - Any other number: D1, D2, D3, D1, D2, D3 and so on.
    """
    if silos == 9:
        return ["D1"] * 3 + ["D2"] * 3 + ["D3"] * 3
    if silos == 5:
        return ["D1"] * 3 + ["D2", "D3"]
    return [f"D{1 + index % 3}" for index in range(silos)]


def silo_names(silos: int) -> list[str]:
    """Return the silos' names as in the UEFL paper, such as 's1a' and 's1b' for two silos of D1.

    The digit is that of the silo's distribution D1, D2 or D3. The order is that of
    ``distributions``.
    """
    seen: dict[str, int] = {}
    names = []
    for distribution in distributions(silos):
        count = seen.get(distribution, 0)
        seen[distribution] = count + 1
        names.append(f"s{distribution[1:]}{_letters(count)}")
    return names


def _letters(index: int) -> str:
    """Write an index in letters: 0 is a, 25 is z, 26 is aa."""
    last = string.ascii_lowercase[index % 26]
    if index < 26:
        return last
    return _letters(index // 26 - 1) + last


def silo_sizes(source: Source, pool: Pool, settings: CommonSettings) -> tuple[int, int]:
    """Compute how many training images and how many test images each silo gets.

    Each size is the setting's, or ``source``'s if the setting is 0. If both are 0, the images of
    that part of the pool are divided equally and rounded down.

    Returns:
        The number of training images per silo, from which validation images may be held out, and
        the number of test images.

    Raises:
        DataError: the pool has too few images for these sizes, or a silo would have fewer than 10
            training images or no test image. The error advises other settings.
    """
    silos, given = settings.silos, settings.silo_train_size
    have = {"train": len(pool.train_labels), "test": len(pool.test_labels)}
    size = {
        "train": given or source.train_size or have["train"] // silos,
        "test": settings.silo_test_size or source.test_size or have["test"] // silos,
    }
    if 0 < size["train"] < VALIDATION_SHARE:
        # A size that no setting names is the pool's share for that many silos
        advice = "lower 'split.silos', or take more data"
        if given:
            advice = f"raise 'split.silo-train-size' to at least {VALIDATION_SHARE}"
        raise DataError(f"a silo of {size['train']} train images has no validation part: {advice}")
    # Parts in which the pool falls short -> images that one silo needs there
    need = {}
    for part, count in size.items():
        if count < _LEAST[part] or count * silos > have[part]:
            need[part] = max(count, _LEAST[part])
    if need:
        raise DataError(_too_few(source.name, silos, need, have))
    return size["train"], size["test"]


def _too_few(name: str, silos: int, need: Mapping[str, int], have: Mapping[str, int]) -> str:
    """Build the error text for a pool that has too few images for the wanted silos.

    The text says how many images the silos need and how many the pool has. It then names settings
    that fit: smaller silos, or fewer silos. If neither fits, it advises fewer silos or more data.

    Args:
        name: the data set's name.
        silos: number of silos.
        need: part in which the pool has too few images -> images per silo, above 0.
        have: part -> images in the pool.
    """
    causes = []
    sizes = []
    can_be_smaller = True
    fewer = silos
    for part, count in need.items():
        causes.append(
            f"{silos} silos of {count} {part} images need {silos * count}, but '{name}' has "
            f"{have[part]}"
        )
        largest = have[part] // silos
        sizes.append(f"'split.silo-{part}-size' {largest}")
        can_be_smaller = can_be_smaller and largest >= _LEAST[part]
        fewer = min(fewer, have[part] // count)
    fitting = []
    if can_be_smaller:
        fitting.append(f"{' and '.join(sizes)} for {silos} silos")
    if fewer:
        fitting.append(f"'split.silos' {fewer} of that size")
    advice = "lower 'split.silos' or take more data"
    if fitting:
        advice = f"what fits is {', or '.join(fitting)}"
    return f"{'; '.join(causes)}: {advice}"


def shift(images: npt.NDArray[Any], distribution: str, noise: bool, key: str) -> Tensor:
    """Shift images by a distribution of the UEFL paper: rotate them and, for D3, add noise.

    D1 leaves the images as they are, D2 rotates them by 50 degrees clockwise, and D3 by 120 degrees
    counter-clockwise. The noise is Gaussian with standard deviation 10 on the 0..255 scale,
    independent for each pixel and channel.

    Args:
        images: (n, height, width) or (n, height, width, 3), 0..255.
        distribution: D1, D2 or D3.
        noise: whether to add noise to D3. D1 and D2 never have noise.
        key: seeds the noise, so that it does not depend on the run's seed.

    Returns:
        float32 images (n, channels, height, width), not clipped to 0..255.
    """
    import torch

    # A copy, because the pool's arrays are read-only maps of files
    tensor = torch.from_numpy(np.array(images, dtype=np.float32))
    if images.ndim == 3:  # grey images have one channel
        tensor = tensor.unsqueeze(-1)
    tensor = tensor.permute(0, 3, 1, 2).contiguous()
    angle = _ROTATION[distribution]
    if angle:
        tensor = _rotate(tensor, angle)
    if distribution == "D3" and noise:
        grain = torch.randn(tensor.shape, generator=generator(0, "silo-noise", key))
        tensor = tensor + _NOISE_STD * grain
    return tensor


def _rotate(images: Tensor, angle: float) -> Tensor:
    """Rotate float32 images (n, channels, height, width) counter-clockwise by ``angle`` degrees.

    The images are rotated around their centres, with bilinear interpolation. Corners without a
    source pixel become 0. The result equals that of torchvision's ``rotate`` bit for bit.
    torchvision is not used, because its import takes seconds.
    """
    import torch

    height, width = images.shape[-2:]
    cos, sin = math.cos(math.radians(-angle)), math.sin(math.radians(-angle))
    # Where each pixel of the result comes from, in pixels from the centre: x, y and 1, (h * w, 3)
    places = torch.ones(1, height, width, 3)
    places[..., 0] = torch.linspace(-width * 0.5 + 0.5, width * 0.5 - 0.5, width)
    places[..., 1] = torch.linspace(-height * 0.5 + 0.5, height * 0.5 - 0.5, height).unsqueeze(-1)
    matrix = torch.tensor([[[cos, sin, 0.0], [-sin, cos, 0.0]]]).transpose(1, 2)
    # grid_sample counts from -1 to 1 over the image
    grid = places.view(1, -1, 3).bmm(matrix / torch.tensor([0.5 * width, 0.5 * height]))
    grid = grid.view(1, height, width, 2).expand(len(images), -1, -1, -1)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


def scale_pixels(pixels: Tensor, source: Source, settings: CommonSettings) -> Tensor:
    """Scale pixels (n, channels, height, width) from 0..255 according to 'data.pixel-scale'.

    With the value 'raw', the pixels are returned unchanged. With any other value, they are divided
    by 255, and each channel is standardised with ``source.mean`` and ``source.std``.
    """
    if settings.pixel_scale == "raw":
        return pixels
    mean, std = _mean_and_std(source)
    return (pixels / 255 - mean) / std


def unscale_pixels(pixels: Tensor, source: Source, settings: CommonSettings) -> Tensor:
    """Undo ``scale_pixels``: map scaled pixels to float64 brightness from 0 to 1.

    If 'data.pixel-scale' is 'raw', the pixels are only divided by 255. Pixels of images with added
    noise may lie outside 0..1, and are not clipped.
    """
    if settings.pixel_scale == "raw":
        return pixels.double() / 255
    mean, std = _mean_and_std(source)
    return pixels.double() * std + mean


def _mean_and_std(source: Source) -> tuple[Tensor, Tensor]:
    """Return the source's mean and standard deviation of pixels in 0..1, (channels, 1, 1) each."""
    import torch

    mean = torch.tensor(source.mean).reshape(-1, 1, 1)
    std = torch.tensor(source.std).reshape(-1, 1, 1)
    return mean, std


@dataclass(frozen=True)
class ShiftedImages(DataSet):
    """A data set whose silos are slices of one pool of images, rotated by distribution."""

    source: Source

    settings = frozenset({"data.pixel-scale", *keys_with(CommonSettings, "silo")})
    headline = ("accuracy", "entropy", "loss", "perplexity")

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.name

    def found(self, places: Places) -> str:
        """Describe in a few words which of the data set's files are in the data directory.

        Returns:
            One of these texts:

            - 'comes with scikit-learn' for the data set 'digits', which needs no files.
            - 'N files in FOLDER' for CIFAR and GTSRB, which can be read from some of their files.
              FOLDER is the folder with the most files.
            - 'K of N files in FOLDER' for any other data set.
            - '' if there are no files or no data directory.
        """
        if not self.files:
            return "comes with scikit-learn"
        if self.source.listed is None:
            return super().found(places)
        try:
            folder, facts = locate(self.source, places)
        except DataError:
            return ""
        return f"{len(facts)} files in {folder.name}"

    def facts(self) -> dict[str, Any]:
        """Return the facts that all silos share: {'classes': names}, or {} without names."""
        if not self.source.class_names:
            return {}
        return {"classes": list(self.source.class_names)}

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the 'split.silos' silos."""
        return silo_names(settings.silos)

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that reads a new file for a prediction, like an image of ``site``.

        The function takes a path, and returns an array (channels, height, width). The image gets
        the size of the data set's images, the rotation and noise of ``site``, and scaled pixels. If
        ``site`` is not one of ``silo_names``, the image is neither rotated nor made noisy. The
        function raises ``BrokenImageError`` for an unusable file.

        Raises:
            DataError: the data set's files are missing or unusable.
        """
        distribution = "D1"
        names = silo_names(settings.silos)
        if site in names:
            distribution = distributions(settings.silos)[names.index(site)]
        pool, _ = open_pool(self.source, places)
        shape = pool.train_images.shape[1:]

        def read(path: Path) -> npt.NDArray[Any]:
            pixels = _read_pixels(path, shape)[None]
            key = f"{self.name}/{site}/{path.name}"
            shifted = shift(pixels, distribution, self.source.noise, key)
            inputs: npt.NDArray[Any] = scale_pixels(shifted, self.source, settings)[0].numpy()
            return inputs

        return read

    def pixel_standardisation(self, settings: CommonSettings) -> tuple[Tensor, Tensor] | None:
        """Return the source's mean and std, (channels, 1, 1), or None if pixels are not scaled."""
        if settings.pixel_scale == "raw":
            return None
        return _mean_and_std(self.source)

    def measures(self, silo: Silo, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return brightness and contrast of the images, after undoing 'data.pixel-scale'."""
        return picture_measures(
            silo.inputs(), lambda batch: unscale_pixels(batch, self.source, settings)
        )

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Open a silo from the cache, and create it there if it is missing.

        The silo at index k gets the k-th block of the pool's training images and of its test images
        (``silo_sizes``). If the pool has validation images, each silo gets an equal block of them.
        The images are rotated or made noisy according to the silo's distribution (``shift``), and
        their pixels are scaled.

        Raises:
            DataError: the pool has too few images, all training images of the silo belong to one
                track, or files are missing or unusable.
        """
        import torch

        pool, pool_key = open_pool(self.source, places)
        sizes = silo_sizes(self.source, pool, settings)
        index = silo_names(settings.silos).index(name)
        distribution = distributions(settings.silos)[index]
        facts = [_MAKER, pool_key, index, name, sizes, distribution, settings.pixel_scale]

        def fill(target: Path) -> None:
            where = f"{self.name}, silo {name}"
            train, val = _training_rows(pool, index * sizes[0], sizes[0], where)
            # Silo number s takes the s-th slice of each part, as in the paper
            test = slice(index * sizes[1], (index + 1) * sizes[1])
            parts = {
                "train": (pool.train_images[train], pool.train_labels[train]),
                "val": (pool.train_images[val], pool.train_labels[val]),
                "test": (pool.test_images[test], pool.test_labels[test]),
            }
            # A source's own validation part is shared equally, independent of the silos' sizes
            if pool.val_images is not None and pool.val_labels is not None:
                size = len(pool.val_labels) // settings.silos
                own = slice(index * size, (index + 1) * size)
                parts["val"] = (pool.val_images[own], pool.val_labels[own])
            splits = {}
            for part, (images, labels) in parts.items():
                key = f"{self.name}/{name}/{part}"
                shifted = shift(images, distribution, self.source.noise, key)
                inputs = scale_pixels(shifted, self.source, settings)
                splits[part] = Split(inputs, torch.from_numpy(np.array(labels, dtype=np.int64)))
            save_silo(target, splits, {"name": name, "distribution": distribution, **self.facts()})

        folder = places.cache / f"{self.name}-{pool_key}-silos"
        return cached_silo(folder, name, facts, self.source.classes, fill)


def _training_rows(
    pool: Pool, first: int, size: int, where: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Divide one silo's share of the pool's training images into training and validation rows.

    The silo has ``size`` rows, from row ``first`` on. If the pool has validation images, all rows
    are for training, and the images must not have tracks (series of frames). Otherwise the last
    tenth of the rows, rounded down, is for validation. If there are tracks, whole tracks with about
    a tenth of the images are chosen instead.

    Returns:
        Training rows and validation rows, as indices into the pool's training part.

    Raises:
        DataError: all rows belong to one track. ``where`` names the silo in the error.
    """
    validation = 0
    if pool.val_images is None:
        validation = size // VALIDATION_SHARE
    if pool.train_tracks is None:
        train, val = np.split(np.arange(size), [size - validation])
    else:
        tracks = np.asarray(pool.train_tracks[first : first + size])
        train, val = cut_by_track(tracks, validation, where)
    return first + train, first + val


def _read_pixels(path: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Read an 8-bit image file and resize it bilinearly to ``shape``.

    The image is converted to RGB if ``shape`` has three dimensions, and otherwise to grey.

    Returns:
        Grey (height, width) or RGB (height, width, 3), as in ``shape``, 0..255.

    Raises:
        BrokenImageError: the file is missing or damaged, or has more than 8 bits per channel.
    """
    from PIL.Image import Resampling

    height, width, *channels = shape
    with opened_image(path, PICTURES) as image:
        refuse_wide(image)
        picture = image.convert("RGB" if channels else "L")
        if picture.size != (width, height):
            picture = picture.resize((width, height), Resampling.BILINEAR)
        return np.asarray(picture)


SHIFTED = {name: ShiftedImages(source) for name, source in SOURCES.items()}
