"""Pictures that look like dermoscopy, painted by formulas: skin, a lesion, hairs and a camera.

Each diagnosis has a look (one brown colour and a smooth border for a nevus, several colours and an
irregular one for a melanoma, ...) with much scatter, and each camera light, vignetting and hair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.datasets.images.decoding import Pixels
from fedsilo.datasets.synthetic.primitives import Field, falling, grid, noise

Colour = tuple[float, float, float]

_ATYPICAL = 0.12  # share of lesions that have the colours of another diagnosis
_HARMONICS = 7  # of a lesion's outline


@dataclass(frozen=True)
class Look:
    """How a diagnosis looks; colours are RGB from 0 to 1, amounts from 0 to 1.

    Attributes:
        colour: of the lesion.
        patches: colours of patches within it, ``patch_count`` of them.
        irregular: relative scatter of the outline.
        soft: width of the border, relative to the radius.
        centre: colour of the middle; None: as the rest.
        network, vessels, scale: amounts of pigment network, vessels and whitish dots.
    """

    colour: Colour
    patches: tuple[Colour, ...] = ()
    patch_count: int = 0
    irregular: float = 0.05
    soft: float = 0.12
    centre: Colour | None = None
    network: float = 0.0
    vessels: float = 0.0
    scale: float = 0.0


_BLUE_GREY, _BLACK = (0.38, 0.42, 0.5), (0.1, 0.07, 0.07)
_RED, _WHITE = (0.62, 0.26, 0.25), (0.8, 0.76, 0.74)
LOOKS = {
    "MEL": Look(
        (0.34, 0.2, 0.14), (_BLUE_GREY, _BLACK, _RED, _WHITE), 5, 0.17, 0.08, None, 0.35, 0.1
    ),
    "NV": Look((0.5, 0.32, 0.2), ((0.36, 0.2, 0.12),), 1, 0.05, 0.14, None, 0.5),
    "BCC": Look((0.8, 0.53, 0.48), (_BLUE_GREY,), 2, 0.1, 0.16, None, 0.0, 0.8, 0.1),
    "AK": Look((0.8, 0.48, 0.42), ((0.86, 0.6, 0.5),), 2, 0.14, 0.3, None, 0.0, 0.4, 0.6),
    "BKL": Look((0.5, 0.37, 0.24), ((0.62, 0.48, 0.32),), 3, 0.14, 0.03, None, 0.1, 0.0, 0.8),
    "DF": Look((0.6, 0.4, 0.3), (), 0, 0.05, 0.25, (0.88, 0.74, 0.68), 0.35),
    "VASC": Look((0.56, 0.14, 0.18), ((0.36, 0.05, 0.16), (0.2, 0.03, 0.1)), 6, 0.09, 0.06),
    "SCC": Look((0.74, 0.44, 0.4), (_WHITE,), 2, 0.16, 0.14, (0.9, 0.82, 0.66), 0.0, 0.6, 0.4),
}


@dataclass(frozen=True)
class Camera:
    """A centre's way of taking pictures.

    Attributes:
        light: gain of each channel.
        gamma: exponent of the tone curve.
        vignette: loss of light towards the corners, 0 to 1.
        tube: radius of the round field of view; beyond it all is black. 2: none.
        hairs: mean number of hairs.
        zoom: size of a lesion, relative to the field.
        blur: share of the fine texture that is lost.
    """

    light: Colour
    gamma: float
    vignette: float
    tube: float
    hairs: float
    zoom: float
    blur: float


CAMERAS = {
    "bcn": Camera((1.0, 0.97, 0.95), 1.0, 0.3, 1.12, 2.5, 0.52, 0.2),
    "vidir_molemax": Camera((1.08, 0.95, 0.82), 0.85, 0.1, 2.0, 1.0, 0.36, 0.5),
    "vidir_modern": Camera((1.02, 0.93, 1.04), 0.95, 0.2, 2.0, 2.0, 0.5, 0.0),
    "rosendahl": Camera((1.12, 0.86, 0.88), 0.9, 0.35, 2.0, 3.5, 0.58, 0.1),
    "msk4": Camera((0.86, 0.92, 1.05), 1.15, 0.15, 2.0, 4.0, 0.5, 0.25),
    "vienna_dias": Camera((0.98, 1.0, 0.84), 1.25, 0.45, 1.25, 1.5, 0.42, 0.6),
}


def render(
    diagnosis: str,
    camera: Camera,
    lesion_rng: np.random.Generator,
    view_rng: np.random.Generator,
    size: int,
) -> Pixels:
    """Return an image (3, size, size), 0..255, of a lesion, and of a view of it.

    Args:
        diagnosis: a key of ``LOOKS``.
        camera: how the picture is taken.
        lesion_rng: draws the lesion and the skin's colour; equal generators, equal lesions.
        view_rng: draws turn, shift, texture, hairs and light.
        size: pixels of a side; it only decides how finely the picture is sampled.
    """
    lesion = _Lesion.random(lesion_rng, diagnosis, camera.zoom)
    picture = _skin(lesion_rng, view_rng, size, camera)
    _paint_lesion(picture, lesion, view_rng, size, camera)
    _paint_hairs(picture, view_rng, size, camera.hairs)
    return _photographed(picture, view_rng, size, camera)


@dataclass(frozen=True)
class _Lesion:
    """A lesion's own shape and colours; ``outline`` are complex Fourier coefficients."""

    look: Look
    colour: Field
    radius: float
    stretch: float
    outline: Field
    patches: tuple[tuple[float, float, float, Field], ...]

    @classmethod
    def random(cls, rng: np.random.Generator, diagnosis: str, zoom: float) -> _Lesion:
        look = LOOKS[diagnosis]
        atypical = rng.random() < _ATYPICAL
        colours = LOOKS[sorted(LOOKS)[rng.integers(len(LOOKS))]] if atypical else look
        orders = np.arange(1, _HARMONICS + 1)
        spread = look.irregular * rng.lognormal(0, 0.5) / orders
        outline = spread * (rng.standard_normal((2, _HARMONICS)) * [[1], [1j]]).sum(axis=0)
        count = rng.poisson(colours.patch_count) if colours.patches else 0
        patches = tuple(_patch(rng, colours.patches) for _ in range(min(count, 8)))
        return cls(
            look=look,
            colour=_near(rng, colours.colour, 0.06),
            radius=float(zoom * rng.lognormal(0, 0.2)),
            stretch=float(rng.uniform(0.75, 1)),
            outline=outline.astype(np.complex64),
            patches=patches,
        )


def _patch(
    rng: np.random.Generator, colours: Sequence[Colour]
) -> tuple[float, float, float, Field]:
    """Return place, width (in radii) and colour of a patch in a lesion."""
    angle, away = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.8)
    colour = colours[int(rng.integers(len(colours)))]
    width = float(rng.uniform(0.15, 0.4))
    right, up = float(away * np.cos(angle)), float(away * np.sin(angle))
    return right, up, width, _near(rng, colour, 0.04)


def _near(rng: np.random.Generator, colour: Colour, spread: float) -> Field:
    """Return a colour (3, 1, 1) near ``colour``: lighter or darker, and of another tint."""
    shift = rng.normal(0, spread) + rng.normal(0, spread / 3, 3)
    return (np.array(colour) + shift).clip(0.02, 1).astype(np.float32)[:, None, None]


def _blend(picture: Field, colour: Field, weight: Field) -> None:
    """Move ``picture`` (3, size, size) towards ``colour`` by ``weight`` (size, size)."""
    picture += weight * (colour - picture)


def _skin(
    lesion_rng: np.random.Generator, view_rng: np.random.Generator, size: int, camera: Camera
) -> Field:
    """Return bare skin (3, size, size): pink to tan, mottled, with fine lines."""
    base = _near(lesion_rng, (0.85, 0.66, 0.57), 0.05)
    mottle, lines = noise(view_rng, size, 5), np.abs(noise(view_rng, size, 48))
    shade = 0.02 * mottle + 0.035 * (1 - camera.blur) * (lines - 0.8)
    tint = np.array([0.6, 1.0, 1.1], dtype=np.float32)[:, None, None]
    skin: Field = base + tint * shade
    return skin


def _paint_lesion(
    picture: Field, lesion: _Lesion, rng: np.random.Generator, size: int, camera: Camera
) -> None:
    """Paint the lesion in a view of its own: turned, shifted, a little larger or smaller."""
    look, sharp = lesion.look, 1 - camera.blur
    place = _places(lesion, rng, size)
    distance = np.abs(place)
    coarse, middle, fine = (noise(rng, size, knots) for knots in (12, 20, 56))
    rough = distance / _radius(place, distance, lesion.outline) + 0.3 * look.irregular * coarse
    inside = falling(rough - 1, 4 / look.soft)
    body = lesion.colour * (1 + 0.1 * middle) + 0.12 * (rough.clip(0, 1.5) - 0.6)
    for right, up, width, colour in lesion.patches:
        offset = (place.real - right) ** 2 + (place.imag - up) ** 2
        _blend(body, colour, 0.85 * falling(offset / width**2 - 1 + 0.5 * coarse, 4))
    if look.centre is not None:
        _blend(body, _near(rng, look.centre, 0.03), 0.8 * np.exp(-((rough / 0.45) ** 2)))
    if look.network:
        amount = float(look.network * sharp * rng.uniform(0.3, 1.2))
        body *= 1 - amount * np.exp(-((fine / 0.35) ** 2))
    if look.scale:
        dots = 0.7 * look.scale * falling(1.2 - fine, 6)
        _blend(body, _near(rng, (0.9, 0.83, 0.7), 0.03), dots)
    if look.vessels:
        amount = float(look.vessels * sharp * rng.uniform(0.3, 1.1))
        lines = np.exp(-((middle / 0.09) ** 2)) * (coarse > -0.4)
        _blend(body, _near(rng, (0.62, 0.14, 0.17), 0.03), amount * lines)
    _blend(picture, body, inside)


def _places(lesion: _Lesion, rng: np.random.Generator, size: int) -> Field:
    """Return each pixel's place in the lesion (size, size), complex, in its radii."""
    turn = np.complex64(np.exp(1j * rng.uniform(0, 2 * np.pi)) / lesion.radius)
    x, y, _ = grid(size)
    across, along = rng.normal(0, 0.1, 2).astype(np.float32)
    place: Field = ((x - across) + np.complex64(1j) * (y - along)) * turn
    place *= np.complex64(rng.lognormal(0, 0.05))
    place.imag /= lesion.stretch
    return place


def _radius(place: Any, distance: Field, outline: Field) -> Field:
    """Return the outline's radius in each pixel's direction: 1 plus a Fourier series."""
    direction = place / distance.clip(1e-4)
    series = np.zeros_like(direction)
    for coefficient in outline[::-1]:
        series = (series + coefficient) * direction
    radius: Field = (1 + series.real).clip(0.35, 2)
    return radius


def _paint_hairs(picture: Field, rng: np.random.Generator, size: int, mean: float) -> None:
    """Paint dark, slightly bent hairs."""
    x, y, _ = grid(size)
    for _ in range(min(rng.poisson(mean * rng.lognormal(-0.3, 0.8)), 12)):
        angle, offset, bend = rng.uniform(0, np.pi), rng.uniform(-0.9, 0.9), rng.normal(0, 0.15)
        width, dark = rng.uniform(0.007, 0.016), rng.uniform(0.6, 0.95)
        cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        along = x * cosine + y * sine
        across = y * cosine - x * sine - np.float32(offset) - np.float32(bend) * along * along
        reach = np.float32(max(width, 1 / size))  # a hair thinner than a pixel is fainter
        weight = (1 - np.abs(across) / reach).clip(0) * np.float32(dark * width / reach)
        picture *= 1 - np.float32(0.9) * weight


def _photographed(picture: Field, rng: np.random.Generator, size: int, camera: Camera) -> Pixels:
    """Return the picture as the centre's camera stores it."""
    _, _, away = grid(size)
    gain = np.array(camera.light) * rng.lognormal(0, 0.04, 3) * rng.lognormal(0, 0.06)
    light = 1 - np.float32(camera.vignette / 2) * away
    if camera.tube < 2:
        edge = float(rng.normal(camera.tube, 0.04))
        light *= falling(np.sqrt(away) - edge, 60)
    picture *= light * gain.astype(np.float32)[:, None, None]
    exposed = picture.clip(0, 1) ** np.float32(camera.gamma)
    return (exposed * 255 + np.float32(0.5)).astype(np.uint8)
