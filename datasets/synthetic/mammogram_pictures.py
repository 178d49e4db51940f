"""Pictures that look like mammograms, painted by formulas: a breast, its tissue and a lesion.

A malignant lesion is a mass with spicules, a cluster of microcalcifications or both; a benign
breast has nothing, a smooth mass or a few coarse calcifications. Contrasts and sizes scatter, and
islands of dense tissue look like masses, so that not every picture gives its class away.

Lengths are in halves of the picture's side: the picture is 2 wide and from -1 to 1 high.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsilo.datasets.radiographs.vendor_profiles import Grey
from fedsilo.datasets.synthetic.primitives import Field, falling, noise

_FAT, _GLAND, _MUSCLE = 0.2, 0.3, 0.5  # brightness, 0 to 1
_SKIN = 40.0  # steepness of the breast's outline
_MLO = 0.5  # share of oblique views, which show the pectoral muscle
_TEXTURE = ((6, 1.0), (13, 0.7), (29, 0.45), (61, 0.3), (127, 0.2))  # waves a side, and weight


@dataclass(frozen=True)
class Spot:
    """Something bright in a breast: where, in shares of the breast's depth and half height.

    Attributes:
        depth: 0 at the chest wall, 1 at the nipple.
        up: -1 to 1.
        radius: in halves of the picture's side.
        light: brightness that it adds at its middle.
        edge: steepness of its outline.
        spicules: angle, length (in radii) and weight of each.
    """

    depth: float
    up: float
    radius: float
    light: float
    edge: float = 2.0
    spicules: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Breast:
    """A woman's breast: ``depth`` from chest wall to nipple, half its height, and what is in it.

    Attributes:
        depth: from the chest wall to the nipple.
        height: half of it.
        density: amount of glandular tissue, 0 to 1.
        islands: dense tissue that may look like a mass.
        masses: round or spiculated ones.
        grains: calcifications.
    """

    depth: float
    height: float
    density: float
    islands: tuple[Spot, ...]
    masses: tuple[Spot, ...]
    grains: tuple[Spot, ...]


def random_breast(rng: np.random.Generator, malignant: bool) -> Breast:
    """Return a breast; equal generators give equal ones."""
    depth, height = rng.uniform(0.75, 1.35), rng.uniform(0.72, 0.95)
    density = float(rng.beta(1.6, 1.6))
    islands = tuple(
        Spot(*_place(rng), rng.uniform(0.05, 0.14), rng.uniform(0.02, 0.1), edge=3)
        for _ in range(rng.poisson(2))
    )
    masses, grains = _malignant(rng) if malignant else _benign(rng)
    return Breast(depth, height, density, islands, masses, grains)


def _place(rng: np.random.Generator) -> tuple[float, float]:
    """Return where something lies, within the glandular tissue and around it."""
    depth = rng.uniform(0.2, 0.8)
    return depth, rng.uniform(-0.6, 0.6) * np.sqrt(1 - depth**2)


def _malignant(rng: np.random.Generator) -> tuple[tuple[Spot, ...], tuple[Spot, ...]]:
    """Return the masses and the calcifications of a malignant lesion."""
    place, kind = _place(rng), rng.random()
    radius, light = 0.1 * rng.lognormal(0, 0.25), 0.38 * rng.lognormal(0, 0.4)
    count = rng.integers(9, 17)
    angles = np.arange(count) * 2 * np.pi / count + rng.normal(0, 0.15, count)
    spicules = tuple(
        (float(angle), float(rng.uniform(2, 4)), float(rng.uniform(0.3, 0.8))) for angle in angles
    )
    masses = (Spot(*place, radius, light, 2.5, spicules),) if kind < 0.8 else ()
    grains = tuple(_grain(rng, place) for _ in range(rng.integers(9, 24))) if kind > 0.6 else ()
    return masses, grains


def _grain(rng: np.random.Generator, place: tuple[float, float]) -> Spot:
    depth, up = place + rng.normal(0, 0.07, 2)
    return Spot(depth, up, rng.uniform(0.01, 0.02), rng.uniform(0.3, 0.6), edge=4)


def _benign(rng: np.random.Generator) -> tuple[tuple[Spot, ...], tuple[Spot, ...]]:
    """Return the masses and the coarse calcifications of a breast without malignancy."""
    kind = rng.random()
    radius, light = 0.09 * rng.lognormal(0, 0.3), 0.16 * rng.lognormal(0, 0.4)
    masses = (Spot(*_place(rng), radius, light, edge=8),) if kind < 0.25 else ()
    grains = tuple(
        Spot(*_place(rng), rng.uniform(0.01, 0.025), rng.uniform(0.2, 0.5), edge=4)
        for _ in range(rng.integers(1, 4) if 0.2 < kind < 0.4 else 0)
    )
    return masses, grains


def render(breast: Breast, rng: np.random.Generator, size: int) -> Grey:
    """Return a view of a breast (size, size), 0..1: the chest wall left, or right for the other.

    Args:
        breast: what is shown.
        rng: draws side, projection, texture and exposure.
        size: pixels of a side; it only decides how finely the picture is sampled.
    """
    view = _View.random(breast, rng, size)
    gland, strands = _tissue(view, rng, size)
    tissue = _FAT + _GLAND * gland + 0.06 * strands
    for spot in breast.islands + breast.masses + breast.grains:
        view.paint(tissue, spot)
    if rng.random() < _MLO:
        view.paint_muscle(tissue, rng)
    exposed = tissue * view.thickness() * np.float32(rng.lognormal(0.25, 0.1))
    # The brightest tissue is compressed, not clipped
    picture: Grey = np.tanh(exposed.clip(0, None)).astype(np.float32)
    return picture


@dataclass(frozen=True)
class _View:
    """Where a breast lies in the picture: ``deep`` and ``high`` are (size,) lines of coordinates.

    ``deep`` is 0 at the chest wall and 1 at the nipple, ``high`` 0 at its height.
    """

    breast: Breast
    deep: Field
    high: Field
    sag: float
    nipple: float

    @classmethod
    def random(cls, breast: Breast, rng: np.random.Generator, size: int) -> _View:
        line = (np.arange(size) + 0.5) * 2 / size
        zoom, middle = rng.lognormal(0, 0.03), rng.normal(0, 0.03)
        depth = breast.depth * zoom
        away = depth * 1.03 - line if rng.random() < 0.5 else line
        return cls(
            breast=breast,
            deep=(away / depth).astype(np.float32),
            high=((line - 1 - middle) / (breast.height * zoom)).astype(np.float32),
            sag=float(rng.normal(0.1, 0.05)),
            nipple=float(rng.uniform(0, 0.05)),
        )

    def thickness(self) -> Field:
        """Return how much tissue the rays cross: 1 inside, falling to 0 at the skin."""
        deep = self.deep[None, :]
        high = self.high[:, None] - np.float32(self.sag) * deep**2
        away = np.sqrt(deep**2 + np.abs(high) ** 2.2)
        away -= np.float32(self.nipple) * np.exp(-((high / 0.06) ** 2)) * (deep > 0.5)
        plateau = np.sqrt((1 - away**5).clip(0, 1))
        within: Field = plateau * falling(away - 1, _SKIN) * (deep >= 0)
        return within

    def paint(self, tissue: Field, spot: Spot) -> None:
        """Add a spot's brightness to the part of ``tissue`` that it reaches."""
        # Beyond that it adds less than a hundredth of its light
        longest = max((length for _, length, _ in spot.spicules), default=0.0)
        reach = spot.radius * max(1 + 5 / spot.edge, longest)
        across = (self.deep - np.float32(spot.depth)) * np.float32(self.breast.depth)
        up = spot.up + self.sag * spot.depth**2
        along = (self.high - np.float32(up)) * np.float32(self.breast.height)
        columns, rows = (np.flatnonzero(np.abs(line) < reach) for line in (across, along))
        if not len(columns) or not len(rows):
            return
        part = tissue[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        part += _spot_light(spot, across[columns][None, :], along[rows][:, None], len(tissue))

    def paint_muscle(self, tissue: Field, rng: np.random.Generator) -> None:
        """Brighten the upper corner at the chest wall."""
        wide, long = rng.uniform(0.25, 0.6), rng.uniform(0.8, 1.6)
        edge = self.deep[None, :] / wide + (self.high[:, None] + 1) / long - 1
        weight = falling(edge, 18)
        tissue += weight * (np.float32(_MUSCLE) - np.float32(0.6) * tissue)


def _spot_light(spot: Spot, across: Field, along: Field, size: int) -> Field:
    """Return the brightness that a spot adds around it; a spot below a pixel is fainter."""
    radius = np.float32(max(spot.radius, 1 / size))
    distance = np.hypot(across, along) / radius
    light = falling(distance - 1, spot.edge)
    for angle, length, weight in spot.spicules:
        cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        forth = (across * cosine + along * sine) / radius
        aside = (along * cosine - across * sine) / radius
        width = np.float32(max(0.12, 1 / (size * float(radius))))
        ray = np.exp(-((aside / width) ** 2)) * falling(forth - np.float32(length) / 2, 3)
        light = np.maximum(light, np.float32(weight * 0.12) / width * ray * (forth > 0))
    whole: Field = np.float32(spot.light * (spot.radius / radius) ** 2) * light
    return whole


def _tissue(view: _View, rng: np.random.Generator, size: int) -> tuple[Field, Field]:
    """Return glandular tissue (0 to 1) and the strands of ligaments through it."""
    texture = np.zeros((size, size), dtype=np.float32)
    for waves, weight in _TEXTURE:
        field = noise(rng, size, waves)
        if 2 * waves <= size:  # finer ones could not be seen
            texture += np.float32(weight) * field
    strands = np.zeros_like(texture)
    for waves, width in ((9, 0.07), (20, 0.1)):
        field = noise(rng, size, waves, waves // 3) / np.float32(width)
        strands += np.exp(-(field**2)) * falling(-noise(rng, size, 8), 6)
    deep, high = view.deep[None, :], view.high[:, None] - np.float32(view.sag) * view.deep**2
    density = view.breast.density
    cone = 1.3 - ((deep - 0.55) / 0.4) ** 2 - (high / 0.6) ** 2
    gland = falling(-(cone + 0.55 * texture + np.float32(3 * density - 2.3)), 1.6)
    return gland * np.float32(0.5 + 0.5 * density) + 0.08 * texture * gland, strands
