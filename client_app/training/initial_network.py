"""The network that a run starts from, as one site opens it: the same weights everywhere."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.optimisers import SMALLEST_PART
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.models.contract.errors import RefusedError, SettingError
from fedsilo.models.contract.one_line import listed, shown
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import evidences, skewed_prior
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import TokenClassifier


def initial_classifier(common: CommonSettings, silo: Silo) -> TokenClassifier:
    """Return the network with the seed's initial weights, the backbone's and the site's prior.

    Raises:
        SettingError: the backbone's weights are missing or of another architecture.
    """
    network = build_classifier(common, silo.task)
    if common.backbone_weights or common.network == "vit":
        load_backbone(network, common)
    if common.class_weights != "none":
        network.criterion = weighted_criterion(common, silo)
    if network.evidence and not common.is_private():  # a prior is made of all patients' labels
        set_prior(network, silo.train.labels)
    return network


def weighted_criterion(common: CommonSettings, silo: Silo) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the cross-entropy by 'class-weights' on the silo's training samples."""
    return partial(_weighted_loss, class_weights(common, silo))


def class_weights(common: CommonSettings, silo: Silo) -> Tensor:
    """Return the weight of each class (classes,).

    Balanced are n / (K n_k), n of the site's n training samples being of class k, and K classes
    there: their mean over the samples is 1. A class without samples has 0.

    Raises:
        SettingError: the run gives another number of weights.
    """
    if common.class_weights == "balanced":
        counts = torch.bincount(silo.train.labels, minlength=silo.task.classes).double()
        balanced = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))
        return torch.where(counts > 0, balanced, 0.0).float()
    given = _given_weights(common)
    if len(given) != silo.task.classes:
        raise SettingError(
            f"'class-weights' has {len(given)} weights for {silo.task.classes} classes: give one "
            f"of each, {listed(silo.class_names())}"
        )
    return torch.tensor(given)


def effective_samples(weights: Tensor) -> float:
    """Return how many samples of equal weights those of ``weights`` (n,) are worth.

    It is Kish's effective sample size, (sum w)^2 / sum w^2; 0 where no sample has a weight.
    """
    each = weights.double()
    return float((each.sum() ** 2 / (each**2).sum()).nan_to_num())


def refuse_small(batches: Sequence[Tensor], minimum: int, weights: Tensor | None) -> None:
    """Refuse steps of fewer than ``minimum`` different samples, as their ``weights`` count them.

    A sample below a hundredth of its batch's heaviest hides no other and does not count.
    """
    sizes = []
    for batch in batches:
        different = torch.unique(batch)
        each = [1.0] * len(different) if weights is None else weights[different].tolist()
        sizes.append(sum(one > SMALLEST_PART * max(each) for one in each))
    if (smallest := min(sizes, default=minimum)) < minimum:
        raise RefusedError(
            f"{smallest} samples would be behind an optimiser step, and at least {minimum} must "
            "be ('minimum-batch'): ask for larger batches or for 'class-weights' closer to one "
            "another, or leave the site out"
        )


def _given_weights(common: CommonSettings) -> list[float]:
    try:
        return [float(text) for text in common.class_weights.strip("[]").split(",")]
    except ValueError:
        return []


def check_class_weights(common: CommonSettings) -> None:
    """Refuse weights that are none, and those of an evidential loss.

    Raises:
        SettingError: says what they must be.
    """
    if common.class_weights == "none":
        return
    if common.loss == "evidential" or (common.loss == "auto" and common.network == "vit"):
        raise SettingError(
            "'class-weights' are of the cross-entropy, and the loss is evidential: set 'loss' to "
            "'cross-entropy', or 'class-weights' to 'none'"
        )
    given = _given_weights(common)
    usable = all(math.isfinite(weight) and weight >= 0 for weight in given) and sum(given) > 0
    if common.class_weights != "balanced" and not usable:
        raise SettingError(
            f"setting 'class-weights' is {shown(common.class_weights)}; it must be none, balanced, "
            "or a number of at least 0 for each class, such as 0.2,0.8"
        )


def _weighted_loss(weights: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over a batch of each sample's weight times its cross-entropy.

    It is divided by the samples, not by their weights: a weight counts in a batch of one too, and
    the parts of a batch, or the gradients of its samples, add up to its own.
    """
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * weights.to(losses.device)[labels]).mean()


def set_prior(network: nn.Module, labels: Tensor) -> None:
    """Give an evidential network the prior of ``labels`` (n,), what it is trained on."""
    for evidence in evidences(network):
        counts = torch.bincount(labels, minlength=len(evidence.prior))
        evidence.prior.copy_(skewed_prior(counts))
