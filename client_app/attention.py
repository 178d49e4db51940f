"""Where a prompted ViT looked, at the hospital that holds the images: maps over images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from client_app.device import Compute
from client_app.evaluation import over_batches
from datasets.silos import Split
from models.dirichlet import belief, vacuity
from models.fedevprompt import most_certain
from models.networks import float_inputs
from models.prompted_vit import PromptedViT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """What the model made of one image.

    Attributes:
        title: names the image, the truth and the answer.
        image: (3, height, width) or (1, height, width), -1..1.
        rollout: (rows, columns), summing to 1.
        classes: names of the classes.
        probabilities: expected probability of each class.
        beliefs: belief mass of each class; with the vacuity they sum to 1.
        vacuity: K / S.
    """

    title: str
    image: Tensor
    rollout: Tensor
    classes: Sequence[str]
    probabilities: list[float]
    beliefs: list[float]
    vacuity: float

    def document(self) -> dict[str, Any]:
        """Return it for JSON, without the image."""
        facts = {key: value for key, value in vars(self).items() if key != "image"}
        return facts | {"rollout": self.rollout.tolist(), "classes": list(self.classes)}

    def lines(self) -> list[str]:
        """Return it as text."""
        per_class = zip(self.classes, self.probabilities, self.beliefs, strict=True)
        row, column = divmod(int(self.rollout.argmax()), self.rollout.shape[1])
        return [
            self.title,
            *(f"{name}: probability {p:.3f}, belief {b:.3f}" for name, p, b in per_class),
            f"vacuity {self.vacuity:.3f} (1: no evidence at all)",
            f"looked most at row {row + 1}, column {column + 1} of "
            f"{self.rollout.shape[0]} x {self.rollout.shape[1]} patches",
        ]

    def figure(self) -> Figure:
        """Draw the image, and the rollout map over it."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.imshow(_pixels(self.image))
        draw_over(right, self.image, self.rollout)
        for axes in (left, right):
            axes.set_axis_off()
        figure.suptitle("\n".join(self.lines()[:-1]), fontsize="small")
        return figure


def look(network: PromptedViT, split: Split, row: int, title: str, classes: Sequence[str]) -> Look:
    """Return what ``network`` makes of one image of ``split``."""
    network.eval()
    image = float_inputs(split.inputs[row : row + 1])
    with torch.no_grad():
        tokens, maps = network.encode_with_rollout(image)
        alpha = network.classify(tokens).exp()
    prior = network.evidence.prior if network.evidence else torch.ones(alpha.shape[-1])
    return Look(
        title=title,
        image=image[0],
        rollout=maps[0].reshape(network.grid_size()),
        classes=classes,
        probabilities=(alpha / alpha.sum())[0].tolist(),
        beliefs=belief(alpha, prior)[0].tolist(),
        vacuity=vacuity(alpha)[0].item(),
    )


def draw_sheet(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    classes: Sequence[str],
    title: str,
    count: int,
) -> Figure:
    """Return the most certain images of each class with their maps: a row of each per class."""
    from matplotlib.figure import Figure

    def alphas(inputs: Tensor) -> Tensor:
        return network.classify(network.encode(inputs)).exp()

    alpha = over_batches(network, split.inputs, compute, alphas)
    uncertain, answers = vacuity(alpha), alpha.argmax(dim=1)
    figure = Figure(figsize=(0.8 + 1.7 * count, 0.9 + 3.5 * len(classes)), layout="constrained")
    panels = figure.subplots(2 * len(classes), count, squeeze=False)
    for axes in panels.flatten():
        axes.set_axis_off()
    for label, name in enumerate(classes):
        chosen = most_certain(uncertain, split.labels, label, count)
        if not len(chosen):
            panels[2 * label, 0].set_title(f"{name}: no image", fontsize="small", loc="left")
            continue
        inputs = split.inputs[chosen]
        maps = over_batches(network, inputs, compute, lambda x: network.encode_with_rollout(x)[1])
        for column, index in enumerate(chosen.tolist()):
            image = float_inputs(split.inputs[index])
            upper, lower = panels[2 * label, column], panels[2 * label + 1, column]
            upper.imshow(_pixels(image))
            draw_over(lower, image, maps[column].reshape(network.grid_size()))
            said = classes[int(answers[index])]
            told = f"{name}: said {said}\nvacuity {uncertain[index]:.2f}"
            upper.set_title(told, fontsize="x-small", color="black" if said == name else "tab:red")
    figure.suptitle(title, fontsize="medium")
    return figure


def draw_over(axes: Axes, image: Tensor, rollout: Tensor) -> None:
    """Draw a rollout map (rows, columns) over an image (channels, height, width), -1..1."""
    upsampled = torch.nn.functional.interpolate(
        rollout[None, None].float(), size=image.shape[1:], mode="bilinear", align_corners=False
    )
    axes.imshow(_pixels(image))
    axes.imshow(upsampled[0, 0].numpy(), cmap="magma", alpha=0.55)


def _pixels(image: Tensor) -> np.ndarray[Any, Any]:
    colour = image.expand(3, -1, -1) if len(image) == 1 else image
    scaled = (colour.permute(1, 2, 0).numpy() + 1) / 2
    return np.clip(scaled, 0, 1)
