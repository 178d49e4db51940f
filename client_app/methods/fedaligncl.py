"""Fed-Align-CL at a site: local steps, alignment to the others' embeddings, curriculum, noise.

The site keeps its discriminator and that one's optimiser (``discriminator/``,
``discriminator-moments/``), which of its samples the local model got right at the end of an epoch
(``right``, ``right-epoch``), and pacing's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.methods.adversarial_alignment import Aligner, embedded
from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.privacy.noise_source import noise_source
from fedsilo.client_app.training.eager_optimisers import eager
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.loop import LocalTraining, micro_batches, train_locally
from fedsilo.client_app.training.optimiser_state import moments_of, restore_moments
from fedsilo.client_app.training.pacing import Pacing, refuse_other_data, shuffled
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
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.resnet22 import still_statistics
from fedsilo.models.networks.site_network import SiteNetwork

_WEIGHTS, _MOMENTS = DISCRIMINATOR, "discriminator-moments/"
_RIGHT, _RIGHT_EPOCH = "right", "right-epoch"


class FedAlignCLSite(FedAvgSite):
    """Receives global weights and the others' noisy embeddings, returns its own."""

    settings: FedAlignCLSettings
    _aligner: Aligner | None = None

    @classmethod
    def consent(cls, settings: FedAlignCLSettings) -> tuple[str, str] | None:
        """Ask a hospital before embeddings of single images leave it."""
        if not settings.align:
            return None
        return (
            "allow-embeddings",
            "the run sends embeddings, each of one training image, to all other sites; "
            "'fedaligncl.align' "
            "false goes without",
        )

    def open_network(self) -> SiteNetwork:
        """Build the network and load the global weights."""
        foreign = (f"{EMBEDDINGS}/", DISCRIMINATORS)
        arrays = self.request.arrays()
        return self.classifier({n: a for n, a in arrays.items() if not n.startswith(foreign)})

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train in the curriculum's order, and align after each step where others sent any."""
        training = super().local_training(network)
        count, settings, site = len(training.split), training.settings, self.silo.name
        if self.request.instruction.round == 1 and self.settings.pretraining_epochs:
            self._pretrain(training)

        def order(epoch: int) -> Tensor:
            curriculum = self._curriculum(network, epoch, training.metrics)
            return shuffled(count, settings, epoch, site) if curriculum is None else curriculum

        self._aligner = self._open_aligner(cast(TokenClassifier, network))
        training = replace(training, epoch_order=order)
        return replace(training, after_step=self._aligner) if self._aligner else training

    def _pretrain(self, training: LocalTraining) -> None:
        """Train the network alone on the site's own data; its optimiser begins anew afterwards."""
        count, settings, site = len(training.split), training.settings, self.silo.name
        steps, size = settings.epoch_steps, batch_of(count, settings)

        def batches(epoch: int) -> list[Tensor]:
            rng = generator(settings.seed, "pretraining-order", epoch, site)
            return Pacing(epoch, 0, torch.randperm(count, generator=rng), steps, size).batches()

        plan = map(batches, range(self.settings.pretraining_epochs))
        train_locally(replace(training, plan=plan, key=(*training.key, "pretraining")))

    def _curriculum(
        self, network: SiteNetwork, epoch: int, metrics: dict[str, float]
    ) -> Tensor | None:
        """Return the curriculum's order (eq. 4), None while it has nothing to go by.

        ``metrics`` is told how many samples the global model has forgotten.
        """
        stored = self.own_state()
        right_epoch = stored.get(_RIGHT_EPOCH)
        # It missed the end of the epoch before
        if right_epoch is None or int(right_epoch) != epoch - 1:
            return None
        local_right, global_right = stored[_RIGHT].bool(), self._right(network)
        refuse_other_data(len(local_right), len(global_right))
        forgotten = (local_right & ~global_right).double().mean().item()
        metrics[measurement(INCOMING, "train", "forgotten")] = forgotten
        if not self.settings.curriculum or epoch < self.settings.warmup_epochs:
            return None
        scores = curriculum_scores(local_right, global_right, self.settings.forgotten_weight)
        rng = generator(self.drawing.seed, "curriculum", epoch, self.silo.name)
        return curriculum_order(scores, rng, self.settings.curriculum_sampling == "replacement")

    def _open_aligner(self, module: TokenClassifier) -> Aligner | None:
        """Return the alignment of a batch, where alignment is on and others have sent any."""
        if not self._aligns():
            return None
        others = self._others(module.channels)
        if not others:
            return None
        discriminator = self._open_discriminator(module.channels)
        return Aligner(
            network=module,
            discriminator=discriminator,
            discriminator_optimiser=self._open_optimiser(discriminator),
            others={site: self.compute.bring(array) for site, array in others.items()},
            weight=self.settings.alignment_weight,
            micro_batch=self.common.micro_batch,
            compute=self.compute,
            rng=generator(self.drawing.seed, "others", *self._key()),
            rivals=self._rivals(module.channels, sorted(others)),
            noised=self._target_noise() if self.settings.noise_variance else None,
        )

    def _target_noise(self) -> Callable[[Tensor], Tensor]:
        """Return Z of eq. 3: what embeddings (n, c) would leave with, their gradient as it is."""
        rng = generator(self.drawing.seed, "alignment-noise", *self._key())

        def noised(own: Tensor) -> Tensor:
            noisy = perturbed({EMBEDDINGS: own}, {EMBEDDINGS}, self.settings, rng)[EMBEDDINGS]
            return own + (noisy.to(own.device) - own.detach())

        return noised

    def _rivals(self, width: int, sites: list[str]) -> list[Discriminator]:
        """Return the discriminators of the other sites, where the run aligns to them.

        Raises:
            SiteError: one is missing or is none for embeddings of this ``width``.
        """
        if self.settings.align_target != "others":
            return []
        return [self._rival(width, site) for site in sites]

    def _rival(self, width: int, site: str) -> Discriminator:
        arrays = self.request.arrays(f"{DISCRIMINATORS}{site}/")
        discriminator = Discriminator(width)
        wanted = {name: array.shape for name, array in discriminator.state_dict().items()}
        finite = all(array.isfinite().all() for array in arrays.values())
        if {name: array.shape for name, array in arrays.items()} != wanted or not finite:
            raise SiteError(
                f"the discriminator of site {site} is none of embeddings of {width} numbers: all "
                "sites need the same 'network' and 'width'"
            )
        discriminator.load_state_dict(arrays)
        return discriminator.to(self.compute.device)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return noisy weights and, where they are asked for, noisy embeddings."""
        module = cast(TokenClassifier, network)
        arrays = exchanged_arrays(module)
        noisy = {name for name, _ in module.named_parameters()} & arrays.keys()
        if count := self._asked():
            arrays[EMBEDDINGS] = self._embeddings(module, count)
            own = self._own_discriminator(module.channels)
            arrays |= own
            noisy |= {EMBEDDINGS, *own}
        instruction = self.request.instruction
        key = ("perturbation", instruction.round, instruction.step, self.silo.name)
        rng = noise_source(self.request, self.common.seed, *key)
        return perturbed(arrays, noisy, self.settings, rng)

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the discriminator, and at an epoch's end what the local model gets right."""
        stored = self._discriminator_state()
        round_ = self.request.instruction.round
        if self._counts() and ends_epoch(round_, self.common):
            stored[_RIGHT] = self._right(network).to(torch.uint8)
            stored[_RIGHT_EPOCH] = torch.tensor(epoch_of(round_, self.common))
        return stored

    def _own_discriminator(self, width: int) -> dict[str, Tensor]:
        """Return what other sites align to, the seed's before there was anything to learn."""
        if self.settings.align_target != "others":
            return {}
        newest = self._aligner.discriminator if self._aligner else self._open_discriminator(width)
        return {f"{DISCRIMINATOR}{n}": a.cpu() for n, a in newest.state_dict().items()}

    def _key(self) -> tuple[int, str]:
        return self.request.instruction.round, self.silo.name

    def _discriminator_state(self) -> dict[str, Tensor]:
        if self._aligner is None:
            return {n: a for n, a in self.own_state().items() if n.startswith((_WEIGHTS, _MOMENTS))}
        discriminator = self._aligner.discriminator
        moments = moments_of(self._aligner.discriminator_optimiser, discriminator)
        weights = {f"{_WEIGHTS}{n}": a for n, a in discriminator.state_dict().items()}
        return weights | {f"{_MOMENTS}{n}": a for n, a in moments.items()}

    def _aligns(self) -> bool:
        epoch = epoch_of(self.request.instruction.round, self.common)
        return self.settings.align and epoch >= self.settings.warmup_epochs

    def _asked(self) -> int:
        """Return how many embeddings leave: what is asked for, if the run's settings have it so."""
        asked = EmbeddingNotes.from_values(self.request.instruction.notes).embeddings
        used = epoch_of(self.request.instruction.round + 1, self.common)
        if not self.settings.align or used < self.settings.warmup_epochs:
            return 0
        return max(0, min(asked, self.settings.shared_embeddings))

    def _counts(self) -> bool:
        """Tell whether the next epoch asks which samples were right."""
        epoch = epoch_of(self.request.instruction.round, self.common) + 1
        wanted = self.settings.curriculum and epoch >= self.settings.warmup_epochs
        return wanted or self.settings.count_forgotten

    def _right(self, network: SiteNetwork) -> Tensor:
        """Return (n,) bool: which training samples the network gets right, in eval mode."""
        train, module = self.silo.train, network
        logits = over_batches(network, train.inputs, self.compute, module)
        return logits.argmax(dim=1) == train.labels

    def _embeddings(self, module: TokenClassifier, count: int) -> Tensor:
        """Return the embeddings (count, c) of any training samples, made as in training.

        In eval mode batch norm would scale them otherwise than the ones they are compared with,
        and a discriminator would tell the two modes apart, not the sites.
        """
        inputs = self.silo.train.inputs
        fresh = self.settings.embedding_draw == "round"
        key = self._key() if fresh else (self.silo.name,)
        rng = generator(self.drawing.seed, "shared-embeddings", *key)
        chosen = torch.randperm(len(inputs), generator=rng)[:count]
        module.train()
        embeddings = []
        with torch.no_grad(), still_statistics(module), self.compute.autocast():
            size = batch_of(len(inputs), self.common)
            for part in micro_batches(len(chosen), min(size, self.common.micro_batch or size)):
                batch = self.compute.bring(inputs[chosen[part]])
                embeddings.append(embedded(module, float_inputs(batch)).cpu())
        return torch.cat(embeddings)

    def _others(self, width: int) -> dict[str, Tensor]:
        """Return the others' noisy embeddings (m, width) by site.

        Raises:
            SiteError: they are not embeddings of this network, or the site's own came back.
        """
        others: dict[str, Tensor] = {}
        for name, array in sorted(self.request.arrays().items()):
            if not name.startswith(f"{EMBEDDINGS}/"):
                continue
            site = name.removeprefix(f"{EMBEDDINGS}/")
            if site == self.silo.name:
                raise SiteError("its own embeddings came back: server and site differ in version")
            if array.ndim != 2 or array.shape[1] != width or not array.isfinite().all():
                raise SiteError(
                    f"the embeddings of site {site} are {tuple(array.shape)}; they must be "
                    f"(any, {width}) and finite: all sites need the same 'network' and "
                    "'width'"
                )
            others[site] = array
        return others

    def _open_discriminator(self, width: int) -> Discriminator:
        """Return the site's discriminator as it was left; at first the seed's."""
        with seeded(self.common.seed, "discriminator", self.silo.name):
            discriminator = Discriminator(width)
        if weights := self.own_state(_WEIGHTS):
            discriminator.load_state_dict(weights)
        return discriminator.to(self.compute.device)

    def _open_optimiser(self, discriminator: Discriminator) -> Optimizer:
        """Return Adam over the discriminator, as it was left."""
        rate = self.settings.discriminator_learning_rate or self.common.learning_rate
        optimiser = eager(torch.optim.Adam)(discriminator.parameters(), lr=rate)
        restore_moments(optimiser, discriminator, self.own_state(_MOMENTS))
        return optimiser
