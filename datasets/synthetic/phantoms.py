"""The three synthetic data sets: skin lesions, mammograms, and angiograms with catheter masks.

Their sites have the names, sizes and class counts of the papers' hospitals. The classes' features
are invented so that a small network can learn them, and each site has its own look. They contain no
patient's data and do not replace real images.
"""

from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.decoding import Pixels, decode_image, shades_of_grey
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet
from fedsilo.datasets.images.isic2019 import DIAGNOSES, class_of, classes_of
from fedsilo.datasets.radiographs.dicom import read_radiograph
from fedsilo.datasets.radiographs.endovascular import read_square
from fedsilo.datasets.radiographs.mammography import HEADLINE
from fedsilo.datasets.radiographs.masked_images import MaskedDataSet, masked_silo
from fedsilo.datasets.radiographs.radiograph_decoding import as_int16, fit_square
from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP, Grey
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.synthetic import made_up_pictures as pictures
from fedsilo.datasets.synthetic.made_up_pictures import Blob, Look, Points
from fedsilo.datasets.synthetic.phantom import PhantomDataSet

# Images of each diagnosis at FLamby's centres, in the order of ``DIAGNOSES``
LESION_COUNTS = {
    "bcn": (2857, 4206, 2809, 737, 1138, 124, 111, 431),
    "vidir_molemax": (24, 3720, 2, 0, 124, 30, 54, 0),
    "vidir_modern": (680, 1832, 211, 21, 475, 51, 82, 11),
    "rosendahl": (342, 803, 296, 109, 490, 30, 3, 186),
    "msk4": (215, 415, 0, 0, 189, 0, 0, 0),
    "vienna_dias": (67, 350, 5, 0, 10, 4, 3, 0),
}
# A lesion's colour minus the skin's, the bulges of its outline, and the strength of its mottling
_LESIONS = {
    "MEL": ((-0.45, -0.45, -0.35), 5, 0.12),
    "NV": ((-0.25, -0.3, -0.3), 0, 0.02),
    "BCC": ((0.05, -0.22, -0.1), 3, 0.04),
    "AK": ((-0.02, -0.12, -0.02), 0, 0.12),
    "BKL": ((-0.1, -0.08, -0.35), 3, 0.08),
    "DF": ((-0.15, -0.2, -0.05), 0, 0.02),
    "VASC": ((-0.1, -0.55, -0.45), 0, 0.04),
    "SCC": ((0.12, 0.12, 0.15), 7, 0.08),
}
_SKINS = {
    "bcn": Look((0.82, 0.68, 0.62), field=1.15),
    "vidir_molemax": Look((0.85, 0.66, 0.52), contrast=0.9),
    "vidir_modern": Look((0.78, 0.7, 0.72)),
    "rosendahl": Look((0.86, 0.72, 0.58), contrast=1.1),
    "msk4": Look((0.72, 0.6, 0.6), grain=0.03),
    "vienna_dias": Look((0.7, 0.55, 0.4), contrast=0.9, field=1.05),
}


class DermoscopyPhantom(PhantomDataSet):
    """The data set ``dermoscopy-phantom``: the six centres of ISIC 2019, as in FLamby."""

    name = key = "dermoscopy-phantom"
    counts, subject, again = LESION_COUNTS, "lesion", 0.15
    channels = 3
    settings = (ImageDataSet.settings | {"data.target"}) - {"data.broken-images"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the classes of 'data.target': nevus against all others, or the eight diagnoses."""
        return classes_of(settings.target)

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the class index of a diagnosis."""
        return class_of(kind, settings.target)

    def image(self, site: str, number: int, size: int, settings: CommonSettings) -> Pixels:
        """Draw a skin lesion, uint8 (3, size, size), with the look of the site's camera.

        ``number`` is the image's index at the site, from 0. It is looked up in a fixed sequence of
        the site's diagnoses and lesions. Images of one lesion have the same colour and texture, but
        differ in noise and in the lesion's place and size. The random seeds come from the site, the
        lesion and ``number``, not from the run's seed. If 'data.colour-constancy' is set,
        ``shades_of_grey`` removes the colour of the light.
        """
        kind, lesion, view = self.generators(site, number)
        colour, lobes, mottled = _LESIONS[DIAGNOSES[kind]]
        shade = np.array(colour) + lesion.normal(0, 0.03, 3)
        x, y = view.normal(0, 0.06, 2)
        outline = Blob(x, y, lesion.uniform(0.4, 0.6) * view.uniform(0.95, 1.05), lobes, 0.2)
        inside = shade.reshape(3, 1, 1) + mottled * pictures.texture(lesion, size, 6)
        content = outline.soft_mask(size) * inside + 0.02 * pictures.texture(lesion, size, 3)
        image = _SKINS[site].show(content.astype(np.float32), view)
        if settings.colour_constancy:
            return shades_of_grey(image)
        return image

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> Pixels:
        """Decode a photograph to uint8 (3, size, size), cropped to its central square.

        If 'data.colour-constancy' is set, the colour of the light is removed.

        Raises:
            BrokenImageError: the file is missing or damaged, or has too many bits or pixels.
        """
        return decode_image(path, size, settings.colour_constancy)


_OF_GREY = ImageDataSet.settings - {"data.broken-images", "data.colour-constancy"}
# Number of non-malignant and of malignant images in table I of the Fed-Align-CL paper
BREAST_COUNTS = {"hologic": (730, 730), "siemens": (287, 123), "ge": (421, 431)}
_PROFILES = {"hologic": SIGMOID, "siemens": STEEP, "ge": SHOULDERED}


class MammographyPhantom(PhantomDataSet):
    """The data set ``mammography-phantom``: three vendors, each with its own rendering profile."""

    name = key = "mammography-phantom"
    counts, subject, again = BREAST_COUNTS, "patient", 0.3
    size, share = 256, 0.2  # the paper's share of test images
    dtype = np.int16
    headline = HEADLINE
    settings = _OF_GREY | {"data.intensity-profiles"}

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return two classes: not malignant (benign or normal), and malignant."""
        return {"not-malignant": ("benign", "normal"), "malignant": ("malignant",)}

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the kind, because it is the class index."""
        return kind

    def image(
        self, site: str, number: int, size: int, settings: CommonSettings
    ) -> npt.NDArray[np.int16]:
        """Draw a mammogram, int16 (1, size, size), which is the same for the same arguments.

        Brightness 0..1 becomes -32768..32767. ``number`` is the image's index at the site, from 0.
        If 'data.intensity-profiles' is set, blur, noise and a tone curve imitate the machine of the
        site's vendor.
        """
        malignant, patient, view = self.generators(site, number)
        picture = _draw_breast(patient, view, size, bool(malignant))
        if settings.intensity_profiles:
            picture = _PROFILES[site].render(picture, view)
        return as_int16(picture)[None]

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> npt.NDArray[np.int16]:
        """Decode a 16-bit radiograph to int16 (1, size, size), without imitating any vendor's look.

        Empty edges are cropped, and the rest is fitted into the square (``fit_square``).

        Raises:
            BrokenImageError: the file is missing or damaged, is not of 16 bits per pixel, or has
                only equal pixels.
        """
        return as_int16(fit_square(read_radiograph(path, 16), size))[None]


def _draw_breast(
    patient: np.random.Generator, view: np.random.Generator, size: int, malignant: bool
) -> Grey:
    """Draw a breast at the left or right edge, as a grey image (size, size) from 0 to 1.

    Args:
        patient: draws the shape, the tissue and the lesion.
        view: draws the exposure and the side.
        size: the number of pixels per side.
        malignant: whether the lesion is malignant. A malignant lesion is a bright star, and a
            benign one a faint soft spot.
    """
    x, y = pictures.grid(size)
    depth, height = patient.uniform(0.9, 1.4), patient.uniform(0.75, 0.95)
    from_wall = (x + 1) / np.float32(depth)
    away = np.sqrt(from_wall**2 + (y / np.float32(height)) ** 2)
    # The thickness of the breast: full at the chest wall, 0 from the outline (away = 1) on
    within = np.sqrt((1 - away**4).clip(0, 1))
    tissue = (
        0.4 + 0.06 * pictures.texture(patient, size, 3) + 0.03 * pictures.texture(patient, size, 9)
    )
    place = depth * patient.uniform(0.3, 0.6) - 1, patient.uniform(-0.4, 0.4)
    if malignant:
        lesion, light = Blob(*place, patient.uniform(0.14, 0.2), 8, 0.4), 0.5
    else:
        lesion, light = Blob(*place, patient.uniform(0.12, 0.18), soft=0.8), 0.1
    exposure = np.float32(view.lognormal(0, 0.06))
    picture = exposure * within * (tissue + light * lesion.soft_mask(size))
    seen: Grey = picture[:, :: view.choice([-1, 1])].clip(0, 1).astype(np.float32)
    return seen


# Frames of each anatomy, in the order of ``_VESSELS``: people and animals are rarer than models
FRAME_COUNTS = {
    "human": (140, 120, 180),
    "animal": (120, 90, 110),
    "silicone": (180, 160, 120),
    "simulation": (200, 200, 200),
}
_WITH_CATHETER = 0.88  # share of the frames
_CATHETER = 0.025  # radius
# Each vessel of an anatomy: the corners of a smooth line, and its radius. A catheter is always in
# the first vessel
_VESSELS: dict[str, tuple[tuple[list[tuple[float, float]], float], ...]] = {
    "arch": (
        ([(-0.4, 1), (-0.45, 0.2), (-0.35, -0.25), (0, -0.45), (0.32, -0.2), (0.36, 1)], 0.13),
        ([(-0.25, -0.35), (-0.35, -1)], 0.05),
        ([(0, -0.45), (0, -1)], 0.05),
        ([(0.2, -0.35), (0.35, -1)], 0.05),
    ),
    "carotid": (
        ([(0.05, 1), (0, 0.3), (0.2, -0.1), (0.05, -0.5), (0.15, -1)], 0.08),
        ([(0, 0.3), (-0.2, 0), (-0.3, -1)], 0.06),
    ),
    "coronary": (
        ([(-0.6, -0.6), (-0.2, -0.4), (0.35, -0.2), (0.4, 0.2), (0.6, 0.8)], 0.05),
        ([(-0.2, -0.4), (-0.35, 0), (-0.3, 0.4), (0, 0.9)], 0.05),
        ([(0.1, -0.3), (0.1, 0.1), (0.2, 0.5)], 0.03),
        ([(-0.35, 0), (-0.7, 0.3)], 0.03),
    ),
}
_FLUOROSCOPES = {
    "human": Look((0.55,), contrast=-0.45, grain=0.04, field=0.95),
    "animal": Look((0.78,), contrast=-0.3, grain=0.08),
    "silicone": Look((0.9,), contrast=-0.5, grain=0.02),
    "simulation": Look((0.12,), contrast=0.6, grain=0.005),
}
ANATOMIES = tuple(_VESSELS)


class AngiogramPhantom(PhantomDataSet, MaskedDataSet):
    """The data set ``angiogram-phantom``: four sources, as in the FedEFM paper.

    A class is a pair of source and anatomy, so no two sites have a class in common. The paper calls
    this 100 % unseen data.
    """

    name = key = "angiogram-phantom"
    counts, subject, again, fewest = FRAME_COUNTS, "sequence", 0.35, 12
    size = 64
    settings = _OF_GREY

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the twelve classes: each of four sources combined with each of three anatomies.

        Each name is 'source-anatomy', such as 'human-arch'. It is mapped to the one label of the
        class, which is the same text. Both arguments are ignored.
        """
        classes = {}
        for source, anatomy in product(FRAME_COUNTS, ANATOMIES):
            name = f"{source}-{anatomy}"
            classes[name] = (name,)
        return classes

    def label(self, kind: int, site: str, settings: CommonSettings) -> int:
        """Return the class index of an anatomy at a source."""
        return len(ANATOMIES) * list(FRAME_COUNTS).index(site) + kind

    def image(self, site: str, number: int, size: int, settings: CommonSettings) -> Pixels:
        """Draw a frame, uint8 (1, size, size); the subclass with two channels adds the mask."""
        return np.stack(phantom_frame(site, number, size))[: self.channels]

    def read_file(self, path: Path, size: int, settings: CommonSettings) -> Pixels:
        """Decode an 8-bit angiogram to uint8 (1, size, size)."""
        return read_square(path, 8, size)[None]

    def load_masked(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the same frames in the same parts, with their masks, of which some are empty."""
        return masked_silo(_WithMasks().load_arrays(name, settings, places))


class _WithMasks(AngiogramPhantom):
    name = "angiogram-phantom-masked"
    channels = 2


def phantom_frame(site: str, number: int, size: int) -> tuple[Pixels, Pixels]:
    """Draw a frame of an angiogram and its mask, which marks the catheter.

    The site's sequence gives the frame's anatomy, and decides which frames show the same vessels.
    With probability 0.88 a catheter is drawn in the anatomy's first vessel. Otherwise the mask is
    0. If the site has a round field of view, the frame is black outside the field, and the mask is
    0 there.

    Args:
        site: the name of the angiogram's source, such as 'human'.
        number: the number of the frame.
        size: pixels per side.

    Returns:
        The frame, 0..255, and the mask, 0 or 1, both uint8 (size, size).
    """
    anatomy, sequence, frame = ANGIOGRAM_PHANTOM.generators(site, number)
    vessels = _draw_vessels(sequence, ANATOMIES[anatomy])
    content = 0.08 * pictures.texture(sequence, size, 2)
    for line, radius in vessels:
        content = np.maximum(content, 0.6 * pictures.stroke(size, line, radius))
    mask = np.zeros((size, size), dtype=bool)
    if frame.random() < _WITH_CATHETER:
        catheter = _draw_catheter(frame, *vessels[0])
        content = np.maximum(content, 1.1 * pictures.stroke(size, catheter, _CATHETER))
        mask = pictures.distance(size, catheter) <= max(_CATHETER, 1 / size)
    look = _FLUOROSCOPES[site]
    if look.field:
        mask &= Blob(0, 0, look.field, soft=0.05).soft_mask(size) > 0.5
    return look.show(content[None], frame)[0], mask.astype(np.uint8)


def _draw_vessels(rng: np.random.Generator, anatomy: str) -> list[tuple[Points, float]]:
    """Draw the vessels of an anatomy at a random position: a smooth line and a radius for each.

    ``_VESSELS`` gives a radius and corner points for each vessel. All vessels together are rotated,
    scaled and shifted by random amounts. Then every corner point except a vessel's first is moved a
    little. A cubic spline through the corner points gives the line.

    Args:
        rng: draws all random amounts.
        anatomy: a key of ``_VESSELS``, such as 'arch'.

    Returns:
        For each vessel 25 points (x, y) on its line, (25, 2), and its scaled radius, in units of
        half a side of the picture.
    """
    turn, zoom = rng.normal(0, 0.12), rng.lognormal(0, 0.08)
    pose = zoom * np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    shift = rng.normal(0, 0.05, 2)
    vessels = []
    for corners, radius in _VESSELS[anatomy]:
        moved = np.array(corners) @ pose + shift
        moved[1:] += rng.normal(0, 0.03, moved[1:].shape)
        vessels.append((pictures.smooth_line(moved), zoom * radius))
    return vessels


def _draw_catheter(rng: np.random.Generator, line: Points, radius: float) -> Points:
    """Draw a catheter in a vessel, from the vessel's start to a random point in its second half.

    The catheter follows the first points of ``line``, but bends away from them. The offset of a
    point is equal in x and y. It is 0 at both ends, and largest halfway: there it is a random
    number between -0.5 and 0.5 times ``radius``.

    Args:
        rng: draws the end and the offset.
        line: points along the middle of the vessel, (k, 2).
        radius: the vessel's radius.

    Returns:
        The catheter's points, (m, 2).
    """
    tip = rng.integers(len(line) // 2, len(line))
    # The sine is 0 at both ends, so the catheter begins and ends in the middle of the vessel
    aside = rng.uniform(-0.5, 0.5) * radius * np.sin(np.linspace(0, np.pi, tip + 1))
    return line[: tip + 1] + aside[:, None]


DERMOSCOPY_PHANTOM = DermoscopyPhantom()
MAMMOGRAPHY_PHANTOM = MammographyPhantom()
ANGIOGRAM_PHANTOM = AngiogramPhantom()
