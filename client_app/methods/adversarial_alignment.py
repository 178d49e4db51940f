"""Adversarial alignment within a site's training step (Fed-Align-CL, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import micro_batches
from fedsilo.models.methods.fedaligncl import (
    Discriminator,
    alignment_loss,
    discriminator_loss,
    paired_alignment_loss,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.resnet22 import still_statistics
from fedsilo.models.networks.site_network import TokenClassifier


def embedded(network: TokenClassifier, inputs: Tensor) -> Tensor:
    """Map inputs (batch, *input_shape) to embeddings (batch, c): the mean of the tokens."""
    return network.encode(inputs).mean(dim=1).float()


@dataclass
class Aligner:
    """After each step on the classification loss: a step of D per other site, one of F.

    Algorithm 1 takes a step of F per other site; since a site has one discriminator all of them
    would go the same way, and one on the newest D costs two passes a batch however many sites
    there are.

    Attributes:
        network: in training mode.
        discriminator: the site's own.
        discriminator_optimiser: of the discriminator.
        others: site -> noisy embeddings (m, c), on the device.
        weight: factor of the alignment loss.
        micro_batch: samples computed at once; 0: all.
        compute: device and precision.
        rng: draws the others' embeddings that a step sees.
        rivals: the others' discriminators, on the device; none: the complement of the site's own.
        noised: adds to embeddings (n, c) what they would leave with; None: nothing.
    """

    network: TokenClassifier
    discriminator: Discriminator
    discriminator_optimiser: Optimizer
    others: Mapping[str, Tensor]
    weight: float
    micro_batch: int
    compute: Compute
    rng: torch.Generator
    rivals: Sequence[Discriminator] = ()
    noised: Callable[[Tensor], Tensor] | None = None

    def __call__(self, inputs: Tensor, optimiser: Optimizer) -> None:
        """Take the steps for a batch of inputs (batch, *input_shape) as the data set holds them.

        ``optimiser`` is the network's; parameters without a gradient stay as they are.
        """
        parts = micro_batches(len(inputs), self.micro_batch)
        optimiser.zero_grad(set_to_none=True)
        # The batch was seen in the step before: batch norm is not to count it twice
        with still_statistics(self.network):
            if len(parts) == 1:
                own = self._embed(inputs)
                self._teach(own.detach())
                self._confuse(own, 1.0)
            else:  # a graph a part at a time, so that memory stays a part's
                with torch.no_grad():
                    known = torch.cat([self._embed(inputs[part]) for part in parts])
                self._teach(known)
                for part in parts:
                    share = (part.stop - part.start) / len(inputs)
                    self._confuse(self._embed(inputs[part]), share)
        optimiser.step()

    def _embed(self, inputs: Tensor) -> Tensor:
        with self.compute.autocast():
            return embedded(self.network, float_inputs(inputs))

    def _teach(self, own: Tensor) -> None:
        """Take a step of the discriminator against each other site (eq. 2)."""
        for site in sorted(self.others):
            other = self.others[site]
            chosen = torch.randperm(len(other), generator=self.rng)[: len(own)]
            self.discriminator_optimiser.zero_grad(set_to_none=True)
            other = other[chosen.to(other.device)]
            loss = discriminator_loss(self.discriminator, own, other)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
            self.discriminator_optimiser.step()

    def _confuse(self, own: Tensor, share: float) -> None:
        """Add the alignment loss's gradients to the feature extractor's (eq. 3)."""
        if self.rivals:
            sent = self.noised(own) if self.noised else own
            loss = paired_alignment_loss(self.discriminator, self.rivals, own, sent)
        else:
            loss = alignment_loss(self.discriminator, own)
        loss = self.weight * share * loss
        loss.backward()  # type: ignore[no-untyped-call]
