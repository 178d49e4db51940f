"""The two tasks of fine-tuning: how each builds, trains and measures a network."""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import in_batches, measure
from fedsilo.client_app.training.loop import Objective, train_locally
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.measures.segmentation_metrics import segmentation_metrics
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.segmentation.build import build_segmentation, segmentation_loss
from fedsilo.models.networks.segmentation.pyramids import Segmenter
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier
from fedsilo.server_app.studies.finetune.data import Pooled, pooled_labels, pooled_masks
from fedsilo.server_app.studies.finetune.request import CLASSIFICATION, SEGMENTATION


class Downstream:
    """A task of fine-tuning, here classification, for the network of that name."""

    name = CLASSIFICATION
    headline = "accuracy"  # the metric whose validation value chooses the epoch
    shown: ClassVar = ("accuracy", "balanced-accuracy", "auc", "loss")  # the metrics of the table
    definitions: ClassVar = {  # what is measured and minimised
        "training loss": "mean cross-entropy",
        "accuracy": "share of the images whose most probable class is theirs",
        "balanced-accuracy": "mean recall over the classes that occur",
        "auc": "mean AUC of each class against the rest; for two classes, that of the second",
        "loss": "mean negative log-likelihood, nats",
    }

    def __init__(self, network: str) -> None:
        self.network = network

    def data(self, settings: CommonSettings, sites: Sequence[str]) -> Pooled:
        """Return the pooled data of ``sites``, or raise a ``DataError``."""
        return pooled_labels(settings, sites)

    def build(self, settings: CommonSettings, task: Task) -> nn.Module:
        """Return the network, initialised by the seed."""
        return build_classifier(settings, task)

    def trunk(self, network: nn.Module) -> nn.Module:
        """Return the part of ``network`` whose arrays have the same names as a run's."""
        return network

    def objective(self, network: nn.Module) -> Objective:
        """Return the loss of a batch."""
        return cast(TokenClassifier, network).loss

    def measured(
        self, network: nn.Module, split: Split, settings: CommonSettings, compute: Compute
    ) -> dict[str, float]:
        """Return the metrics of a split, ``loss`` among them; without dropout."""
        return measure(cast(SiteNetwork, network), split, settings, compute, ("finetune",))


class Segmentation(Downstream):
    """A network of ``models.networks.segmentation.build``."""

    name = SEGMENTATION
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

    def data(self, settings: CommonSettings, sites: Sequence[str]) -> Pooled:
        """Return images and masks."""
        return pooled_masks(settings, sites)

    def build(self, settings: CommonSettings, task: Task) -> nn.Module:
        """Return the network."""
        return build_segmentation(self.network, settings, task)

    def trunk(self, network: nn.Module) -> nn.Module:
        """Return the encoder, which a run can have trained."""
        trunk = cast(Segmenter, network).trunk()
        assert trunk is not None, "network_of gives no run's weights to a network without a trunk"
        return trunk

    def objective(self, network: nn.Module) -> Objective:
        """Return cross-entropy plus soft Dice."""
        return lambda inputs, masks: segmentation_loss(network(inputs), masks)

    def measured(
        self, network: nn.Module, split: Split, settings: CommonSettings, compute: Compute
    ) -> dict[str, float]:
        """Return Dice and its like (see ``segmentation_metrics``)."""
        predicted, losses, start = list[Tensor](), list[float](), 0
        with torch.no_grad(), compute.autocast():
            for logits in _logits(network, split.inputs, compute):
                truth = compute.bring(split.labels[start : start + len(logits)])
                losses.append(segmentation_loss(logits, truth).item() * len(logits))
                predicted.append(logits.argmax(dim=1).cpu())
                start += len(logits)
        metrics = segmentation_metrics(torch.cat(predicted), split.labels)
        return metrics | {"loss": sum(losses) / len(split)}


def _logits(network: nn.Module, inputs: Tensor, compute: Compute) -> Iterator[Tensor]:
    """Yield the logits of a few images at a time, in eval mode."""
    network.eval()
    for part in in_batches(inputs):
        for batch in torch.split(part, 32):  # the inner maps are many times the size of an image
            yield network(float_inputs(compute.bring(batch))).float()


def predicted_masks(network: nn.Module, inputs: Tensor, compute: Compute) -> Tensor:
    """Return the class of each pixel of images (n, c, h, w): (n, h, w) int64 on the CPU."""
    with torch.no_grad(), compute.autocast():
        return torch.cat([part.argmax(1).cpu() for part in _logits(network, inputs, compute)])


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
        yield train_locally(
            cast(SiteNetwork, network),  # beside the objective only its parameters are used
            split,
            settings,
            compute,
            (purpose, epoch),
            objective=objective,
            optimiser=optimiser,
        )
        cosine.step()
