"""MedMNIST v2 (Yang et al. 2023): small medical images, 28x28 pixels, with one class each.

MedMNIST's own split is kept: a silo's training, validation and test images are slices of MedMNIST's
parts. Because images of one class or patient may be adjacent in the files, each part is shuffled
first, in the same way every time. PneumoniaMNIST is a separate data set (``datasets.radiographs``),
but its file is read here too.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError
from fedsilo.core.files.array_files import kind_of, read_arrays
from fedsilo.core.seeding import derive_seed
from fedsilo.datasets.shifted.pools import Pool, Source
from fedsilo.datasets.silo.silos import SPLITS

Labelled = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

SIDE = 28  # pixels
_MOST_BYTES = 2**28  # largest size of a split's images; PathMNIST has 212 million
_MOST_LABELS = 2**24
_ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver"),
    *("lung-left", "lung-right", "pancreas", "spleen"),
)
# Classes by their labels, as MedMNIST names them
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
        *("normal colon mucosa", "cancer-associated stroma"),
        "colorectal adenocarcinoma epithelium",
    ),
    "dermamnist": (
        *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
        *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi"),
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "retinamnist": ("0", "1", "2", "3", "4"),  # grades of retinopathy
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte"),
        *("monocyte", "neutrophil", "platelet"),
    ),
    "tissuemnist": (
        *("collecting duct or connecting tubule", "distal convoluted tubule"),
        *("glomerular endothelial cells", "interstitial endothelial cells", "leukocytes"),
        *("podocytes", "proximal tubule segments", "thick ascending limb"),
    ),
    **dict.fromkeys(("organamnist", "organcmnist", "organsmnist"), _ORGANS),
}
_COLOUR = ("pathmnist", "dermamnist", "retinamnist", "bloodmnist")  # the others are grey


def read_parts(
    path: Path, classes: int, colour: bool = False, most: int = _MOST_BYTES
) -> dict[str, Labelled]:
    """Read the images and labels of the parts train, val and test from a MedMNIST ``.npz`` file.

    Args:
        path: the file.
        classes: number of classes.
        colour: whether images have three channels. If false, they are grey.
        most: the largest allowed size of an array of images in bytes. An array of labels may have
            at most 16 MiB, and no more than ``most`` either.

    Returns:
        'train', 'val' and 'test' -> images (n, 28, 28) or (n, 28, 28, 3), uint8, and labels (n,),
        int64.

    Raises:
        DataError: the file is damaged, or an array is missing, is larger than allowed, is not of
            the described type and shape, or has a label out of range.
    """
    arrays = read_arrays(path, [f"{part}_images" for part in SPLITS], most)
    arrays |= read_arrays(path, [f"{part}_labels" for part in SPLITS], min(most, _MOST_LABELS))
    shape: tuple[int, ...] = (SIDE, SIDE)
    if colour:
        shape = (SIDE, SIDE, 3)
    return {part: _check_part(path, part, arrays, classes, shape) for part in SPLITS}


def _check_part(
    path: Path, part: str, arrays: Mapping[str, Any], classes: int, shape: tuple[int, ...]
) -> Labelled:
    """Check the images and labels of one part of a MedMNIST file, and return them.

    Args:
        path: the file, for errors.
        part: 'train', 'val' or 'test'.
        arrays: all arrays of the file by name, such as 'train_images'. Labels may be (n,) or (n,
            1).
        classes: number of classes.
        shape: shape of one image.

    Returns:
        Images (n, ``*shape``) uint8 and labels (n,) int64.

    Raises:
        DataError: images are not uint8 of this shape, labels are not one whole number per image, or
            a label is not in 0..``classes`` - 1.
    """
    images = arrays[f"{part}_images"]
    labels = arrays[f"{part}_labels"]
    count = len(images)
    flat = labels.reshape(-1)
    fault = ""
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        shown = ", ".join(map(str, shape))
        fault = f"{part}_images must be uint8 (n, {shown}), but is {kind_of(images)}"
    elif labels.dtype.kind not in "iu" or labels.shape not in ((count,), (count, 1)):
        fault = (
            f"{part}_labels must be a whole number for each of {count} images, but is "
            f"{kind_of(labels)}"
        )
    elif count and not 0 <= flat.min() <= flat.max() < classes:
        fault = f"{part}_labels must be 0 to {classes - 1}, but some are not"
    if fault:
        raise DataError(f"{path}: {fault}")
    return images, flat.astype(np.int64)


def _decode(name: str, classes: int, colour: bool, folder: Path) -> Pool:
    """Read a MedMNIST file into a ``Pool``, from which silos are cut, with each part shuffled.

    The order of a part depends only on ``name``, the name of the part and the number of its images.
    ``colour`` tells whether images have three channels.

    Raises:
        DataError: the file is missing or unusable. The error tells how to download it.
    """
    try:
        parts = read_parts(folder / f"{name}.npz", classes, colour)
    except DataError as error:
        raise DataError(f"{error}: run 'fedsilo fetch {name} --data-dir DIR'") from None
    arrays: dict[str, npt.NDArray[Any]] = {}
    for part, (images, labels) in parts.items():
        # Silos are slices, so in the file's order a silo could have a single class
        order = np.random.default_rng(derive_seed(0, name, part)).permutation(len(labels))
        arrays[f"{part}_images"] = images[order]
        arrays[f"{part}_labels"] = labels[order]
    return Pool(**arrays)


def _source(name: str) -> Source:
    """Return the ``Source`` of a MedMNIST data set: its classes, its decoder and its pixel scale.

    A ``Source`` tells how the files of a public data set become a pool of images. Nothing is read
    here. Each channel has mean 0.5 and standard deviation 0.5. No silo of a MedMNIST set gets
    noise. ``name`` is one of the keys of ``_CLASSES``, such as 'pathmnist'.
    """
    classes = _CLASSES[name]
    colour = name in _COLOUR
    half: tuple[float, ...] = (0.5,)  # MedMNIST's own code standardises by this
    if colour:
        half = (0.5, 0.5, 0.5)
    return Source(
        name=name,
        classes=len(classes),
        class_names=classes,
        mean=half,
        std=half,
        decode=partial(_decode, name, len(classes), colour),
        noise=False,
    )


MEDMNIST = {name: _source(name) for name in _CLASSES}
