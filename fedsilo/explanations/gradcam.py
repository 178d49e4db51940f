"""Explain convolutional networks by Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2)."""

from collections.abc import Sequence

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


def cam_map(cam: Tensor, label: int, classes: Sequence[str]) -> SaliencyMap:
    """Return the saliency map of class ``label`` from its Grad-CAM (rows, columns)."""
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
    """Explain a prediction for one image of ``split`` by Grad-CAM.

    Args:
        network: on the compute device.
        split: the samples.
        compute: the device.
        row: the number of the image in ``split``.
        title: names the image.
        classes: the names of the classes.
        label: the class to explain; None for the most probable one.

    Raises:
        SettingError: the network has no convolutional maps, or mixes several networks.
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
    """Compute the Grad-CAM maps (batch, rows, columns) of class ``label``, on the CPU.

    If the network takes several views of an image, the maps of the views are averaged.

    Args:
        network: put in eval mode.
        inputs: (batch, channels, height, width), as networks take them, on the network's device.
        label: the class.

    Raises:
        SettingError: the network has no convolutional maps, mixes several networks, or its last
            maps have a single cell.
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
            f"of images of {height}x{width} pixels the network's last maps have a single cell, so "
            "that Grad-CAM has no place to show: train at a larger 'data.image-size' (resnet22: 76 "
            "or more)"
        )
    # Views are stacked along the batch, so the maps are regrouped by view
    views = maps[:, 0].detach().float().cpu()
    return views.reshape(network.views, -1, *views.shape[1:]).mean(dim=0)


def has_maps(network: SiteNetwork) -> bool:
    """Tell whether Grad-CAM can explain a network: a single, convolutional one."""
    try:
        last_maps(network)
    except SettingError:
        return False
    return True


def last_maps(network: SiteNetwork) -> nn.Module:
    """Return the layer whose output is a convolutional network's last maps, before any pooling.

    Raises:
        SettingError: the network has no such maps, or mixes several networks.
    """
    encoder = single_classifier(network).encoder
    if isinstance(encoder, ResNet22):
        return encoder.final_relu
    if isinstance(encoder, ConvEncoder):
        return [stage for stage in encoder.stages if isinstance(stage, ResidualBlock)][-1]
    if isinstance(encoder, VggEncoder):
        return list(encoder.features.children())[-2]  # the last layer is a pooling
    raise SettingError(
        "Grad-CAM needs convolutional maps, and this network has none: of a ViT 'fedsilo "
        "attention' draws where it looked, of a table 'fedsilo explain' says what it can"
    )
