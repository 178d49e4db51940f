"""A synthetic data set for segmentation: bright curved vessels over noise, with a mask each.

The four sites differ in the vessels' thickness and contrast and in the noise, as hospitals differ
in their machines. The images contain no patient's data and need no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import SEGMENTATION
from fedsilo.datasets.images.decoding import Pixels
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet
from fedsilo.datasets.radiographs.endovascular import read_square
from fedsilo.datasets.radiographs.masked_images import MaskedDataSet, split_masks
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.synthetic import made_up_pictures as pictures
from fedsilo.datasets.synthetic.made_up_pictures import Look
from fedsilo.datasets.synthetic.phantom import PhantomDataSet


@dataclass(frozen=True)
class _Machine:
    """How a site's images look: the look, and the radius of its vessels in halves of a side."""

    look: Look
    radius: float


_MACHINES = {
    "north": _Machine(Look((0.2,), contrast=0.6, grain=0.06), 0.08),
    "east": _Machine(Look((0.35,), contrast=0.25, grain=0.06), 0.06),
    "south": _Machine(Look((0.1,), contrast=0.8, grain=0.12), 0.045),
    "west": _Machine(Look((0.5,), contrast=0.3, grain=0.1), 0.1),
}
_CORNERS = 5  # corners of a vessel's line, from one edge of the image to the opposite edge


class VesselsSynthetic(PhantomDataSet, MaskedDataSet):
    """The data set ``vessels-synthetic``: two to four vessels an image, at four sites."""

    name = key = "vessels-synthetic"
    tasks: ClassVar[tuple[str, ...]] = (SEGMENTATION,)
    counts: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "north": (80,),
        "east": (60,),
        "south": (60,),
        "west": (40,),
    }
    subject, again = "patient", 0.2
    size, channels = 64, 2
    settings = ImageDataSet.settings - {"data.broken-images", "data.colour-constancy"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the classes of the pixels: background and vessel."""
        return {"background": ("0",), "vessel": ("1",)}

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return 0 for every image, because pixels have classes here and images have none."""
        return 0

    def image(self, site: str, number: int, size: int, settings: CommonSettings) -> Pixels:
        """Draw an image of two to four vessels and the mask of the vessels, uint8 (2, size, size).

        Channel 0 is the image. Channel 1 is the mask, 1 in a vessel and 0 elsewhere. Images of one
        patient show the same vessels with different noise. The site decides background, contrast,
        noise and mean thickness of the vessels. The same site, number and size always give the same
        image. ``settings`` is ignored.
        """
        _, patient, view = self.generators(site, number)
        machine = _MACHINES[site]
        content = 0.1 * pictures.texture(patient, size, 3)
        mask = np.zeros((size, size), dtype=bool)
        for _ in range(patient.integers(2, 5)):
            away = pictures.distance(size, _draw_line(patient))
            radius = max(machine.radius * patient.uniform(0.7, 1.3), 1 / size)
            # The edge is soft over about two pixels, and the mask ends in its middle
            content = np.maximum(content, (0.5 + (radius - away) * size / 4).clip(0, 1))
            mask |= away <= radius
        image = machine.look.show(content[None], view)[0]
        return np.stack([image, mask.astype(np.uint8)])

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> Pixels:
        """Decode an 8-bit image to uint8 (1, size, size)."""
        return read_square(path, 8, size)[None]

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the images of a site, with their masks as labels (n, size, size)."""
        return self.load_masked(name, settings, places)

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the same as ``load``, because all images of this data set have masks."""
        return split_masks(self.load_arrays(name, settings, places))


def _draw_line(rng: np.random.Generator) -> pictures.Points:
    """Draw a curved line from one edge of the image to the opposite edge.

    ``rng`` draws the line's course, and whether it runs horizontally or vertically.

    Returns:
        25 points (x, y) on the line, (25, 2). The image goes from -1 to 1.
    """
    along = np.linspace(-1.1, 1.1, _CORNERS)
    across = rng.uniform(-0.6, 0.6) + rng.normal(0, 0.2, _CORNERS)
    corners = np.stack([along, across], axis=1)
    if rng.random() < 0.5:
        corners = corners[:, ::-1]
    return pictures.smooth_line(corners)


VESSELS_SYNTHETIC = VesselsSynthetic()
