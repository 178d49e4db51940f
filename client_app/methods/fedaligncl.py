"""Fed-Align-CL at a site: local steps, alignment to the others' embeddings, curriculum, noise.

The site keeps its discriminator and that one's optimiser (``discriminator/``,
``discriminator-moments/``), which of its samples the local model got right at the end of an epoch
(``right``, ``right-epoch``), and pacing's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.adversarial_alignment import Aligner, embedded
from fedsilo.client_app.methods.base import Answer, SiteMethod
from fedsilo.client_app.privacy.noise_source import noise_source
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.loop import eager, micro_batches
from fedsilo.client_app.training.optimiser_state import moments_of, restore_moments
from fedsilo.client_app.training.pacing import Pacing, refuse_other_data
from fedsilo.models.contract.array_names import with_prefix
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import INCOMING, measurement
from fedsilo.models.contract.seeding import generator, seeded
from fedsilo.models.maths.pacing import batch_of, ends_epoch, epoch_of
from fedsilo.models.methods.fedaligncl import (
    DISCRIMINATOR,
    DISCRIMINATORS,
    EMBEDDINGS,
    Discriminator,
    EmbeddingNotes,
    FedAlignCLSettings,
    curriculum_order,
    curriculum_scores,
    perturbed,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.resnet22 import still_statistics
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier

_WEIGHTS, _MOMENTS = DISCRIMINATOR, "discriminator-moments/"
_RIGHT, _RIGHT_EPOCH = "right", "right-epoch"


class FedAlignCLSite(SiteMethod):
    """Receives global weights and the others' noisy embeddings, returns its own."""

    settings: FedAlignCLSettings

    def admit(self, session: SiteSession) -> None:
        """Require a hospital's consent before embeddings of single images leave it."""
        if self.settings.align:
            session.require_consent(
                "allow-embeddings",
                "the run sends embeddings, each of one training image, to all other sites; "
                "'fedaligncl.align' false goes without",
            )

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network and load the global weights."""
        foreign = (f"{EMBEDDINGS}/", DISCRIMINATORS)
        arrays = lab.arrays()
        return lab.classifier({n: a for n, a in arrays.items() if not n.startswith(foreign)})

    def train(self, lab: Lab) -> Answer:
        """Train in the curriculum's order, and align after each step where others sent any."""
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        if lab.instruction.round == 1 and self.settings.pretraining_epochs:
            self._pretrain(lab, network)
        aligner = self._open_aligner(lab, network)
        order = partial(self._curriculum, lab, network)
        lab.fit(network, order=order, after_step=aligner)
        keep = self._kept(lab, network, aligner)
        return lab.reply(network, keep=keep, send=self._outgoing(lab, network, aligner))

    def _pretrain(self, lab: Lab, network: TokenClassifier) -> None:
        """Train the network alone on the site's own data, by an optimiser of its own."""
        settings, count = lab.sampling, len(lab.silo.train)
        steps, size = settings.epoch_steps, batch_of(count, settings)

        def batches(epoch: int) -> list[Tensor]:
            rng = generator(settings.seed, "pretraining-order", epoch, lab.site)
            return Pacing(epoch, 0, torch.randperm(count, generator=rng), steps, size).batches()

        plan = map(batches, range(self.settings.pretraining_epochs))
        lab.fit(network, plan=plan, aside=("pretraining",))

    def _curriculum(self, lab: Lab, network: SiteNetwork, epoch: int) -> Tensor | None:
        """Return the curriculum's order (eq. 4), None while it has nothing to be based on.

        The reply will say how many samples the global model has forgotten.
        """
        stored = lab.state()
        right_epoch = stored.get(_RIGHT_EPOCH)
        # It missed the end of the epoch before
        if right_epoch is None or int(right_epoch) != epoch - 1:
            return None
        local_right, global_right = stored[_RIGHT].bool(), _right(lab, network)
        refuse_other_data(len(local_right), len(global_right))
        forgotten = (local_right & ~global_right).double().mean().item()
        lab.metrics[measurement(INCOMING, "train", "forgotten")] = forgotten
        if not self.settings.curriculum or epoch < self.settings.warmup_epochs:
            return None
        scores = curriculum_scores(local_right, global_right, self.settings.forgotten_weight)
        rng = generator(lab.sampling.seed, "curriculum", epoch, lab.site)
        return curriculum_order(scores, rng, self.settings.curriculum_sampling == "replacement")

    def _open_aligner(self, lab: Lab, network: TokenClassifier) -> Aligner | None:
        """Return the alignment of a batch, where alignment is on and others have sent any."""
        epoch = epoch_of(lab.instruction.round, lab.common)
        if not self.settings.align or epoch < self.settings.warmup_epochs:
            return None
        others = _others(lab, network.channels)
        if not others:
            return None
        discriminator = _open_discriminator(lab, network.channels)
        rivals = sorted(others) if self.settings.align_target == "others" else []
        return Aligner(
            network=network,
            discriminator=discriminator,
            discriminator_optimiser=self._open_optimiser(lab, discriminator),
            others={site: lab.compute.bring(array) for site, array in others.items()},
            weight=self.settings.alignment_weight,
            micro_batch=lab.common.micro_batch,
            compute=lab.compute,
            rng=generator(lab.sampling.seed, "others", lab.instruction.round, lab.site),
            rivals=[_rival(lab, network.channels, site) for site in rivals],
            noised=self._target_noise(lab) if self.settings.noise_variance else None,
        )

    def _target_noise(self, lab: Lab) -> Callable[[Tensor], Tensor]:
        """Return Z of eq. 3: what embeddings (n, c) would leave with, their gradient as it is."""
        rng = generator(lab.sampling.seed, "alignment-noise", lab.instruction.round, lab.site)

        def noised(own: Tensor) -> Tensor:
            noisy = perturbed({EMBEDDINGS: own}, {EMBEDDINGS}, self.settings, rng)[EMBEDDINGS]
            return own + (noisy.to(own.device) - own.detach())

        return noised

    def _outgoing(
        self, lab: Lab, network: TokenClassifier, aligner: Aligner | None
    ) -> dict[str, Tensor]:
        """Return noisy weights and, where they are asked for, noisy embeddings."""
        arrays = exchanged_arrays(network)
        noisy = {name for name, _ in network.named_parameters()} & arrays.keys()
        if count := self._embeddings_asked(lab):
            arrays[EMBEDDINGS] = self._embeddings(lab, network, count)
            noisy.add(EMBEDDINGS)
            if self.settings.align_target == "others":  # what they align to, at first the seed's
                newest = aligner.discriminator if aligner else None
                newest = newest or _open_discriminator(lab, network.channels)
                own = {f"{DISCRIMINATOR}{n}": a.cpu() for n, a in newest.state_dict().items()}
                arrays |= own
                noisy |= own.keys()
        key = ("perturbation", lab.instruction.round, lab.instruction.step, lab.site)
        rng = noise_source(lab.session.simulated, lab.common.seed, *key)
        return perturbed(arrays, noisy, self.settings, rng)

    def _kept(
        self, lab: Lab, network: TokenClassifier, aligner: Aligner | None
    ) -> dict[str, Tensor]:
        """Return the discriminator, and at an epoch's end what the local model gets right."""
        if aligner is None:
            stored = lab.state()
            kept = {n: a for n, a in stored.items() if n.startswith((_WEIGHTS, _MOMENTS))}
        else:
            discriminator = aligner.discriminator
            moments = moments_of(aligner.discriminator_optimiser, discriminator)
            kept = with_prefix(_WEIGHTS, discriminator.state_dict())
            kept |= with_prefix(_MOMENTS, moments)
        round_ = lab.instruction.round
        epoch = epoch_of(round_, lab.common)
        ordered = self.settings.curriculum and epoch + 1 >= self.settings.warmup_epochs
        if ends_epoch(round_, lab.common) and (ordered or self.settings.count_forgotten):
            kept[_RIGHT] = _right(lab, network).to(torch.uint8)
            kept[_RIGHT_EPOCH] = torch.tensor(epoch)
        return kept

    def _embeddings_asked(self, lab: Lab) -> int:
        """Return how many embeddings leave: what is asked for, if the run's settings have it so."""
        asked = EmbeddingNotes.from_values(lab.instruction.notes).embeddings
        used = epoch_of(lab.instruction.round + 1, lab.common)
        if not self.settings.align or used < self.settings.warmup_epochs:
            return 0
        return max(0, min(asked, self.settings.shared_embeddings))

    def _embeddings(self, lab: Lab, network: TokenClassifier, count: int) -> Tensor:
        """Return the embeddings (count, c) of any training samples, made as in training.

        In eval mode batch norm would scale them otherwise than the ones they are compared with,
        and a discriminator would tell the two modes apart, not the sites.
        """
        inputs = lab.silo.train.inputs
        fresh = self.settings.embedding_draw == "round"
        key = (lab.instruction.round, lab.site) if fresh else (lab.site,)
        rng = generator(lab.sampling.seed, "shared-embeddings", *key)
        chosen = torch.randperm(len(inputs), generator=rng)[:count]
        network.train()
        embeddings = []
        with torch.no_grad(), still_statistics(network), lab.compute.autocast():
            size = batch_of(len(inputs), lab.common)
            for part in micro_batches(len(chosen), min(size, lab.common.micro_batch or size)):
                batch = lab.compute.bring(inputs[chosen[part]])
                embeddings.append(embedded(network, float_inputs(batch)).cpu())
        return torch.cat(embeddings)

    def _open_optimiser(self, lab: Lab, discriminator: Discriminator) -> Optimizer:
        """Return Adam over the discriminator, as it was left."""
        rate = self.settings.discriminator_learning_rate or lab.common.learning_rate
        optimiser = eager(torch.optim.Adam)(discriminator.parameters(), lr=rate)
        restore_moments(optimiser, discriminator, lab.state(_MOMENTS))
        return optimiser


def _right(lab: Lab, network: SiteNetwork) -> Tensor:
    """Return (n,) bool: which training samples the network gets right, in eval mode."""
    train = lab.silo.train
    logits = over_batches(network, train.inputs, lab.compute, network)
    return logits.argmax(dim=1) == train.labels


def _others(lab: Lab, width: int) -> dict[str, Tensor]:
    """Return the others' noisy embeddings (m, width) by site.

    Raises:
        SiteError: they are not embeddings of this network, or the site's own came back.
    """
    others = dict(sorted(lab.arrays(f"{EMBEDDINGS}/").items()))
    for site, array in others.items():
        if site == lab.site:
            raise SiteError("its own embeddings came back: server and site differ in version")
        if array.ndim != 2 or array.shape[1] != width or not array.isfinite().all():
            raise SiteError(
                f"the embeddings of site {site} are {tuple(array.shape)}; they must be "
                f"(any, {width}) and finite: all sites need the same 'network' and "
                "'width'"
            )
    return others


def _rival(lab: Lab, width: int, site: str) -> Discriminator:
    """Return the discriminator of another site, which this one aligns to.

    Raises:
        SiteError: it is missing or is none for embeddings of this ``width``.
    """
    arrays = lab.arrays(f"{DISCRIMINATORS}{site}/")
    discriminator = Discriminator(width)
    wanted = {name: array.shape for name, array in discriminator.state_dict().items()}
    finite = all(array.isfinite().all() for array in arrays.values())
    if {name: array.shape for name, array in arrays.items()} != wanted or not finite:
        raise SiteError(
            f"the discriminator of site {site} is none of embeddings of {width} numbers: all "
            "sites need the same 'network' and 'width'"
        )
    discriminator.load_state_dict(arrays)
    return discriminator.to(lab.compute.device)


def _open_discriminator(lab: Lab, width: int) -> Discriminator:
    """Return the site's discriminator as it was left; at first the seed's."""
    with seeded(lab.common.seed, "discriminator", lab.site):
        discriminator = Discriminator(width)
    if weights := lab.state(_WEIGHTS):
        discriminator.load_state_dict(weights)
    return discriminator.to(lab.compute.device)
