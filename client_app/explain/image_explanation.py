"""What a network made of one image, and which places of it mattered: in words and as a picture.

Attention rollout and Grad-CAM differ in how the map is made; text, JSON and picture are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsilo.models.figures.palette import SALIENCY
from fedsilo.models.figures.panels import without_frame
from fedsilo.models.maths.dirichlet import belief, vacuity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRAWN = 512  # pixels of a side in a picture, at most
_OPACITY = 0.65  # of a map where it is highest


@dataclass(frozen=True)
class SaliencyMap:
    """Which places of an image mattered.

    Attributes:
        name: its name in JSON.
        values: (rows, columns), not below 0.
        heading: what it is, for above a picture.
        place: a sentence that says where it is highest.
        floor: the value that leaves the image clear in a picture.
        label: the class that it is of; None where it is of the image as a whole.
    """

    name: str
    values: Tensor
    heading: str
    place: str
    floor: float = 0.0
    label: int | None = None

    def shares(self, size: tuple[int, int]) -> Tensor:
        """Return it as 0..1, from its floor to its highest value, bilinear, at a size in pixels."""
        large = torch.nn.functional.interpolate(
            self.values[None, None].float(), size=size, mode="bilinear", align_corners=False
        )[0, 0]
        above = (large - self.floor).clamp_min(0)
        return above / above.max().clamp_min(1e-12)


@dataclass(frozen=True)
class ImageExplanation:
    """What a network made of one image.

    Attributes:
        title: names the image and the truth.
        image: (channels, height, width), as the silo holds it.
        saliency: which places mattered.
        classes: names of the classes.
        probabilities: (expected) probability of each class.
        beliefs: belief mass of each class; with the vacuity they sum to 1. Empty where the network
            is not evidential.
        vacuity: K / S; None where the network is not evidential.
    """

    title: str
    image: Tensor
    saliency: SaliencyMap
    classes: Sequence[str]
    probabilities: list[float]
    beliefs: list[float]
    vacuity: float | None

    def answer(self) -> int:
        """Return the class that the network gives the most probability."""
        return int(np.argmax(self.probabilities))

    def uncertainty(self) -> tuple[str, float]:
        """Return the name and the value, 0..1, of what the network doubts its answer by."""
        if self.vacuity is None:
            return "doubt", 1 - max(self.probabilities)
        return "vacuity", self.vacuity

    def document(self) -> dict[str, Any]:
        """Return it for JSON, without the image."""
        facts: dict[str, Any] = {
            "title": self.title,
            self.saliency.name: self.saliency.values.tolist(),
        }
        if self.saliency.label is not None:
            facts["label"] = self.saliency.label
        return facts | {
            "classes": list(self.classes),
            "probabilities": self.probabilities,
            "beliefs": self.beliefs,
            "vacuity": self.vacuity,
        }

    def lines(self) -> list[str]:
        """Return it as text: the title, a line per class, of an evidential one with beliefs."""
        return [*self._answer_lines(), self.saliency.place]

    def _answer_lines(self) -> list[str]:
        pairs = zip(self.classes, self.probabilities, strict=True)
        lines = [f"{name}: probability {probability:.3f}" for name, probability in pairs]
        if self.vacuity is None:
            return [self.title, *lines]
        lines = [
            f"{line}, belief {mass:.3f}" for line, mass in zip(lines, self.beliefs, strict=True)
        ]
        return [self.title, *lines, f"vacuity {self.vacuity:.3f} (1: no evidence at all)"]

    def figure(self) -> Figure:
        """Draw the image, and the map over it."""
        from matplotlib.figure import Figure

        lines = self._answer_lines()
        figure = Figure(figsize=(7, 3.6 + 0.16 * len(lines)), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_image(left, self.image)
        draw_map(right, self.image, self.saliency)
        for axes in (left, right):
            without_frame(axes)
        right.set_title(self.saliency.heading, fontsize="small")
        figure.suptitle("\n".join(lines), fontsize="small")
        return figure


def explain_logits(
    title: str,
    image: Tensor,
    saliency: SaliencyMap,
    classes: Sequence[str],
    logits: Tensor,
    prior: Tensor | None,
) -> ImageExplanation:
    """Return the explanation of an image by a map, and by the logits (1, classes) of its answer.

    ``prior`` (classes,) is that of an evidential network, whose logits are the logarithm of its
    concentration; None: the network is not evidential.
    """
    alpha = logits.exp()
    return ImageExplanation(
        title=title,
        image=image,
        saliency=saliency,
        classes=classes,
        probabilities=logits.softmax(dim=1)[0].tolist(),
        beliefs=[] if prior is None else belief(alpha, prior.cpu())[0].tolist(),
        vacuity=None if prior is None else vacuity(alpha)[0].item(),
    )


def draw_image(axes: Axes, image: Tensor) -> None:
    """Draw an image (channels, height, width) as a silo holds it."""
    axes.imshow(_pixels(_reduced(image)))


def draw_map(axes: Axes, image: Tensor, saliency: SaliencyMap) -> None:
    """Draw a map over an image (channels, height, width) as a silo holds it.

    The more a place matters the less is seen of the image; where it does not it is clear.
    """
    reduced = _reduced(image)
    share = saliency.shares((reduced.shape[1], reduced.shape[2])).numpy()
    axes.imshow(_pixels(reduced))
    axes.imshow(share, cmap=SALIENCY, vmin=0.0, vmax=1.0, alpha=_OPACITY * np.sqrt(share))


def _reduced(image: Tensor) -> Tensor:
    """Return an image as float, no larger than a picture can show."""
    pixels = image.float() / 255 if image.dtype == torch.uint8 else _stretched(image)
    height, width = pixels.shape[1:]
    shrink = max(height, width) / _DRAWN
    if shrink <= 1:
        return pixels
    size = (max(1, round(height / shrink)), max(1, round(width / shrink)))
    return torch.nn.functional.interpolate(pixels[None], size=size, mode="area")[0]


def _stretched(image: Tensor) -> Tensor:
    """Return the image's own range of values as 0..1, without the outermost of them."""
    pixels = image.float()
    low, high = map(float, np.quantile(pixels.numpy(), (0.002, 0.998)))
    return (pixels - low).div(max(high - low, 1e-12)).clamp(0, 1)


def _pixels(image: Tensor) -> np.ndarray[Any, Any]:
    colour = image.expand(3, -1, -1) if len(image) == 1 else image
    return colour.permute(1, 2, 0).numpy()
