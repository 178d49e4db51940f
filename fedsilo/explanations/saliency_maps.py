"""Saliency maps of an image: Grad-CAM for convolutional networks, occlusion for any other.

Grad-CAM: Selvaraju et al. 2017, eq. 1 and 2. Occlusion: Zeiler and Fergus 2014, section 4.2. In
occlusion, a square of the image is replaced by the image's mean, and the square's value is the drop
in the predicted class's probability. Occlusion works without convolutional maps, but needs a pass
for each square.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.errors import SettingError
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.embeddings import single_classifier
from fedsilo.explanations.image_explanation import (
    ImageExplanation,
    SaliencyMap,
    explain_logits,
)
from fedsilo.models.networks.encoders import ConvEncoder, ResidualBlock, VggEncoder, float_inputs
from fedsilo.models.networks.resnet22 import ResNet22
from fedsilo.models.networks.site_network import SiteNetwork

_SQUARES = 8  # the number of squares along each side


def cam_map(cam: Tensor, label: int, classes: Sequence[str]) -> SaliencyMap:
    """Build a saliency map from the Grad-CAM (rows, columns) of class number ``label``.

    The map's ``place`` is a text with the row and the column, counted from 1, of the cell with the
    highest value. If all values are 0, the text says that no cell supports the class.
    """
    name, (rows, columns) = classes[label], cam.shape
    row, column = divmod(int(cam.argmax()), columns)
    place = f"nothing in the last maps speaks for {name}"
    if cam.any():
        place = f"most for {name} at row {row + 1}, column {column + 1} of {rows} x {columns}"
    return SaliencyMap(
        name="cam",
        values=cam,
        heading=f"Grad-CAM of {name}",
        place=f"Grad-CAM: {place}",
        label=label,
    )


def explain_by_grad_cam(
    network: SiteNetwork,
    split: Split,
    compute: Compute,
    row: int,
    title: str,
    classes: Sequence[str],
    label: int | None = None,
) -> ImageExplanation:
    """Explain a convolutional network's prediction for one image by Grad-CAM, in fp32.

    Args:
        network: on the compute device; it is put in eval mode.
        split: the samples, whose labels are not read.
        compute: the device.
        row: the number of the image in ``split``, counted from 0.
        title: the title of the explanation, such as the name of the image.
        classes: the names of the classes.
        label: the class whose map is drawn; None for the predicted class.

    Raises:
        SettingError: the network is not a single convolutional network of fedsilo, or its last
            feature maps have a single cell.
    """
    last_maps(network)  # refuses unsuitable networks before anything is computed
    exact = compute.exact()
    image, evidence = split.inputs[row : row + 1], single_classifier(network).evidence
    logits = over_batches(network, image, exact, network)
    if label is None:
        label = int(logits.argmax())
    cam = grad_cam(network, float_inputs(exact.bring(image)), label)[0]
    prior = evidence.prior if evidence else None
    return explain_logits(title, image[0], cam_map(cam, label, classes), classes, logits, prior)


def grad_cam(network: SiteNetwork, inputs: Tensor, label: int) -> Tensor:
    """Compute the Grad-CAM of a class for a batch of images.

    If the network takes several views of an image, the maps of the views are averaged.

    Args:
        network: it is put in eval mode.
        inputs: (batch, channels, height, width), as networks take them, on the network's device.
        label: the number of the class.

    Returns:
        (batch, rows, columns) on the CPU, at least 0 and not scaled. The size is that of the
        network's last feature maps.

    Raises:
        SettingError: the network is not a single convolutional network of fedsilo, or its last
            feature maps have a single cell.
    """
    from captum.attr import LayerGradCam

    layer = last_maps(network)
    module = network.eval()
    # Inputs need a gradient, because with a frozen encoder no other leaf is before the last maps
    tracked = inputs.detach().clone().requires_grad_()
    maps: Tensor = LayerGradCam(module, layer).attribute(tracked, label, relu_attributions=True)
    if maps.shape[2:].numel() == 1:
        height, width = inputs.shape[2:]
        raise SettingError(
            f"for images of {height}x{width} pixels the network's last maps have a single cell, so "
            "Grad-CAM has no place to show: train at a larger 'data.image-size' (resnet22: 76 or "
            "more)"
        )
    # Views are stacked along the batch: (views * batch, 1, rows, columns) is regrouped by view
    views = maps[:, 0].detach().float().cpu()
    return views.reshape(network.views, -1, *views.shape[1:]).mean(dim=0)


def has_maps(network: SiteNetwork) -> bool:
    """Tell whether Grad-CAM can find feature maps in a network.

    This needs a single classifier whose encoder is a ResNet22, a ``ConvEncoder`` or a
    ``VggEncoder``. The size of the maps is not checked.
    """
    try:
        last_maps(network)
    except SettingError:
        return False
    return True


def last_maps(network: SiteNetwork) -> nn.Module:
    """Return the layer whose output Grad-CAM uses: the last feature maps before a pooling.

    Raises:
        SettingError: the encoder is not one of fedsilo's convolutional encoders, or the network has
            several classifiers.
    """
    encoder = single_classifier(network).encoder
    if isinstance(encoder, ResNet22):
        return encoder.final_relu
    if isinstance(encoder, ConvEncoder):
        # A max-pool follows each residual block, so the last block is not the last stage
        return [stage for stage in encoder.stages if isinstance(stage, ResidualBlock)][-1]
    if isinstance(encoder, VggEncoder):
        return list(encoder.features.children())[-2]  # the last layer is a pooling
    raise SettingError(
        "Grad-CAM needs convolutional maps, and this network has none: of a ViT 'fedsilo "
        "attention' draws where it looked, of a table 'fedsilo explain' says what it can"
    )


def explain_by_occlusion(
    network: SiteNetwork,
    split: Split,
    row: int,
    title: str,
    classes: Sequence[str],
    compute: Compute,
) -> ImageExplanation:
    """Explain any network's prediction for one image by hiding parts of the image, in fp32.

    The map shows how much the probability of the predicted class drops when ``occlusion`` hides a
    part. The explanation has no beliefs or vacuity, even for an evidential network.

    Args:
        network: on the compute device; it is put in eval mode.
        split: the samples, whose labels are not read.
        row: the number of the image in ``split``, counted from 0.
        title: the title of the explanation, such as the name of the image.
        classes: the names of the classes.
        compute: the device.
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
    """Measure how much the probability of a class drops when a part of the image is hidden.

    The image is divided into up to 8 x 8 rectangles. One rectangle at a time is replaced by the
    image's mean colour. If the probability rises, the value of the rectangle is 0.

    Args:
        network: in eval mode.
        image: (1, channels, height, width), as the network takes it, on the network's device.
        label: the number of the class.

    Returns:
        The drop for each rectangle, (rows, columns), from 0 to 1, on the CPU.
    """
    from captum.attr import Occlusion

    # The window moves by its own size, so squares do not overlap and each pixel is hidden once
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
    """Return the length in pixels of the parts into which an image side is divided.

    It is the smallest length, at least 1, at which 8 parts or fewer cover the side. The last part
    may be cut off. ``side`` is the length of the image side in pixels.
    """
    # Ceiling division, so that the squares cover the whole image
    return -(-side // min(_SQUARES, side))
