"""Synthetic chest radiographs with several findings at once, for the task multi-label.

Three sites with their own look and their own frequency of each finding; an image may have any
number of the findings. They contain no patient's data and do not replace real radiographs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsilo.core.seeding import derive_seed
from fedsilo.core.tasks import MULTI_LABEL
from fedsilo.datasets.synthetic import made_up_pictures as pictures
from fedsilo.datasets.synthetic.drawn_images import SIZE, Drawn, DrawnImages
from fedsilo.datasets.synthetic.made_up_pictures import Blob

FINDINGS = ("cardiomegaly", "effusion", "nodule")


@dataclass(frozen=True)
class _Clinic:
    """A synthetic site: its images, the share of each finding, and its brightness and noise."""

    images: int
    shares: tuple[float, ...]
    brightness: float
    noise: float


_CLINICS: Mapping[str, _Clinic] = {
    "city": _Clinic(320, (0.3, 0.35, 0.25), 1.0, 0.05),
    "coast": _Clinic(240, (0.15, 0.5, 0.2), 0.8, 0.08),
    "valley": _Clinic(160, (0.45, 0.2, 0.35), 1.1, 0.04),
}


class ChestPhantom(DrawnImages):
    """The data set ``chest-phantom``: images (1, 32, 32) with three findings each."""

    name = "chest-phantom"
    tasks = (MULTI_LABEL,)
    sites, names = tuple(_CLINICS), FINDINGS

    def draw(self, site: str) -> Drawn:
        """Draw a site's chest images and their findings, which are the same in every run.

        Each finding is present independently, with the site's frequency. The image is multiplied by
        the site's brightness. Then the site's noise is added, and the sum is clipped.

        Returns:
            Images (n, 1, 32, 32) uint8, and labels (n, 3) float32. A label is 1 if the image has
            the finding and otherwise 0, in the order of ``FINDINGS``.
        """
        clinic = _CLINICS[site]
        images, labels = [], []
        for number in range(clinic.images):
            rng = np.random.default_rng(derive_seed(0, "chest-phantom", site, number))
            present = rng.random(len(FINDINGS)) < clinic.shares
            picture = clinic.brightness * _draw_chest(rng, *map(bool, present))
            picture += rng.normal(0, clinic.noise, picture.shape)
            images.append((255 * picture.clip(0, 1)).astype(np.uint8)[None])
            labels.append(present)
        return np.stack(images), np.array(labels, dtype=np.float32)


def _draw_chest(
    rng: np.random.Generator, large_heart: bool, effusion: bool, nodule: bool
) -> npt.NDArray[np.float32]:
    """Draw a chest, (32, 32), with a bright heart between two dark lungs.

    The brightness is about 0 to 1, and is not clipped. A large heart is wider. An effusion
    brightens the bottom of the lung on the left of the image. A nodule is a bright spot in the lung
    on the right. ``rng`` draws places, sizes and brightness.
    """
    x, y = pictures.grid(SIZE)
    picture = np.full((SIZE, SIZE), 0.6, dtype=np.float32)
    for side in (-0.45, 0.45):
        lung = Blob(side + rng.normal(0, 0.02), rng.normal(0, 0.03), 0.42, soft=0.2)
        picture -= 0.45 * lung.soft_mask(SIZE)
    radius = rng.uniform(0.33, 0.45) if large_heart else rng.uniform(0.25, 0.37)
    picture += 0.4 * Blob(0.05, 0.3, radius, soft=0.2).soft_mask(SIZE)
    if effusion:
        level = rng.uniform(0.2, 0.5)
        picture += rng.uniform(0.05, 0.25) * ((y > level) & (x < -0.15))
    if nodule:
        spot = Blob(rng.uniform(0.3, 0.6), rng.uniform(-0.35, 0.1), 0.1, soft=0.5)
        picture += rng.uniform(0.05, 0.35) * spot.soft_mask(SIZE)
    return picture


CHEST_PHANTOM = ChestPhantom()
