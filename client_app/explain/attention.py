"""Where a prompted ViT looked, at the hospital that holds the images: maps over images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from client_app.training.compute import Compute
from client_app.training.evaluation import over_batches
from datasets.silo.silos import Split
from models.maths.dirichlet import belief, vacuity
from models.methods.fedevprompt import most_certain
from models.networks.encoders import float_inputs
from models.networks.prompted_vit import PromptedViT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def answer_lines(
    classes: Sequence[str],
    probabilities: Sequence[float],
    beliefs: Sequence[float],
    vacuity: float | None,
) -> list[str]:
    """Return a network's answer as text: a line per class, of an evidential one with beliefs."""
    lines = [f"{name}: probability {p:.3f}" for name, p in zip(classes, probabilities, strict=True)]
    if vacuity is None:
        return lines
    lines = [f"{line}, belief {b:.3f}" for line, b in zip(lines, beliefs, strict=True)]
    return [*lines, f"vacuity {vacuity:.3f} (1: no evidence at all)"]


@dataclass(frozen=True)
class Look:
    """What the model made of one image.

    Attributes:
        title: names the image and the truth.
        image: (3, height, width) or (1, height, width), -1..1.
        rollout: (rows, columns), summing to 1.
        classes: names of the classes.
        probabilities: expected probability of each class.
        beliefs: belief mass of each class; with the vacuity they sum to 1. Empty where the network
            is not evidential.
        vacuity: K / S; None where the network is not evidential.
    """

    title: str
    image: Tensor
    rollout: Tensor
    classes: Sequence[str]
    probabilities: list[float]
    beliefs: list[float]
    vacuity: float | None

    def document(self) -> dict[str, Any]:
        """Return it for JSON, without the image."""
        facts = {key: value for key, value in vars(self).items() if key != "image"}
        return facts | {"rollout": self.rollout.tolist(), "classes": list(self.classes)}

    def lines(self) -> list[str]:
        """Return it as text."""
        answers = answer_lines(self.classes, self.probabilities, self.beliefs, self.vacuity)
        row, column = divmod(int(self.rollout.argmax()), self.rollout.shape[1])
        return [
            self.title,
            *answers,
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


def look(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    row: int,
    title: str,
    classes: Sequence[str],
) -> Look:
    """Return what ``network``, placed on the compute device, makes of one image of ``split``."""
    image = split.inputs[row : row + 1]
    maps = over_batches(network, image, compute, lambda x: network.encode_with_rollout(x)[1])
    logits = over_batches(network, image, compute, lambda x: network.classify(network.encode(x)))
    alpha, evidence = logits.exp(), network.evidence
    return Look(
        title=title,
        image=float_inputs(image)[0],
        rollout=maps[0].reshape(network.grid_size()),
        classes=classes,
        probabilities=logits.softmax(dim=1)[0].tolist(),
        beliefs=belief(alpha, evidence.prior.cpu())[0].tolist() if evidence else [],
        vacuity=vacuity(alpha)[0].item() if evidence else None,
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

    def logits_of(inputs: Tensor) -> Tensor:
        return network.classify(network.encode(inputs))

    logits = over_batches(network, split.inputs, compute, logits_of)
    sure = logits.softmax(dim=1).max(dim=1).values
    uncertain = vacuity(logits.exp()) if network.evidence else 1 - sure
    measure, answers = "vacuity" if network.evidence else "doubt", logits.argmax(dim=1)
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
            told = f"{name}: said {said}\n{measure} {uncertain[index]:.2f}"
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
