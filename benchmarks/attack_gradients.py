"""What the gradient of an image, or of a batch, gives back: used by ``attack_maps.py``."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedsilo.core.seeding import generator
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.measures.classification_metrics import roc_auc
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.prompted_vit import PromptedViT

VARIATIONS = (0.001, 0.01, 0.1, 1.0)  # weights of total variation
_COORDINATES = 20_000  # of a gradient, that are compared
BATCH = 16


def recognised(known: Tensor, candidates: Tensor, rows: Tensor) -> Tensor:
    """Tell (n,) for which of ``known`` the nearest candidate is its own, which ``rows`` names."""
    nearest = torch.cdist(known.flatten(1).double(), candidates.flatten(1).double()).argmin(dim=1)
    return nearest == rows


def gradient_of(network: PromptedViT, image: Tensor, label: Tensor, graph: bool) -> list[Tensor]:
    """Return the loss's gradient of one image (1, c, h, w), -1 to 1, by every trained parameter."""
    tokens, _ = network.encode_with_rollout(image)  # fused attention has no second derivative
    loss = network.criterion(network.classify(tokens), label)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, trained, create_graph=graph, allow_unused=True)
    return [part for part in found if part is not None]


def cosine_distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return 1 - cos of two gradients, each taken as one vector."""
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (first, second))
    return 1 - (one @ other) / (one.norm() * other.norm()).clamp_min(1e-20)


def inverted(
    network: PromptedViT,
    image: Tensor,
    label: Tensor,
    start: Tensor,
    steps: int,
    variation: float = VARIATIONS[0],
) -> Tensor:
    """Return an image (1, c, h, w), -1 to 1, of which the gradient points as that of ``image``.

    It is sought from ``start``, with ``variation`` times its total variation in the loss.
    """
    known = [part.detach() for part in gradient_of(network, image, label, graph=False)]
    sought = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([sought], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        distance = cosine_distance(gradient_of(network, sought, label, graph=True), known)
        rough = sought.diff(dim=2).abs().mean() + sought.diff(dim=3).abs().mean()
        (sought.grad,) = torch.autograd.grad(distance + variation * rough, sought)
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            sought.clamp_(-1, 1)
    return sought.detach()


def one_image(split: Split, row: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return an image (1, c, h, w), -1 to 1, and its label (1,)."""
    return float_inputs(split.inputs[row][None]), split.labels[row][None]


def chosen_variation(network: PromptedViT, own: Split, start: Tensor, steps: int) -> float:
    """Return the weight of total variation that is best for two of the attacker's images."""
    images = [one_image(own, row) for row in range(2)]

    def quality(weight: float) -> float:
        found = [inverted(network, x, y, start, steps, weight) for x, y in images]
        known = torch.cat([x for x, _ in images])
        return -(known - torch.cat(found)).square().flatten(1).mean(dim=1).log().mean().item()

    return max(VARIATIONS, key=quality)


def parts(gradient: Sequence[Tensor]) -> Tensor:
    """Return up to ``_COORDINATES`` of a gradient's numbers, the same of each gradient."""
    flat = torch.cat([part.flatten() for part in gradient])
    order = torch.randperm(len(flat), generator=generator(0, "attack-coordinates"))
    return flat[order[:_COORDINATES]].detach()


def gradients(network: PromptedViT, split: Split) -> Tensor:
    """Return the gradients (n, numbers) of images one by one."""
    each = (one_image(split, row) for row in range(len(split)))
    return torch.stack([parts(gradient_of(network, x, y, graph=False)) for x, y in each])


def in_batch(mean: Tensor, known: Tensor, rows: Tensor) -> Tensor:
    """Tell (n,) which of the batch's ``rows`` are among the n that least squares finds.

    ``mean`` (numbers,) is the batch's gradient, ``known`` (candidates, numbers) one of each image.
    """
    one, each = mean.double(), known.double()
    lengths = each.norm(dim=1, keepdim=True).clamp_min(1e-20)
    each = each / lengths
    gram = each @ each.T + 1e-9 * torch.eye(len(each), dtype=each.dtype)
    shares = torch.linalg.solve(gram, each @ one) / lengths[:, 0]
    return torch.isin(rows, shares.topk(len(rows)).indices)


def member_auc(each: Tensor, update: Tensor, count: int) -> Tensor:
    """Return how well the ``count`` first are told from the others: they oppose the update. An AUC.

    ``each`` is (images, numbers), ``update`` (numbers,), what training added to the parameters.
    """
    against = -(each @ update) / each.norm(dim=1).clamp_min(1e-20)
    return roc_auc(against, torch.arange(len(each)) < count)


def by_archive(
    network: PromptedViT, train: Split, rows: Tensor, count: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield which of the ``rows`` are recognised: ``count`` one by one, then a batch."""
    known = gradients(network, train)
    yield "one image: nearest gradient", recognised(known[rows[:count]], known, rows[:count])
    inputs, labels = float_inputs(train.inputs[rows[:BATCH]]), train.labels[rows[:BATCH]]
    mean = parts(gradient_of(network, inputs, labels, graph=False))
    yield f"{len(labels)} images: least squares", in_batch(mean, known, rows[:BATCH])
