"""Explain any network's prediction for an image by occlusion.

Zeiler and Fergus 2014, section 4.2: a square of the image is replaced by the image's mean. The
square's value is the drop in the predicted class's probability.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.image_explanation import (
    ImageExplanation,
    SaliencyMap,
    explain_logits,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

_SQUARES = 8  # the number of squares along each side


def explain_by_occlusion(
    network: SiteNetwork,
    split: Split,
    row: int,
    title: str,
    classes: Sequence[str],
    compute: Compute,
) -> ImageExplanation:
    """Explain a prediction for one image of ``split`` by occlusion.

    ``network`` must be on the compute device.
    """
    exact = compute.exact()
    image = split.inputs[row : row + 1]
    logits = over_batches(network, image, exact, network)
    answer = int(logits.argmax())
    values = occlusion(network, float_inputs(exact.bring(image)), answer)
    place = divmod(int(values.argmax()), values.shape[1])
    found = SaliencyMap(
        name="occlusion",
        values=values,
        heading=f"occlusion of {classes[answer]}",
        place=f"{classes[answer]} rests most on row {place[0] + 1}, column {place[1] + 1} of "
        f"{values.shape[0]} x {values.shape[1]} squares",
        label=answer,
    )
    return explain_logits(title, image[0], found, classes, logits, None)


def occlusion(network: SiteNetwork, image: Tensor, label: int) -> Tensor:
    """Measure the drop in the probability of ``label`` for each hidden square, at least 0.

    Args:
        network: in eval mode.
        image: (1, channels, height, width), as the network takes it, on its device.
        label: the class.

    Returns:
        (rows, columns) of squares, on the CPU.
    """
    from captum.attr import Occlusion

    height, width = _square_side(image.shape[2]), _square_side(image.shape[3])
    square = (image.shape[1], height, width)

    def probabilities(images: Tensor) -> Tensor:
        return torch.softmax(network(images).float(), dim=-1)

    drops: Tensor = Occlusion(probabilities).attribute(
        image,
        square,
        square,
        baselines=image.mean(dim=(2, 3), keepdim=True).expand_as(image),
        target=label,
        perturbations_per_eval=_SQUARES**2,
    )
    # captum repeats a square's value for each of its pixels
    return drops[0, 0, ::height, ::width].clamp_min(0).cpu()


def _square_side(side: int) -> int:
    """Return the side of a square in pixels, at least 1, for a side of the image."""
    # Ceiling division, so that the squares cover the whole image
    return -(-side // min(_SQUARES, side))
