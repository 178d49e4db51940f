"""Explain a prompted ViT's predictions by attention rollouts over a hospital's images."""

from collections.abc import Sequence

from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.image_explanation import (
    ImageExplanation,
    SaliencyMap,
    explain_logits,
)
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import most_certain
from fedsilo.models.networks.prompted_vit import PromptedViT


def rollout_map(rollout: Tensor) -> SaliencyMap:
    """Return the saliency map of a rollout (rows, columns) over patches, which sums to 1."""
    rows, columns = rollout.shape
    row, column = divmod(int(rollout.argmax()), columns)
    return SaliencyMap(
        name="rollout",
        values=rollout,
        heading="attention rollout",
        place=f"looked most at row {row + 1}, column {column + 1} of {rows} x {columns} patches",
        # Softmax gives every patch some attention, so only the excess over the minimum counts
        floor=float(rollout.min()),
    )


def explain_by_attention(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    row: int,
    title: str,
    classes: Sequence[str],
) -> ImageExplanation:
    """Explain a prediction for one image of ``split`` by its attention rollout.

    ``network`` must be on the compute device.
    """
    logits = over_batches(network, split.inputs[row : row + 1], compute, network)
    return _explanations(network, split, compute, [row], title, classes, logits)[0]


def most_certain_explanations(
    network: PromptedViT, split: Split, compute: Compute, classes: Sequence[str], count: int
) -> list[list[ImageExplanation]]:
    """Explain, for each class, up to ``count`` of its images, the most certain ones first.

    An evidential network is certain where vacuity is low, any other where its largest probability
    is high. The title of an explanation is the name of the image's class.

    Returns:
        A list for each class, in the order of ``classes``; empty for a class without images.
    """
    logits = over_batches(network, split.inputs, compute, network)
    confidence = logits.softmax(dim=1).max(dim=1).values
    uncertain = 1 - confidence
    if network.evidence:
        uncertain = vacuity(logits.exp())
    by_class = []
    for label, name in enumerate(classes):
        rows = most_certain(uncertain, split.labels, label, count).tolist()
        found = _explanations(network, split, compute, rows, name, classes, logits[rows])
        by_class.append(found)
    return by_class


def _explanations(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    rows: Sequence[int],
    title: str,
    classes: Sequence[str],
    logits: Tensor,
) -> list[ImageExplanation]:
    """Explain the given rows of ``split``; ``logits`` (rows, classes) are their outputs."""
    if not rows:
        return []
    images = split.inputs[list(rows)]
    prior = network.evidence.prior if network.evidence else None
    maps = over_batches(network, images, compute, lambda x: network.encode_with_rollout(x)[1])
    explanations = []
    for image, rollout, answer in zip(images, maps, logits, strict=True):
        saliency = rollout_map(rollout.reshape(network.grid_size()))
        explained = explain_logits(title, image, saliency, classes, answer[None], prior)
        explanations.append(explained)
    return explanations
