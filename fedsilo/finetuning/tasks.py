"""The two tasks of fine-tuning: their data, pooled over sites, their training and metrics."""

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
from fedsilo.models.networks.kinds import Task
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
    """Images of all sites, in site order, with labels (n,) or masks (n, h, w)."""

    train: Split
    val: Split
    test: Split
    task: Task  # input shape and number of classes
    classes: tuple[str, ...]  # their names, or empty if they have none
    sites: tuple[str, ...]
    origin: tuple[str, ...]  # the site of each test image

    def sizes(self) -> dict[str, int]:
        """Return the number of images by split."""
        return {name: len(getattr(self, name)) for name in SPLITS}


def chosen_sites(settings: CommonSettings, wanted: Sequence[str]) -> list[str]:
    """Return the sites of the data set, or only those ``wanted``.

    Raises:
        SettingError: the data are a table, or there is no such site.
        DataError: no site is on this machine.
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


def pooled_labels(settings: CommonSettings, sites: Sequence[str]) -> Pooled:
    """Read the images of the sites with their classes.

    Raises:
        DataError: a split has no images, or the sites' images or classes differ.
    """
    silos = [load_silo(site, settings) for site in sites]
    kinds = {(silo.task, silo.classes) for silo in silos}
    if len(kinds) > 1:
        raise DataError(f"sites {', '.join(sites)} have images or classes of different kinds")
    return _pool(settings, silos)


def pooled_masks(settings: CommonSettings, sites: Sequence[str]) -> Pooled:
    """Read the images of the sites with their masks.

    Raises:
        DataError: a split has no images; no training or validation image has a mask; a mask has
            another size than its image, or other values than 0 and 1; or the sites' images have
            different sizes.
    """
    silos = [load_masked_silo(site, settings) for site in sites]
    for silo in silos:
        for name, split in silo.splits().items():
            fault = _mask_fault(split)
            if fault:
                raise DataError(f"{settings.dataset}, site {silo.name}, {name}: {fault}")
    shapes = {silo.task.input_shape for silo in silos}
    if len(shapes) > 1:
        sizes = ", ".join(map(str, sorted(shapes)))
        raise DataError(
            f"sites {', '.join(sites)} have images of different sizes ({sizes}): set "
            "'data.image-size'"
        )
    pooled = _pool(settings, silos)
    # Test images may all be without a catheter, but a network cannot learn or be chosen so
    for name in ("train", "val"):
        if not getattr(pooled, name).labels.any():
            raise DataError(
                f"no {name} image of {settings.dataset} has a mask that is not empty: there is "
                "nothing to learn; take more images or other sites"
            )
    return pooled


def _mask_fault(split: Split) -> str:
    """Say what is wrong with the masks (n, h, w) of images (n, c, h, w); empty if nothing is."""
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


def _pool(settings: CommonSettings, silos: Sequence[Silo]) -> Pooled:
    """Pool the data of silos with the same task and classes, in the order of the silos."""
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
    task, classes = silos[0].task, silos[0].classes
    return Pooled(**pooled, task=task, classes=classes, sites=sites, origin=tuple(origin))


class Downstream:
    """A task of fine-tuning with one kind of network; this class is classification."""

    name = CLASSIFICATION
    data = staticmethod(pooled_labels)
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
        self.network = network

    def build(self, settings: CommonSettings, task: Task) -> nn.Module:
        """Return the network, initialised by the seed."""
        return build_classifier(settings, task)

    def trunk(self, network: nn.Module) -> nn.Module:
        """Return the part of ``network`` whose arrays have the same names as a run's."""
        return network

    def objective(self, network: nn.Module) -> Objective:
        """Return the function that computes the loss of a batch."""
        return cast(TokenClassifier, network).loss

    def measure_split(
        self, network: nn.Module, split: Split, settings: CommonSettings, compute: Compute
    ) -> dict[str, float]:
        """Measure the metrics on a split, including ``loss``, without dropout."""
        return measure(cast(SiteNetwork, network), split, settings, compute, ("finetune",))


class Segmentation(Downstream):
    """A network of ``fedsilo.models.networks.segmentation.build_segmentation``."""

    name = SEGMENTATION
    data = staticmethod(pooled_masks)
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

    def build(self, settings: CommonSettings, task: Task) -> nn.Module:
        """Return the network."""
        return build_segmentation(self.network, settings, task)

    def trunk(self, network: nn.Module) -> nn.Module:
        """Return the encoder, which a run can have trained."""
        trunk = cast(Segmenter, network).trunk()
        assert trunk is not None, "network_of gives no run's weights to a network without a trunk"
        return trunk

    def objective(self, network: nn.Module) -> Objective:
        """Return the function that computes cross-entropy plus soft Dice of a batch."""
        return lambda inputs, masks: segmentation_loss(network(inputs), masks)

    def measure_split(
        self, network: nn.Module, split: Split, settings: CommonSettings, compute: Compute
    ) -> dict[str, float]:
        """Measure ``loss`` and the metrics of ``segmentation_metrics`` on a split."""
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
    """Everything that is the same for all starts."""

    downstream: Downstream
    settings: CommonSettings
    data: Pooled
    compute: Compute
    seeds: int
    epochs: int
    distil_epochs: int = 0


@dataclass(frozen=True)
class TrainedSeed:
    """The outcome of one seed."""

    seed: int
    epoch: int  # the one with the best validation metric, from 1
    val: dict[str, float]  # metrics of that epoch
    test: dict[str, float]
    curves: tuple[tuple[int, str, str, float], ...]  # (epoch, split, metric, value) of all epochs
    arrays: dict[str, Tensor]  # the network's after that epoch, on the CPU
    seconds: float


def _logits(network: nn.Module, inputs: Tensor, compute: Compute) -> Iterator[Tensor]:
    """Yield the logits of at most 32 images at a time, in eval mode."""
    network.eval()
    for part in in_batches(inputs):
        # Smaller batches than elsewhere, because the inner maps are many times as large as an image
        for batch in torch.split(part, 32):
            yield network(float_inputs(compute.bring(batch))).float()


def predicted_masks(network: nn.Module, inputs: Tensor, compute: Compute) -> Tensor:
    """Predict the class of each pixel of images (n, c, h, w): (n, h, w) int64 on the CPU."""
    with torch.no_grad(), compute.autocast():
        classes = [logits.argmax(1).cpu() for logits in _logits(network, inputs, compute)]
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
    """Train ``network`` in place and yield the mean loss of each epoch.

    The learning rate falls from the settings' to 0 over ``epochs``. ``purpose`` keys the order of
    the batches, which differs from that of other trainings with the same seed.
    """
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
