"""Draw synthetic pictures: a textured background, blobs and strokes, and a machine's look.

A picture is a sum of formulas over coordinates from -1 to 1, so that its size only decides how
finely it is sampled. Lengths are in halves of the picture's side. x grows to the right, y
downwards.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Field = npt.NDArray[Any]  # float32 (size, size), or (channels, size, size)
Points = npt.NDArray[np.float64]  # (points, 2): x, y

_WAVES = 10  # plane waves in a texture
_STEPS = 24  # segments of a smooth line


@dataclass(frozen=True)
class Blob:
    """A round or lobed area of one brightness: a lesion, a mass, an organ.

    Attributes:
        x, y: its centre.
        radius: its mean radius.
        lobes: number of bulges of its outline; 0 for a circle.
        depth: height of the bulges, as a share of the radius.
        soft: width of its soft edge, as a share of the radius.
    """

    x: float
    y: float
    radius: float
    lobes: int = 0
    depth: float = 0.0
    soft: float = 0.15

    def soft_mask(self, size: int) -> Field:
        """Draw the blob as a mask (size, size): 1 inside, 0 outside, and a soft edge between.

        The picture's coordinates go from -1 to 1. If ``lobes`` is 0, the outline is a circle.
        Otherwise it has ``lobes`` bulges, which change its radius by the share ``depth``.
        """
        x, y = grid(size)
        x, y = x - np.float32(self.x), y - np.float32(self.y)
        # The outline's distance from the centre, in radii, depends on the angle
        bulge = 1 + self.depth * np.cos(self.lobes * np.arctan2(y, x)) if self.lobes else 1.0
        excess = np.hypot(x, y) / np.float32(self.radius) - bulge
        weight: Field = 1 / (1 + np.exp((4 / self.soft * excess).clip(-30, 30)))
        return weight


@dataclass(frozen=True)
class Look:
    """How the machine of a site renders a picture.

    Attributes:
        ground: brightness of the background, 0..1, per channel.
        contrast: factor for the content; below 0 the content is darker than the background.
        grain: standard deviation of the noise of each pixel.
        field: radius of a round field of view that is surrounded by black; 0 for no field.
    """

    ground: tuple[float, ...]
    contrast: float = 1.0
    grain: float = 0.02
    field: float = 0.0

    def show(self, content: Field, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
        """Render ``content`` (channels, size, size) with this look, as uint8 of the same shape.

        The content is multiplied by the look's contrast and added to its background. Then noise,
        which ``rng`` draws, is added. If the look has a round field of view, everything outside it
        becomes black. Brightness from 0 to 1 becomes 0..255, and values outside are clipped.
        """
        picture = np.array(self.ground, np.float32).reshape(-1, 1, 1) + self.contrast * content
        picture = picture + self.grain * rng.standard_normal(picture.shape, dtype=np.float32)
        if self.field:
            picture = picture * Blob(0, 0, self.field, soft=0.05).soft_mask(content.shape[-1])
        pixels: npt.NDArray[np.uint8] = np.rint(picture.clip(0, 1) * 255).astype(np.uint8)
        return pixels


@lru_cache(maxsize=4)
def grid(size: int) -> tuple[Field, Field]:
    """Return the coordinates x and y of each pixel's centre, (size, size) each, read only."""
    line = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    y, x = np.meshgrid(line, line, indexing="ij")
    return x, y


def texture(rng: np.random.Generator, size: int, waves: float) -> Field:
    """Draw a random texture (size, size), the sum of ten plane waves, with a variance of about 1.

    Args:
        rng: draws the direction, phase and length of each wave.
        size: pixels per side.
        waves: mean number of periods of a wave along a side. The number of a wave is between 0.5
            and 1.5 times this mean.
    """
    x, y = grid(size)
    turns, phases = rng.uniform(0, 2 * np.pi, (2, _WAVES))
    # A side is 2 long, so pi is the wave number of one wave per side
    lengths = np.pi * waves * rng.uniform(0.5, 1.5, _WAVES)
    total = np.zeros_like(x)
    for length, turn, phase in zip(lengths, turns, phases, strict=True):
        across, along = np.float32(length * np.cos(turn)), np.float32(length * np.sin(turn))
        total += np.cos(across * x + along * y + np.float32(phase))
    # A cosine has variance 1/2, and the waves are independent
    return total * np.float32(np.sqrt(2 / _WAVES))


def smooth_line(corners: npt.ArrayLike) -> Points:
    """Fit a smooth curve through the points ``corners`` (k, 2), and return 25 of its points.

    The curve is a cubic spline that passes through the corners at parameters 0, 1, ..., k - 1. The
    25 points, (25, 2), have equally spaced parameters, from the first corner to the last.
    """
    from scipy.interpolate import CubicSpline

    knots = np.arange(len(np.asarray(corners)))
    curve: Points = CubicSpline(knots, corners)(np.linspace(0, knots[-1], _STEPS + 1))
    return curve


def distance(size: int, line: Points) -> Field:
    """Compute the distance of each pixel's centre from a polyline, (size, size), float32.

    Coordinates and distances are in units of half a side: the picture goes from -1 to 1.

    Args:
        size: pixels per side.
        line: the polyline's points (x, y) in order, (k, 2), at least two.
    """
    x, y = grid(size)
    nearest = np.full((size, size), np.inf, dtype=np.float32)
    for (x0, y0), (dx, dy) in zip(line[:-1], np.diff(line, axis=0), strict=True):
        # 'along' is the nearest point of the segment: 0 at its start, 1 at its end
        length = max(dx * dx + dy * dy, 1e-12)
        along = (((x - x0) * dx + (y - y0) * dy) / length).clip(0, 1)
        nearest = np.minimum(nearest, np.hypot(x - x0 - along * dx, y - y0 - along * dy))
    return nearest.astype(np.float32)


def stroke(size: int, line: Points, radius: float) -> Field:
    """Draw a polyline as a mask (size, size), 1 on the line and 0 away from it.

    ``radius`` is half of the line's width, in units of half a side. At this distance from the
    middle the mask is 0.5. Its soft edge is two pixels wide. If the line is thinner than a pixel,
    it is drawn one pixel wide, and its values are lowered in proportion.
    """
    # A pixel is 2 / size wide: a thinner line keeps that width, and is fainter by the same factor
    reach = max(radius, 1 / size)
    edge = (0.5 + (reach - distance(size, line)) * size / 4).clip(0, 1)
    return edge * np.float32(radius / reach)
