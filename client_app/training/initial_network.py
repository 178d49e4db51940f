"""Build a run's initial network (the same weights at all sites) and the class weights."""

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
from fedsilo.models.tasks.task import Task


def initial_classifier(
    common: CommonSettings, silo: Silo, task: Task | None = None
) -> TokenClassifier:
    """Build the run's network with initial weights drawn from the run's seed.

    If the run has a pretrained backbone, its weights are loaded. If the run sets class weights, the
    loss uses them. In an evidential network, which estimates its own uncertainty, rare classes get
    a larger prior by the counts of the site's training labels. A private run sets no prior.

    Args:
        common: the run's common settings.
        silo: the site's data.
        task: the task, with the scale of a numeric outcome; None for the task in ``common``.

    Raises:
        SettingError: the backbone's weights are missing or belong to another architecture, or there
            is not one class weight for each class. The error also means that an evidential network
            has fewer than two classes or no training labels.
    """
    network = build_classifier(common, silo.shape, task)
    if common.backbone_weights or common.network == "vit":
        load_backbone(network, common)
    if common.class_weights != "none":
        network.criterion = weighted_criterion(common, silo)
    # No prior in private runs, because it depends on all patients' labels
    if network.evidence and not common.is_private():
        set_prior(network, silo.train.labels)
    return network


def weighted_criterion(common: CommonSettings, silo: Silo) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the class-weighted cross-entropy, as a function of (logits, labels).

    The weights come from 'train.class-weights', which must not be "none". For "balanced" they are
    computed from the class counts of the silo, a site's data.

    Raises:
        SettingError: 'train.class-weights' is "none", or does not list one weight for each class.
    """
    return partial(_weighted_loss, class_weights(common, silo))


def class_weights(common: CommonSettings, silo: Silo) -> Tensor:
    """Return the weight of each class in the loss, (classes,) float32.

    'train.class-weights' is a list of numbers, which are returned, or "balanced". The "balanced"
    weight of class k is n / (K n_k). Here n is the number of the site's training samples, n_k the
    number in class k, and K the number of classes with samples. The mean weight over the samples is
    then 1. A class without samples has weight 0.

    Raises:
        SettingError: 'train.class-weights' is "none", or does not list one weight for each class.
    """
    if common.class_weights == "balanced":
        counts = torch.bincount(silo.train.labels, minlength=silo.shape.outputs).double()
        # Dividing by the classes that have samples keeps the mean weight at 1
        balanced = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))
        return torch.where(counts > 0, balanced, 0.0).float()
    given, classes = _given_weights(common), silo.shape.outputs
    if len(given) != classes:
        raise SettingError(
            f"'train.class-weights' has {len(given)} weights for {classes} classes: give "
            f"one of each, {join_names(silo.class_names())}"
        )
    return torch.tensor(given)


def effective_samples(weights: Tensor) -> float:
    """Return Kish's effective sample size (sum w)^2 / sum w^2 for sample weights (n,).

    It is n for equal weights, near 1 if one sample dominates, and 0 if all weights are 0.
    """
    each = weights.double()
    return float((each.sum() ** 2 / (each**2).sum()).nan_to_num())


def refuse_small(batches: Sequence[Tensor], minimum: int, weights: Tensor | None) -> None:
    """Check that each optimiser step uses at least ``minimum`` different samples.

    A sample counts only if its weight is more than a hundredth of the largest weight in its batch.
    A gradient with a smaller weight hides hardly anything of the other samples' gradients.

    Args:
        batches: the sample indices of each step, one tensor (batch,) per step, in which an index
            may repeat; an empty list passes.
        minimum: the minimum number of samples.
        weights: the weight of each sample in the loss, (n,); None if all count the same.

    Raises:
        RefusedError: a step uses fewer samples. The error gives their number and ``minimum``.
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
    """Check that 'train.class-weights' is well formed, and that the loss is a cross-entropy.

    "none" always passes. Any other value must be "balanced", or numbers of at least 0 with a
    positive sum.

    Raises:
        SettingError: the value is malformed, or it is not "none" although the loss is evidential.
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
    """Return the mean over a batch of each sample's class weight times its cross-entropy.

    The mean divides by the number of samples, not by the sum of their weights. So a weight has an
    effect even in a batch of one sample.

    Args:
        weights: the weight of each class, (classes,).
        logits: the network's outputs (batch, classes).
        labels: classes (batch,).
    """
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses * weights.to(losses.device)[labels]).mean()


def set_prior(network: nn.Module, labels: Tensor) -> None:
    """Set an evidential network's prior from the class counts of training labels (n,).

    The prior is changed in place. The prior of a class falls linearly with its share of the labels
    (``skewed_prior``), so a class without labels gets the largest prior. A network that is not
    evidential is not changed.

    Raises:
        SettingError: the network is evidential, but there are fewer than two classes or no labels.
    """
    for evidence in evidences(network):
        counts = torch.bincount(labels, minlength=len(evidence.prior))
        evidence.prior.copy_(skewed_prior(counts))
