"""Imitate how three vendors' machines render a radiograph: tone curve, noise and sharpness.

The curves imitate the "intensity profiles" in the Fed-Align-CL paper (figure 1). They bend so
strongly that standardising each image, which is linear, does not undo them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Grey = npt.NDArray[Any]  # float32 (height, width), from 0, black, to 1, white


@dataclass(frozen=True)
class Profile:
    """A vendor's rendering.

    Attributes:
        curve: rising function from 0..1 to 0..1, with 0 at 0 and 1 at 1.
        noise: standard deviation of the noise on white, before the curve. Elsewhere it is
            proportional to the square root of the brightness, as for counts of photons, so that
            black stays black.
        blur: share of its light that a pixel gives to each of its two neighbours, along both axes.
    """

    curve: Callable[[Grey], Grey]
    noise: float
    blur: float

    def render(self, picture: Grey, rng: np.random.Generator) -> Grey:
        """Render a picture as the vendor's machine would, with its blur, noise and tone curve.

        The picture is blurred along both axes. Then Gaussian noise is added, whose standard
        deviation is ``noise`` times the square root of the blurred brightness. The result is
        clipped to 0..1, mapped by the tone curve ``curve``, and clipped again.

        Args:
            picture: brightness from 0 to 1, (height, width).
            rng: draws the noise.

        Returns:
            The rendered picture, of the same shape, 0..1.
        """
        # The blur is separable: down the columns, then, on the transposed picture, along the rows
        soft = _blur(_blur(picture, self.blur).T, self.blur).T
        grain = rng.standard_normal(picture.shape, dtype=np.float32)
        seen = soft + np.float32(self.noise) * np.sqrt(soft) * grain
        return self.curve(seen.clip(0, 1)).clip(0, 1)


def _blur(picture: Grey, share: float) -> Grey:
    """Blur a picture along the first axis, by mixing each row with its two neighbours.

    A row keeps 1 - 2 * ``share`` of its values, and gets ``share`` of the values of each neighbour.
    At an edge, the row itself takes the place of the missing neighbour.
    """
    above, below = np.roll(picture, 1, axis=0), np.roll(picture, -1, axis=0)
    above[0], below[-1] = picture[0], picture[-1]
    mixed: Grey = picture + np.float32(share) * (above + below - 2 * picture)
    return mixed


def shoulder(light: Grey) -> Grey:
    """Apply a tone curve that is steep in dark and flat in light regions."""
    curved: Grey = 1 - (1 - light**0.7) ** 1.4
    return curved


def sigmoid(light: Grey) -> Grey:
    """Apply an S-shaped tone curve, a logistic function: steep at 0.5, and flat at 0 and 1.

    The curve maps 0 to 0, 0.5 to 0.5 and 1 to 1. Values outside 0..1 stay slightly outside.
    """
    low = 1 / (1 + np.exp(3.5))  # the curve at 0
    high = 1 / (1 + np.exp(-3.5))  # and at 1, so that it reaches both ends
    curved = 1 / (1 + np.exp(-7 * (light - 0.5)))
    stretched: Grey = ((curved - low) / (high - low)).astype(light.dtype)
    return stretched


def steep(light: Grey) -> Grey:
    """Apply a tone curve that is flat in dark and steep in light regions."""
    curved: Grey = light**2.4
    return curved


SHOULDERED = Profile(shoulder, noise=0.008, blur=0.0)
SIGMOID = Profile(sigmoid, noise=0.02, blur=0.04)
STEEP = Profile(steep, noise=0.014, blur=0.1)
