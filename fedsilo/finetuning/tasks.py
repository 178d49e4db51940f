"""The two tasks of fine-tuning: their data (pooled over sites), their training and metrics."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import in_batches, measure
from fedsilo.client_app.training.loop import LocalTraining, Objective
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.masked_images import load_masked_silo
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.datasets.silo.silos import SPLITS, Silo, Split
from fedsilo.finetuning.finetune_request import CLASSIFICATION, SEGMENTATION
from fedsilo.models.measures.segmentation_metrics import segmentation_metrics
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.build_segmentation import (
    build_segmentation,
    segmentation_loss,
)
from fedsilo.models.networks.segmentation.pyramids import Segmenter
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier
from fedsilo.runs.finished_run import select_sites

_MISSING = {
    "train": "no training images",
    "val": "no validation images, which are needed to choose the epoch: set 'split.val-folds'",
    "test": "no test images: set 'split.test-folds', or 'split.use-test' to true",
}


@dataclass(frozen=True)
class Pooled:
    """The images of all sites, one site after another, with labels (n,) or masks (n, h, w)."""

    train: Split
    val: Split
    test: Split
    shape: NetworkShape  # the shape of an image and the number of classes
    classes: tuple[str, ...]  # the names of the classes, or empty if they have none
    sites: tuple[str, ...]  # the names of the sites, in the order of their images
    origin: tuple[str, ...]  # the site of each test image

    def sizes(self) -> dict[str, int]:
        """Return the number of images in each split: train, val and test."""
        return {name: len(getattr(self, name)) for name in SPLITS}


def chosen_sites(settings: CommonSettings, wanted: Sequence[str]) -> list[str]:
    """Return the names of the sites to fine-tune on, in the order of the data set.

    If ``wanted`` is empty, the result has all sites of the data set.

    Raises:
        SettingError: the data set is a table, or a wanted site is unknown.
        DataError: the data set has no sites on this machine.
    """
    if data_set(settings.dataset).is_table:
        raise SettingError(
            f"fine-tuning needs images, but data set '{settings.dataset}' is a table: name another "
            "by --dataset"
        )
    sites = select_sites(silo_names(settings), wanted, f"data set '{settings.dataset}'")
    if not sites:
        raise DataError(f"data set '{settings.dataset}' has no sites on this machine")
    return sites


def read_labelled_images(settings: CommonSettings, sites: Sequence[str]) -> Pooled:
    """Read the images of the sites with their class labels, and pool them over the sites.

    The training, validation and test images are pooled separately.

    Raises:
        DataError: a split is empty at all sites, or the sites have images of different shapes or
            different classes.
    """
    silos = [load_silo(site, settings) for site in sites]
    # Pooled images share one network, so their shape and their classes must be equal
    kinds = {(silo.shape, silo.classes) for silo in silos}
    if len(kinds) > 1:
        raise DataError(f"sites {', '.join(sites)} have images or classes of different kinds")
    return _pool_silos(settings, silos)


def read_masked_images(settings: CommonSettings, sites: Sequence[str]) -> Pooled:
    """Read the images of the sites with their masks, and pool them over the sites.

    The training, validation and test images are pooled separately.

    Raises:
        DataError: in one of these cases:

            - A mask differs in size from its image, or has a value above 1.
            - The images of the sites have different shapes.
            - A split is empty at all sites.
            - The training masks are all empty, or the validation masks are.
    """
    silos = [load_masked_silo(site, settings) for site in sites]
    for silo in silos:
        for name, split in silo.splits().items():
            fault = _mask_fault(split)
            if fault:
                raise DataError(f"{settings.dataset}, site {silo.name}, {name}: {fault}")
    shapes = {silo.shape.input_shape for silo in silos}
    if len(shapes) > 1:
        sizes = ", ".join(map(str, sorted(shapes)))
        raise DataError(
            f"sites {', '.join(sites)} have images of different sizes ({sizes}): set "
            "'data.image-size'"
        )
    pooled = _pool_silos(settings, silos)
    # Test images without any catheter can still be measured. But training images without a catheter
    # teach nothing, and validation images without a catheter cannot choose an epoch by Dice
    for name in ("train", "val"):
        if not getattr(pooled, name).labels.any():
            raise DataError(
                f"all masks of the {name} images of {settings.dataset} are empty, so there is "
                "nothing to learn: take more images or other sites"
            )
    return pooled


def _mask_fault(split: Split) -> str:
    """Explain in a sentence why a split's masks do not fit its images; "" if they fit.

    For images (n, c, h, w), the masks must be (n, h, w), and no value may be above 1. The size of
    the images is not checked against other splits or sites.
    """
    images, masks = tuple(split.inputs.shape), tuple(split.labels.shape)
    if masks != (images[0], *images[2:]):
        return (
            f"a mask must have its image's size, but {images[0]} images are "
            f"{images[2]}x{images[3]} pixels and their masks {masks}: resize the masks"
        )
    if len(split) and split.labels.max() > 1:
        return (
            "a mask must be 0 on the background and 1 on the catheter, but has "
            f"{int(split.labels.max())}"
        )
    return ""


def _pool_silos(settings: CommonSettings, silos: Sequence[Silo]) -> Pooled:
    """Concatenate the images of several silos in order, separately for each split.

    The shape and the classes of the result are those of the first silo. The caller has checked that
    they are the same at all silos.

    Raises:
        DataError: a split is empty at all silos.
    """
    sites, pooled = tuple(silo.name for silo in silos), {}
    for name in SPLITS:
        inputs, labels = [], []
        for silo in silos:
            split = silo.splits()[name]
            inputs.append(split.inputs)
            labels.append(split.labels)
        pooled[name] = Split(torch.cat(inputs), torch.cat(labels))
        if not len(pooled[name]):
            raise DataError(f"{', '.join(sites)} of {settings.dataset}: {_MISSING[name]}")
    origin: list[str] = []
    for silo in silos:
        origin += [silo.name] * len(silo.test)
    shape, classes = silos[0].shape, silos[0].classes
    return Pooled(**pooled, shape=shape, classes=classes, sites=sites, origin=tuple(origin))


class Downstream:
    """A task of fine-tuning: its data, network, loss and metrics. This class is classification."""

    name = CLASSIFICATION
    data = staticmethod(read_labelled_images)  # reads the images of the sites
    headline = "accuracy"  # the metric whose validation value chooses the epoch
    shown: ClassVar = ("accuracy", "balanced-accuracy", "auc", "loss")  # the metrics of the table
    definitions: ClassVar = {  # metric -> its definition for finetune.json
        "training loss": "mean cross-entropy",
        "accuracy": "share of the images whose most probable class is the true one",
        "balanced-accuracy": "mean recall over the classes that occur",
        "auc": "mean AUC of each class against the rest; for two classes, that of the second",
        "loss": "mean negative log-likelihood, nats",
    }

    def __init__(self, network: str) -> None:
        self.network = network  # the name of the network, such as 'conv' or 'unet'

    def build(self, settings: CommonSettings, shape: NetworkShape) -> nn.Module:
        """Build the network for images and classes of ``shape``, initialised from 'seed'."""
        return build_classifier(settings, shape)

    def trunk(self, network: nn.Module) -> nn.Module:
        """Return the part of ``network`` whose arrays have the same names as in a run.

        For classification this is the whole network.
        """
        return network

    def objective(self, network: nn.Module) -> Objective:
        """Return the loss function of ``network``: (inputs, labels) of a batch -> scalar."""
        return cast(TokenClassifier, network).loss

    def measure_split(
        self, network: nn.Module, split: Split, settings: CommonSettings, compute: Compute
    ) -> dict[str, float]:
        """Measure a classifier on a split, and return its metrics as name -> value.

        The metrics include accuracy, balanced accuracy, AUC and loss, which the table of results
        shows. A metric that is undefined for the split's labels is missing, such as AUC with one
        class. If 'train.mc-passes' is above 0, predictions are the mean over this number of passes
        with dropout. Otherwise, dropout is off.
        """
        return measure(cast(SiteNetwork, network), split, settings, compute, ("finetune",))


class Segmentation(Downstream):
    """Segmentation of the catheter: each pixel is 0 for background or 1 for the catheter."""

    name = SEGMENTATION
    data = staticmethod(read_masked_images)
    headline = "dice"
    shown: ClassVar = ("dice", "jaccard", "miou", "dice-pooled")
    definitions: ClassVar = {
        "training loss": "mean cross-entropy plus soft Dice loss of the catheter over a batch",
        "dice": "2D Dice of the catheter, mean over images; an image without a catheter counts 0 "
        "if some is found in it, and is left out otherwise",
        "jaccard": "Jaccard (IoU) of the catheter, mean over the same images",
        "miou": "mean of the IoU of background and of catheter, each over all pixels of the split",
        "dice-pooled": "Dice of the catheter over all pixels of the split taken together",
        "loss": "the training loss in eval mode, mean over batches weighted by images",
    }

    def build(self, settings: CommonSettings, shape: NetworkShape) -> nn.Module:
        """Build the segmentation network for images of ``shape``, initialised from 'seed'."""
        return build_segmentation(self.network, settings, shape)

    def trunk(self, network: nn.Module) -> nn.Module:
        """Return the part of a segmentation network that can receive the arrays of a run.

        This part is the encoder, whose arrays have the same names as in a federated run. Only a
        network with such a part may be given.
        """
        trunk = cast(Segmenter, network).trunk()
        assert trunk is not None, (
            "choose_network gives no run's weights to a network without a trunk"
        )
        return trunk

    def objective(self, network: nn.Module) -> Objective:
        """Return the loss function of ``network``: (images, masks) of a batch -> scalar.

        The loss is the cross-entropy plus the soft Dice loss.
        """
        return lambda inputs, masks: segmentation_loss(network(inputs), masks)

    def measure_split(
        self, network: nn.Module, split: Split, settings: CommonSettings, compute: Compute
    ) -> dict[str, float]:
        """Measure a segmentation network on a split, and return its metrics as name -> value.

        ``dice``, ``jaccard``, ``dice-pooled`` and ``miou`` compare the most probable class of each
        pixel with the masks. ``loss`` is the mean training loss per image. Metrics that are
        undefined for the masks are missing. The network is put in eval mode. ``settings`` has no
        effect.
        """
        predicted, losses, start = list[Tensor](), list[float](), 0
        with torch.no_grad(), compute.autocast():
            for logits in _logits(network, split.inputs, compute):
                truth = compute.bring(split.labels[start : start + len(logits)])
                losses.append(segmentation_loss(logits, truth).item() * len(logits))
                predicted.append(logits.argmax(dim=1).cpu())
                start += len(logits)
        metrics = segmentation_metrics(torch.cat(predicted), split.labels)
        return metrics | {"loss": sum(losses) / len(split)}


@dataclass(frozen=True)
class Study:
    """Everything that is the same for all starting points."""

    downstream: Downstream  # the task, with the name of the network
    settings: CommonSettings  # the settings of data, network and training
    data: Pooled
    compute: Compute  # the device and precision
    seeds: int  # number of trainings for each starting point
    epochs: int  # epochs of each training
    distil_epochs: int = 0  # epochs of distillation from a run's ViT; 0 for none


@dataclass(frozen=True)
class TrainedSeed:
    """The outcome of training one starting point with one seed."""

    seed: int
    epoch: int  # the best epoch by the validation metric, counted from 1
    val: dict[str, float]  # validation metrics after the best epoch
    test: dict[str, float]  # test metrics after the best epoch
    curves: tuple[tuple[int, str, str, float], ...]  # (epoch, split, metric, value) of all epochs
    arrays: dict[str, Tensor]  # the network's arrays after the best epoch, on the CPU
    seconds: float  # the duration of training and measuring


def _logits(network: nn.Module, inputs: Tensor, compute: Compute) -> Iterator[Tensor]:
    """Yield the logits of each pixel for batches of at most 32 images.

    The network is put in eval mode. Gradients are computed unless the caller turns them off.

    Args:
        network: the network, on the compute device.
        inputs: the images (n, c, h, w), with the pixels that a site stores.
        compute: the device.

    Yields:
        Logits (b, classes, h, w), float32 on the device.
    """
    network.eval()
    for part in in_batches(inputs):
        # Smaller batches than elsewhere, because the inner maps are many times as large as an image
        for batch in torch.split(part, 32):
            yield network(float_inputs(compute.bring(batch))).float()


def predicted_masks(network: nn.Module, inputs: Tensor, compute: Compute) -> Tensor:
    """Predict the most probable class of each pixel.

    The network is put in eval mode. ``inputs`` are images (n, c, h, w), with the pixels that a site
    stores.

    Returns:
        The classes (n, h, w), int64 on the CPU.
    """
    classes = []
    with torch.no_grad(), compute.autocast():
        for logits in _logits(network, inputs, compute):
            classes.append(logits.argmax(1).cpu())
    return torch.cat(classes)


def cosine_epochs(
    network: nn.Module,
    objective: Objective,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    *,
    epochs: int,
    purpose: str,
) -> Iterator[float]:
    """Train ``network`` in place, and yield the mean loss after each epoch.

    An epoch is trained only when its loss is requested. The learning rate is constant within an
    epoch. It starts at 'train.learning-rate', and falls along a half cosine that would reach 0
    after the last epoch.

    Args:
        network: the network, on the compute device.
        objective: computes the loss of a batch.
        split: the training images.
        settings: the seed, the batch size and the optimiser.
        compute: the device and the precision.
        epochs: the number of epochs.
        purpose: a name of the training. It decides the random numbers, together with the seed and
            the epoch.
    """
    # One optimiser for all epochs, because each LocalTraining would otherwise restart the moments
    optimiser = open_optimiser(network, settings)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda epoch: 0.5 * (1 + math.cos(math.pi / epochs * epoch))
    )
    for epoch in range(epochs):
        yield LocalTraining(
            cast(SiteNetwork, network),
            split,
            settings,
            compute,
            (purpose, epoch),
            objective=objective,
            optimiser=optimiser,
        ).run()
        cosine.step()
