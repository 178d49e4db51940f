"""Where a prompted ViT looked, at the hospital that holds the images: maps over images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedsilo.client_app.explain.image_explanation import (
    ImageExplanation,
    SaliencyMap,
    explain_logits,
)
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.methods.fedevprompt import most_certain
from fedsilo.models.networks.prompted_vit import PromptedViT


def rollout_map(rollout: Tensor) -> SaliencyMap:
    """Return the map of a rollout (rows, columns) of patches, summing to 1."""
    (rows, columns), highest = rollout.shape, int(rollout.argmax())
    row, column = divmod(highest, columns)
    return SaliencyMap(
        name="rollout",
        values=rollout,
        heading="attention rollout",
        place=f"looked most at row {row + 1}, column {column + 1} of {rows} x {columns} patches",
        floor=float(
            rollout.min()
        ),  # every patch has a share: what counts is by how much it differs
    )


def explain_by_attention(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    row: int,
    title: str,
    classes: Sequence[str],
) -> ImageExplanation:
    """Return what ``network``, placed on the compute device, makes of one image of ``split``."""
    logits = _logits(network, split.inputs[row : row + 1], compute)
    return _explanations(network, split, compute, [row], [title], classes, logits)[0]


def most_certain_explanations(
    network: PromptedViT, split: Split, compute: Compute, classes: Sequence[str], count: int
) -> list[list[ImageExplanation]]:
    """Return, per class, explanations of up to ``count`` of its images, the most certain first.

    Certainty is by vacuity, of a network that is not evidential by the answer's probability. A
    title is the name of the image's class.
    """
    logits = _logits(network, split.inputs, compute)
    sure = logits.softmax(dim=1).max(dim=1).values
    uncertain = vacuity(logits.exp()) if network.evidence else 1 - sure
    by_class = []
    for label, name in enumerate(classes):
        rows = most_certain(uncertain, split.labels, label, count).tolist()
        titles = [name] * len(rows)
        by_class.append(
            _explanations(network, split, compute, rows, titles, classes, logits[rows])
            if rows
            else []
        )
    return by_class


def _logits(network: PromptedViT, inputs: Tensor, compute: Compute) -> Tensor:
    return over_batches(network, inputs, compute, lambda x: network.classify(network.encode(x)))


def _explanations(
    network: PromptedViT,
    split: Split,
    compute: Compute,
    rows: Sequence[int],
    titles: Sequence[str],
    classes: Sequence[str],
    logits: Tensor,
) -> list[ImageExplanation]:
    """Return an explanation per row of ``split``, by its logits (rows, classes)."""
    images, evidence = split.inputs[list(rows)], network.evidence
    maps = over_batches(network, images, compute, lambda x: network.encode_with_rollout(x)[1])
    return [
        explain_logits(
            title,
            image,
            rollout_map(rollout.reshape(network.grid_size())),
            classes,
            answer[None],
            evidence.prior if evidence else None,
        )
        for title, image, rollout, answer in zip(titles, images, maps, logits, strict=True)
    ]
