"""What the references share: a network as a function of its weights, SGD, means.

A reference is a plain loop over rounds, sites and batches in float64. It knows nothing of fedsilo:
a ``Problem`` gives it the start, the sites and the batches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]  # the arrays of a model by name, float64
Batch = tuple[Tensor, Tensor]  # inputs (n, ...) and labels (n,)
Term = Callable[[Weights, Tensor, Tensor], Tensor]  # weights, inputs, labels -> a scalar


@dataclass
class Outcome:
    """What a method ends with: the model of all and each site's own, or empty."""

    shared: Weights = field(default_factory=dict)
    personal: dict[str, Weights] = field(default_factory=dict)


@dataclass
class Problem:
    """What a reference trains on.

    Attributes:
        network: maps inputs to logits; its weights are arguments, not its own.
        start: the initial weights of the network.
        first: all arrays that each site got in round 1, which methods may have more of.
        data: each site's training samples.
        validation: each site's validation samples.
        rate: the learning rate of the sites.
        rounds: their number.
        trainings: (round, site) -> the batches of each training in it, in order.
        order: round -> the sites in the order in which they trained.
        received: (round, site) -> the arrays of each message, for what is drawn at the server.
        discriminators: site -> the start of Fed-Align-CL's discriminator; empty without.
        targets: (round, site) -> for each batch the embeddings that it aligns to, by other site.
        own: the run's settings, by key without the group.
    """

    network: nn.Module
    start: Weights
    first: dict[str, Weights]
    data: dict[str, Batch]
    validation: dict[str, Batch]
    rate: float
    rounds: int
    trainings: Mapping[tuple[int, str], list[list[Batch]]]
    order: Mapping[int, list[str]]
    received: Mapping[tuple[int, str], list[Weights]]
    discriminators: Mapping[str, Weights]
    targets: Mapping[tuple[int, str], list[list[Tensor]]]
    own: Mapping[str, float]

    @property
    def sites(self) -> list[str]:
        """The names of the sites."""
        return list(self.data)

    @property
    def classes(self) -> int:
        """The number of classes, which are the last layer's outputs."""
        return len(self.start["head.0.bias"])

    def share(self, site: str) -> float:
        """Return the site's share of all training samples."""
        return len(self.data[site][1]) / sum(len(labels) for _, labels in self.data.values())

    def batches(self, number: int, site: str) -> list[Batch]:
        """Return the batches of a site's next training in this round; each can be had once."""
        return self.trainings[number, site].pop(0)

    def logits(self, weights: Weights, inputs: Tensor, training: bool = True) -> Tensor:
        """Return logits (n, classes). In training, running statistics in ``weights`` move."""
        self.network.train(training)
        return functional_call(self.network, weights, (inputs,))

    def features(self, weights: Weights, inputs: Tensor, training: bool = True) -> Tensor:
        """Return the tokens (n, l, c) before the head."""
        self.network.encoder.train(training)
        encoder = {
            n.removeprefix("encoder."): a for n, a in weights.items() if n.startswith("encoder.")
        }
        maps: Tensor = functional_call(self.network.encoder, encoder, (inputs,))
        return maps.flatten(2).transpose(1, 2)

    def head(self, weights: Weights, tokens: Tensor) -> Tensor:
        """Return logits (n, classes) of tokens (n, l, c): the network's one linear layer."""
        return tokens.flatten(1) @ weights["head.0.weight"].T + weights["head.0.bias"]

    def loss(self, weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return nn.functional.cross_entropy(self.logits(weights, inputs), labels)

    def sgd(
        self,
        weights: Weights,
        batches: Iterable[Batch],
        loss: Term | None = None,
        term: Term | None = None,
        only: Callable[[str], bool] = lambda _: True,
        rate: float | None = None,
    ) -> Weights:
        """Return the weights after a step of SGD a batch on ``loss`` plus ``term``."""
        rate = self.rate if rate is None else rate
        weights = copied(weights)
        for inputs, labels in batches:
            gradients = self.gradients(weights, inputs, labels, loss or self.loss, term)
            for name, gradient in gradients.items():
                if only(name):
                    weights[name] = weights[name] - rate * gradient
        return weights

    def gradients(
        self, weights: Weights, inputs: Tensor, labels: Tensor, loss: Term, term: Term | None = None
    ) -> Weights:
        """Return the gradient of ``loss`` plus ``term`` at all arrays that are no statistics."""
        leaves = {n: a for n, a in weights.items() if not is_statistic(n)}
        leaves = {n: a.detach().requires_grad_() for n, a in leaves.items()}
        whole = weights | leaves
        value = loss(whole, inputs, labels)
        if term is not None:
            value = value + term(whole, inputs, labels)
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {n: g for n, g in zip(leaves, found, strict=True) if g is not None}


def is_statistic(name: str) -> bool:
    """Tell whether an array is a batch norm's running mean or variance, which has no gradient."""
    return name.endswith(("running_mean", "running_var"))


def copied(weights: Weights) -> Weights:
    """Return a copy that shares no memory, since running statistics change in place."""
    return {name: array.detach().clone() for name, array in weights.items()}


def mean(models: Mapping[str, Weights], shares: Mapping[str, float]) -> Weights:
    """Return the mean of models with these weights, which are divided by their sum."""
    total = sum(shares[site] for site in models)
    names = next(iter(models.values()))
    return {n: sum(shares[s] / total * models[s][n] for s in models) for n in names}


def near(centre: Weights, pull: float) -> Term:
    """Return the term pull / 2 |w - centre|^2 of a loss."""

    def term(weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        return pull / 2 * distance(weights, centre)

    return term


def dot(one: Weights, other: Weights) -> Tensor:
    """Return the inner product over all arrays of ``one``."""
    return torch.stack([(one[n] * other[n]).sum() for n in one]).sum()


def distance(one: Weights, other: Weights) -> Tensor:
    """Return the squared distance over all arrays with a gradient."""
    trained = {n: one[n] - other[n] for n in one if not is_statistic(n)}
    return dot(trained, trained)
