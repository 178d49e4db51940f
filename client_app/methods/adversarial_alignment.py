"""Adversarial alignment within a site's training step (Fed-Align-CL, algorithm 1, eq. 2 and 3).

The site stores its discriminator (``discriminator/``) and the moments of the discriminator's
optimiser (``discriminator-moments/``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.methods.base import Lab, TokenClassifier
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import micro_batches
from fedsilo.client_app.training.optimisers import eager, moments_of, restore_moments
from fedsilo.core.array_names import with_prefix
from fedsilo.core.errors import SiteError
from fedsilo.core.seeding import generator, seed_generators
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.methods.fedaligncl import (
    DISCRIMINATOR,
    DISCRIMINATORS,
    EMBEDDINGS,
    Discriminator,
    FedAlignCLSettings,
    add_noise,
    alignment_loss,
    discriminator_loss,
    load_discriminator,
    paired_alignment_loss,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.resnet22 import still_statistics

_MOMENTS = "discriminator-moments/"


def mean_embeddings(network: TokenClassifier, inputs: Tensor) -> Tensor:
    """Map inputs (batch, *input_shape) to embeddings (batch, c), means over a sample's tokens."""
    return network.encode(inputs).mean(dim=1).float()


@dataclass
class Aligner:
    """Aligns this site's embeddings with the other sites', after each step on the task's loss.

    It takes one step of the discriminator D against each other site, then one step of the feature
    extractor F. Algorithm 1 takes a step of F for each other site. Because a site has a single
    discriminator, all of these would go the same way. One step on the newest D costs two passes per
    batch for any number of sites.
    """

    network: TokenClassifier  # must be in training mode
    discriminator: Discriminator  # the site's own
    discriminator_optimiser: Optimizer  # steps only the discriminator
    others: Mapping[str, Tensor]  # site -> noisy embeddings (m, c), on the compute device
    weight: float  # the factor of the alignment loss
    micro_batch: int  # the number of samples computed at once; 0 for all
    compute: Compute  # the device and the precision
    rng: torch.Generator  # draws the others' embeddings that a step uses
    # The others' discriminators, on the device; empty to use the complement of the site's own
    rivals: Sequence[Discriminator] = ()
    # Adds the same noise as to embeddings (n, c) that leave; None if they leave without noise
    noised: Callable[[Tensor], Tensor] | None = None

    def __call__(self, inputs: Tensor, optimiser: Optimizer) -> None:
        """Align this site's embeddings with the others' after a training step, on the same batch.

        First the discriminator takes one step against each other site. Then the network takes one
        more step, which makes its embeddings harder to tell from the others'
        (``_add_alignment_gradients``). Batch norm's running statistics do not change here. With
        'train.micro-batch', the batch is computed in parts.

        Args:
            inputs: the batch (batch, *input_shape), as the data set holds it.
            optimiser: the network's optimiser. Parameters that get no gradient here, such as the
                head's, do not change.
        """
        parts = micro_batches(len(inputs), self.micro_batch)
        optimiser.zero_grad(set_to_none=True)
        # The step before has seen this batch, and batch norm must not count it twice
        with still_statistics(self.network):
            if len(parts) == 1:
                own = self._mean_embeddings(inputs)
                self._train_discriminator(own.detach())
                self._add_alignment_gradients(own, 1.0)
            else:  # only one part's graph is in memory at a time
                with torch.no_grad():
                    known = torch.cat([self._mean_embeddings(inputs[part]) for part in parts])
                self._train_discriminator(known)
                for part in parts:
                    share = (part.stop - part.start) / len(inputs)
                    self._add_alignment_gradients(self._mean_embeddings(inputs[part]), share)
        optimiser.step()

    def kept(self) -> dict[str, Tensor]:
        """Return the arrays to store at the site: the discriminator and its optimiser's moments."""
        moments = moments_of(self.discriminator_optimiser, self.discriminator)
        weights = with_prefix(DISCRIMINATOR, self.discriminator.state_dict())
        return weights | with_prefix(_MOMENTS, moments)

    def _mean_embeddings(self, inputs: Tensor) -> Tensor:
        with self.compute.autocast():
            return mean_embeddings(self.network, float_inputs(inputs))

    def _train_discriminator(self, own: Tensor) -> None:
        """Train this site's discriminator by one step for each other site, sorted by name (eq. 2).

        Such a step teaches the discriminator to tell this site's embeddings from those of one other
        site. The step uses as many of that site's embeddings as ``own`` has, drawn at random
        without replacement. If there are fewer, it uses all of them.

        Args:
            own: this batch's embeddings (batch, c).
        """
        for site in sorted(self.others):
            other = self.others[site]
            # Drawn from the m other embeddings, as many as the batch has, so that D sees both sites
            # equally
            chosen = torch.randperm(len(other), generator=self.rng)[: len(own)]
            self.discriminator_optimiser.zero_grad(set_to_none=True)
            other = other[chosen.to(other.device)]
            loss = discriminator_loss(self.discriminator, own, other)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
            self.discriminator_optimiser.step()

    def _add_alignment_gradients(self, own: Tensor, share: float) -> None:
        """Add the gradients of the alignment loss to the network's gradients (eq. 3).

        The loss teaches the network embeddings whose site cannot be told. D is this site's
        discriminator, which tells this site's embeddings from others, and D' is another site's.

        - With received D', the loss is -E log D(own) minus the mean of E log D'(sent) over the
          other sites. ``sent`` is ``own`` with the noise that leaving embeddings get.
        - Without received D', the loss is -E log D(own) - E log(1 - D(own)).

        The loss is multiplied by ``share`` and by the weight of alignment.

        Args:
            own: the embeddings (n, c) of a part of the batch.
            share: the part's share of the batch, 0 to 1, so that the losses of all parts add up to
                the batch's mean.
        """
        if self.rivals:
            sent = own
            if self.noised:
                sent = self.noised(own)
            loss = paired_alignment_loss(self.discriminator, self.rivals, own, sent)
        else:
            loss = alignment_loss(self.discriminator, own)
        loss = self.weight * share * loss
        loss.backward()  # type: ignore[no-untyped-call]


def open_aligner(
    lab: Lab, network: TokenClassifier, settings: FedAlignCLSettings
) -> Aligner | None:
    """Build the object that makes this site's embeddings like the other sites' in one message.

    It uses the embeddings that the other sites have sent, and this site's discriminator, a small
    network that learns to tell this site's embeddings from others. With 'fedaligncl.align-target'
    "others", the other sites' received discriminators are loaded too. The result is None if the
    settings align nothing in this round's epoch, or if no other site's embeddings were received.

    Raises:
        SiteError: received embeddings have a width other than the network's or are not finite, this
            site's own embeddings came back, or the arrays of a received discriminator do not fit.
    """
    round_, width = lab.instruction.round, network.channels
    if not settings.aligns(epoch_of(round_, lab.common)):
        return None
    others = _received_embeddings(lab, width)
    if not others:
        return None
    rivals = []
    if settings.align_target == "others":
        for site in others:
            rival = load_discriminator(lab.arrays(f"{DISCRIMINATORS}{site}/"), width, site)
            rivals.append(rival.to(lab.compute.device))
    discriminator = open_discriminator(lab, width)
    parameters, rate = discriminator.parameters(), lab.common.learning_rate
    optimiser = eager(torch.optim.Adam)(parameters, lr=rate)
    restore_moments(optimiser, discriminator, lab.state(_MOMENTS))
    noised = None
    if settings.noise_variance:
        rng = generator(lab.sampling.seed, "alignment-noise", round_, lab.site)
        noised = partial(add_noise, settings=settings, rng=rng)
    return Aligner(
        network=network,
        discriminator=discriminator,
        discriminator_optimiser=optimiser,  # continues with the restored moments
        others={site: lab.compute.bring(array) for site, array in others.items()},
        weight=settings.alignment_weight,
        micro_batch=lab.common.micro_batch,
        compute=lab.compute,
        rng=generator(lab.sampling.seed, "others", round_, lab.site),
        rivals=rivals,
        noised=noised,
    )


def open_discriminator(lab: Lab, width: int) -> Discriminator:
    """Build the site's discriminator, on the compute device, for embeddings of shape (n, width).

    A discriminator is a small network that tells this site's embeddings from the other sites'. It
    has the stored weights. If none are stored, its weights are drawn from the run's seed and the
    site's name.
    """
    with seed_generators(lab.common.seed, "discriminator", lab.site):
        discriminator = Discriminator(width)
    weights = lab.state(DISCRIMINATOR)
    if weights:
        discriminator.load_state_dict(weights)
    return discriminator.to(lab.compute.device)


def kept_discriminator(lab: Lab) -> dict[str, Tensor]:
    """Return the arrays that the site has stored of its discriminator, to store them again.

    A discriminator is a small network that tells this site's embeddings from other sites'. The
    arrays are its weights (``discriminator/``) and its optimiser's moments
    (``discriminator-moments/``), under these names. A round that does not train the discriminator
    stores them unchanged. The result is empty if none are stored.
    """
    kept = (DISCRIMINATOR, _MOMENTS)
    return {name: array for name, array in lab.state().items() if name.startswith(kept)}


def _received_embeddings(lab: Lab, width: int) -> dict[str, Tensor]:
    """Read the embeddings that the other sites have sent, and check them.

    All sites' embeddings must have the same ``width``.

    Returns:
        Site -> embeddings (m, width), sorted by site; empty if none were received.

    Raises:
        SiteError: an array has another width or is not finite, or this site's own embeddings came
            back.
    """
    others = dict(sorted(lab.arrays(f"{EMBEDDINGS}/").items()))
    for site, array in others.items():
        if site == lab.site:
            raise SiteError("its own embeddings came back: server and site differ in version")
        if array.ndim != 2 or array.shape[1] != width or not array.isfinite().all():
            raise SiteError(
                f"the embeddings of site {site} are {tuple(array.shape)}; they must be "
                f"(any, {width}) and finite: all sites need the same 'network.name' and "
                "'network.width'"
            )
    return others
