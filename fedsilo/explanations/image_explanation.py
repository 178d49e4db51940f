"""The explanation of a prediction for one image: as text, as JSON and as a picture.

Attention rollout, Grad-CAM and occlusion differ only in the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsilo.core.drawing.palette import SALIENCY
from fedsilo.core.drawing.panels import literal, without_frame
from fedsilo.models.maths.dirichlet import belief, vacuity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST = 512  # the longest side of a picture, in pixels
_OPACITY = 0.65  # the opacity of a map at its highest value


@dataclass(frozen=True)
class SaliencyMap:
    """A map of how important each place of an image is for a prediction."""

    name: str  # the map's key in JSON, such as 'cam'
    values: Tensor  # (rows, columns), at least 0, usually coarser than the image
    heading: str  # the title of the map in a picture
    place: str  # a text that names the most important place
    floor: float = 0.0  # places with this value or less are not coloured
    label: int | None = None  # the class that the map explains; None if it belongs to no class

    def shares(self, size: tuple[int, int]) -> Tensor:
        """Resize the map bilinearly to ``size``, (height, width), then scale it to [0, 1].

        Values up to the map's ``floor`` become 0, because they count as unimportant. The largest
        value of the resized map becomes 1. If no value is above the floor, all become 0.
        """
        large = torch.nn.functional.interpolate(
            self.values[None, None].float(), size=size, mode="bilinear", align_corners=False
        )[0, 0]
        # A map that is 0 everywhere, such as an empty Grad-CAM, stays 0 instead of becoming NaN
        above = (large - self.floor).clamp_min(0)
        return above / above.max().clamp_min(1e-12)


@dataclass(frozen=True)
class ImageExplanation:
    """The explanation of a network's prediction for one image."""

    title: str  # names the image, and its true class if it is known
    image: Tensor  # (channels, height, width), as the silo stores it
    saliency: SaliencyMap
    classes: Sequence[str]  # the names of the classes
    probabilities: list[float]  # per class; expected probabilities if the network is evidential
    # Belief masses of an evidential network, which sum to 1 with the vacuity; empty for others
    beliefs: list[float]
    vacuity: float | None  # K / S of an evidential network, in (0, 1]; None for others

    def answer(self) -> int:
        """Return the number of the most probable class, the first if several tie."""
        return int(np.argmax(self.probabilities))

    def uncertainty(self) -> tuple[str, float]:
        """Return the kind of uncertainty that the network gives, and its value from 0 to 1.

        For an evidential network, this is the 'vacuity' (lack of evidence). For any other network,
        it is the 'doubt': 1 minus the largest probability.
        """
        if self.vacuity is None:
            return "doubt", 1 - max(self.probabilities)
        return "vacuity", self.vacuity

    def document(self) -> dict[str, Any]:
        """Return the explanation as a dictionary for JSON, without the image.

        Its keys are ``title``, ``classes``, ``probabilities``, ``beliefs`` and ``vacuity``. The
        values of the map are under the map's name, such as ``cam``. If the map explains one class,
        ``label`` is the number of that class; otherwise the key is missing. A network that is not
        evidential has empty beliefs and the vacuity None.
        """
        document: dict[str, Any] = {
            "title": self.title,
            self.saliency.name: self.saliency.values.tolist(),
        }
        if self.saliency.label is not None:
            document["label"] = self.saliency.label
        return document | {
            "classes": list(self.classes),
            "probabilities": self.probabilities,
            "beliefs": self.beliefs,
            "vacuity": self.vacuity,
        }

    def lines(self) -> list[str]:
        """Format the explanation as lines of text.

        The first line is the title. Each class has a line with its probability and, for an
        evidential network, the belief in it. An evidential network also has a line with the
        vacuity. The last line describes the most important place in words.
        """
        return [*self._answer_lines(), self.saliency.place]

    def _answer_lines(self) -> list[str]:
        """Format the prediction as lines of text: the title, then each class with its probability.

        For an evidential network, the line of a class also gives the belief in the class. A last
        line then gives the vacuity (lack of evidence).
        """
        lines = [self.title]
        for label, name in enumerate(self.classes):
            line = f"{name}: probability {self.probabilities[label]:.3f}"
            if self.vacuity is not None:
                line += f", belief {self.beliefs[label]:.3f}"
            lines.append(line)
        if self.vacuity is not None:
            lines.append(f"vacuity {self.vacuity:.3f} (1: no evidence at all)")
        return lines

    def figure(self) -> Figure:
        """Draw two panels: the image, and the image with its map over it.

        The text above the panels gives the title and the probability of each class. For an
        evidential network, it also gives the belief in each class and the vacuity.
        """
        from matplotlib.figure import Figure

        lines = self._answer_lines()
        figure = Figure(figsize=(7, 3.6 + 0.16 * len(lines)), layout="constrained")
        self.draw(*figure.subplots(1, 2))
        figure.suptitle(literal("\n".join(lines)), fontsize="small")
        return figure

    def draw(self, left: Axes, right: Axes) -> None:
        """Draw the image on ``left``, and on ``right`` the image with its map over it.

        The title of ``right`` tells the kind of map, from the map's ``heading``. ``left`` has no
        title. Both panels are drawn without a frame.
        """
        draw_image(left, self.image)
        draw_map(right, self.image, self.saliency)
        for axes in (left, right):
            without_frame(axes)
        right.set_title(self.saliency.heading, fontsize="small")


def explain_logits(
    title: str,
    image: Tensor,
    saliency: SaliencyMap,
    classes: Sequence[str],
    logits: Tensor,
    prior: Tensor | None,
) -> ImageExplanation:
    """Build the explanation of an image from its saliency map and the network's outputs.

    The probabilities are the softmax of ``logits``. Only an evidential network also gives beliefs
    (evidence for each class) and the vacuity (lack of evidence). For other networks, ``beliefs`` is
    empty and ``vacuity`` is None.

    Args:
        title: a name for the image.
        image: (channels, height, width), as the site stores it.
        saliency: the map of the image.
        classes: the names of the classes.
        logits: (1, classes), on the CPU. For an evidential network they are the logarithms of the
            Dirichlet parameters alpha.
        prior: (classes,), the part of each alpha that is not evidence; None if the network is not
            evidential.
    """
    beliefs: list[float] = []
    of_vacuity = None
    if prior is not None:
        # The softmax below fits both kinds: for log alpha it is alpha / S, the expected probability
        alpha = logits.exp()
        beliefs = belief(alpha, prior.cpu())[0].tolist()
        of_vacuity = vacuity(alpha)[0].item()
    return ImageExplanation(
        title=title,
        image=image,
        saliency=saliency,
        classes=classes,
        probabilities=logits.softmax(dim=1)[0].tolist(),
        beliefs=beliefs,
        vacuity=of_vacuity,
    )


def draw_image(axes: Axes, image: Tensor) -> None:
    """Draw an image (channels, height, width) as a silo stores it.

    If its longer side has more than 512 pixels, the image is shrunk to 512.
    """
    axes.imshow(_pixels(_reduce(image)))


def draw_map(axes: Axes, image: Tensor, saliency: SaliencyMap) -> None:
    """Draw an image with a saliency map over it.

    The image is scaled to [0, 1], and shrunk if a side is longer than 512 pixels. An image with one
    channel is drawn in grey. The map is resized to the drawn image. The importance of a place
    decides both the hue and the opacity of its colour: the most important place is the most opaque.
    Places at or below the map's ``floor`` stay uncoloured.

    Args:
        axes: the panel to draw on.
        image: (channels, height, width) with 1 or 3 channels, as the site stores it.
        saliency: the map.
    """
    reduced = _reduce(image)
    share = saliency.shares((reduced.shape[1], reduced.shape[2])).numpy()
    axes.imshow(_pixels(reduced))
    # The square root makes weak places visible; unimportant places leave the image unchanged
    axes.imshow(share, cmap=SALIENCY, vmin=0.0, vmax=1.0, alpha=_OPACITY * np.sqrt(share))


def _reduce(image: Tensor) -> Tensor:
    """Convert an image (channels, height, width) for drawing: float32 in [0, 1].

    8-bit images are divided by 255. Any other image has no fixed range. Its 0.2 % quantile becomes
    0, its 99.8 % quantile becomes 1, and values beyond them are clipped. If a side is longer than
    512 pixels, the image is shrunk until its longer side has 512 pixels.
    """
    pixels = image.float()
    if image.dtype == torch.uint8:
        pixels = pixels / 255
    else:
        # Radiographs and standardised images do not have a fixed range, and a few outliers
        # (markers, dead pixels) would leave the rest of the picture grey
        low, high = map(float, np.quantile(pixels.numpy(), (0.002, 0.998)))
        pixels = (pixels - low).div(max(high - low, 1e-12)).clamp(0, 1)
    height, width = pixels.shape[1:]
    shrink = max(height, width) / _LONGEST
    if shrink <= 1:
        return pixels
    size = (max(1, round(height / shrink)), max(1, round(width / shrink)))
    return torch.nn.functional.interpolate(pixels[None], size=size, mode="area")[0]


def _pixels(image: Tensor) -> np.ndarray[Any, Any]:
    """Convert an image (1 or 3, height, width) to (height, width, 3), as matplotlib draws it."""
    if len(image) == 1:  # grey
        image = image.expand(3, -1, -1)
    return image.permute(1, 2, 0).numpy()
