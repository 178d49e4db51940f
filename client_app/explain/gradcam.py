"""Where a convolutional network finds a class, by Grad-CAM (Selvaraju et al. 2017).

A class's map is the ReLU of the last maps' weighted sum, a map's weight being the mean of the
logit's gradient over it (eqs. 1 and 2). It is made, and seen, at the hospital that holds the image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from client_app.explain.attention import answer_lines
from client_app.explain.embeddings import single_classifier
from client_app.training.compute import Compute
from client_app.training.evaluation import over_batches
from datasets.silo.silos import Split
from models.contract.errors import SettingError
from models.maths.dirichlet import belief, vacuity
from models.networks.encoders import ConvEncoder, ResidualBlock, VggEncoder, float_inputs
from models.networks.resnet22 import ResNet22
from models.networks.site_network import SiteNetwork

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRAWN = 512  # pixels of a side in a picture, at most


@dataclass(frozen=True)
class CamLook:
    """What a convolutional network made of one image.

    Attributes:
        title: names the image and the truth.
        image: (channels, height, width), as the silo holds it.
        cam: the map (rows, columns) of the class ``label``, not below 0, on no common scale.
        label: the class that the map is of.
        classes: names of the classes.
        probabilities: (expected) probability of each class.
        beliefs: belief mass of each class; with the vacuity they sum to 1. Empty where the network
            is not evidential.
        vacuity: K / S; None where the network is not evidential.
    """

    title: str
    image: Tensor
    cam: Tensor
    label: int
    classes: Sequence[str]
    probabilities: list[float]
    beliefs: list[float]
    vacuity: float | None

    def said(self) -> int:
        """Return the class that the network gives the most probability."""
        return int(np.argmax(self.probabilities))

    def document(self) -> dict[str, Any]:
        """Return it for JSON, without the image."""
        facts = {key: value for key, value in vars(self).items() if key != "image"}
        return facts | {"cam": self.cam.tolist(), "classes": list(self.classes)}

    def lines(self) -> list[str]:
        """Return it as text."""
        answers = answer_lines(self.classes, self.probabilities, self.beliefs, self.vacuity)
        return [self.title, *answers, self._place()]

    def _place(self) -> str:
        name, (rows, columns) = self.classes[self.label], self.cam.shape
        if not self.cam.any():
            return f"Grad-CAM: nothing in the last maps speaks for {name}"
        row, column = divmod(int(self.cam.argmax()), columns)
        return (
            f"Grad-CAM: most for {name} at row {row + 1}, column {column + 1} of {rows} x {columns}"
        )

    def figure(self) -> Figure:
        """Draw the image, and the map over it."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_image(left, self.image)
        draw_cam(right, self.image, self.cam)
        for axes in (left, right):
            axes.set_axis_off()
        right.set_title(f"Grad-CAM of {self.classes[self.label]}", fontsize="small")
        figure.suptitle("\n".join(self.lines()[:-1]), fontsize="small")
        return figure


def look_at_maps(
    network: SiteNetwork,
    split: Split,
    compute: Compute,
    row: int,
    title: str,
    classes: Sequence[str],
    label: int | None = None,
) -> CamLook:
    """Return what ``network``, placed on the compute device, makes of one image of ``split``.

    ``label`` is the class to draw; None: the one that it gives the most probability.

    Raises:
        SettingError: the network has no convolutional maps, or mixes several networks.
    """
    last_maps(network)  # refused before anything is computed
    exact = dataclasses.replace(compute, bf16=False)
    image, evidence = split.inputs[row : row + 1], single_classifier(network).evidence
    logits = over_batches(network, image, exact, network)
    alpha, chosen = logits.exp(), int(logits.argmax()) if label is None else label
    return CamLook(
        title=title,
        image=image[0],
        cam=grad_cam(network, float_inputs(exact.bring(image)), chosen)[0],
        label=chosen,
        classes=classes,
        probabilities=logits.softmax(dim=1)[0].tolist(),
        beliefs=belief(alpha, evidence.prior.cpu())[0].tolist() if evidence else [],
        vacuity=vacuity(alpha)[0].item() if evidence else None,
    )


def grad_cam(network: SiteNetwork, inputs: Tensor, label: int) -> Tensor:
    """Return the Grad-CAM maps (batch, rows, columns) of a class, on the CPU.

    Args:
        network: put in eval mode, on the device of the inputs.
        inputs: (batch, channels, height, width), as networks take them.
        label: the class whose logit is followed back.

    Raises:
        SettingError: the network has no convolutional maps, or mixes several networks, or its last
            maps have a single cell, which shows no place.
    """
    from captum.attr import LayerGradCam

    layer = last_maps(network)
    module = network.eval()
    given = inputs.detach().clone().requires_grad_()  # else a frozen encoder has no gradients
    maps: Tensor = LayerGradCam(module, layer).attribute(given, label, relu_attributions=True)
    if maps.shape[2:].numel() == 1:
        height, width = inputs.shape[2:]
        raise SettingError(
            f"of images of {height}x{width} pixels the network's last maps have a single cell, so "
            "that Grad-CAM has no place to show: train at a larger 'image-size' (resnet22: 76 or "
            "more)"
        )
    return maps[:, 0].detach().float().cpu()


def last_maps(network: SiteNetwork) -> nn.Module:
    """Return the layer that gives a convolutional network's last maps, before any pooling.

    Raises:
        SettingError: there are no such maps, or it mixes several networks.
    """
    encoder = single_classifier(network).encoder
    if isinstance(encoder, ResNet22):
        return encoder.final_relu
    if isinstance(encoder, ConvEncoder):
        return [stage for stage in encoder.stages if isinstance(stage, ResidualBlock)][-1]
    if isinstance(encoder, VggEncoder):
        return list(encoder.features.children())[-2]  # the very last is a pooling
    raise SettingError(
        "Grad-CAM needs convolutional maps, and this network has none: of a ViT 'fedsilo "
        "attention' draws where it looked, of a table 'fedsilo explain' says what it can"
    )


def draw_image(axes: Axes, image: Tensor) -> None:
    """Draw an image (channels, height, width) as a silo holds it."""
    axes.imshow(_pixels(_reduced(image)))


def draw_cam(axes: Axes, image: Tensor, cam: Tensor) -> None:
    """Draw a map (rows, columns), bilinear, over an image (channels, height, width).

    The more a place speaks for the class the less is seen of the image; 0 is clear.
    """
    from captum.attr import LayerAttribution

    reduced = _reduced(image)
    size = (reduced.shape[1], reduced.shape[2])
    large = LayerAttribution.interpolate(cam[None, None], size, "bilinear")[0, 0]
    share = (large / large.max().clamp_min(1e-12)).numpy()
    axes.imshow(_pixels(reduced))
    axes.imshow(share, cmap="plasma", vmin=0.0, vmax=1.0, alpha=0.65 * np.sqrt(share))


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
