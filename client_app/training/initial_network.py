"""The network with which a run starts, as one site opens it: the same weights at all sites."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedsilo.client_app.training.optimisers import SMALLEST_PART
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.one_line import join_names, quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.models.maths.dirichlet import skewed_prior
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import TokenClassifier, evidences


def initial_classifier(common: CommonSettings, silo: Silo) -> TokenClassifier:
    """Build the network with the seed's weights, the backbone's weights and the site's prior.

    Raises:
        SettingError: the backbone's weights are missing or belong to another architecture.
    """
    network = build_classifier(common, silo.task)
    if common.backbone_weights or common.network == "vit":
        load_backbone(network, common)
    if common.class_weights != "none":
        network.criterion = weighted_criterion(common, silo)
    # No prior in private runs, because it depends on all patients' labels
    if network.evidence and not common.is_private():
        set_prior(network, silo.train.labels)
    return network


def weighted_criterion(common: CommonSettings, silo: Silo) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the cross-entropy with 'train.class-weights' for the silo's training samples."""
    return partial(_weighted_loss, class_weights(common, silo))


def class_weights(common: CommonSettings, silo: Silo) -> Tensor:
    """Return the weight of each class, (classes,).

    Balanced weights are n / (K n_k), where n_k of the site's n training samples have class k, and K
    classes have samples; their mean over the samples is 1. A class without samples has weight 0.

    Raises:
        SettingError: the run gives another number of weights.
    """
    if common.class_weights == "balanced":
        counts = torch.bincount(silo.train.labels, minlength=silo.task.classes).double()
        # Dividing by the classes that have samples keeps the mean weight at 1
        balanced = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))
        return torch.where(counts > 0, balanced, 0.0).float()
    given = _given_weights(common)
    if len(given) != silo.task.classes:
        raise SettingError(
            f"'train.class-weights' has {len(given)} weights for {silo.task.classes} classes: give "
            f"one of each, {join_names(silo.class_names())}"
        )
    return torch.tensor(given)


def effective_samples(weights: Tensor) -> float:
    """Return the effective sample size of samples with ``weights`` (n,).

    It is Kish's (sum w)^2 / sum w^2; 0 if all weights are 0.
    """
    each = weights.double()
    return float((each.sum() ** 2 / (each**2).sum()).nan_to_num())


def refuse_small(batches: Sequence[Tensor], minimum: int, weights: Tensor | None) -> None:
    """Refuse steps on fewer than ``minimum`` different samples.

    A sample counts only if its weight is more than a hundredth of the largest in its batch, because
    a smaller one hides no other sample's gradient. Without ``weights`` (n,) every sample counts.

    Raises:
        RefusedError: names the number of samples.
    """
    sizes = []
    for batch in batches:
        different = torch.unique(batch)
        if weights is None:
            sizes.append(len(different))
            continue
        each = weights[different].tolist()
        sizes.append(sum(one > SMALLEST_PART * max(each) for one in each))
    smallest = min(sizes, default=minimum)
    if smallest < minimum:
        raise RefusedError(
            f"an optimiser step would rest on {smallest} samples, but at least {minimum} are "
            "needed ('minimum-batch'): ask for larger batches or for 'train.class-weights' closer "
            "to one another, or leave the site out"
        )


def _given_weights(common: CommonSettings) -> list[float]:
    try:
        return [float(text) for text in common.class_weights.strip("[]").split(",")]
    except ValueError:
        return []


def check_class_weights(common: CommonSettings) -> None:
    """Refuse malformed class weights, and class weights with an evidential loss.

    Raises:
        SettingError: names the rule.
    """
    if common.class_weights == "none":
        return
    if common.loss == "evidential" or (common.loss == "auto" and common.network == "vit"):
        raise SettingError(
            "'train.class-weights' are for the cross-entropy, but the loss is evidential: set "
            "'train.loss' to 'cross-entropy', or 'train.class-weights' to 'none'"
        )
    given = _given_weights(common)
    usable = all(math.isfinite(weight) and weight >= 0 for weight in given) and sum(given) > 0
    if common.class_weights != "balanced" and not usable:
        raise SettingError(
            f"setting 'train.class-weights' is {quote_value(common.class_weights)}; it must be "
            "none, balanced, or a number of at least 0 for each class, such as 0.2,0.8"
        )


def _weighted_loss(weights: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over a batch of each sample's weight times its cross-entropy.

    It is divided by the number of samples, not by their weights. So a weight counts even in a batch
    of one, and the losses of a batch's parts add up to the loss of the batch.
    """
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * weights.to(losses.device)[labels]).mean()


def set_prior(network: nn.Module, labels: Tensor) -> None:
    """Set an evidential network's prior from its training labels ``labels`` (n,)."""
    for evidence in evidences(network):
        counts = torch.bincount(labels, minlength=len(evidence.prior))
        evidence.prior.copy_(skewed_prior(counts))
