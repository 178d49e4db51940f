"""Fed-Align-CL at a site: local steps, alignment to the others' embeddings, curriculum, noise.

The site keeps its discriminator (``adversarial_alignment``), which of its samples the local model
got right at the end of an epoch (``right``, ``right-epoch``), and pacing's state.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.adversarial_alignment import (
    Aligner,
    embedded,
    kept_discriminator,
    open_aligner,
    open_discriminator,
)
from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, TokenClassifier
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.loop import micro_batches
from fedsilo.client_app.training.pacing import Pacing, refuse_other_data
from fedsilo.models.contract.messages import INCOMING, measurement
from fedsilo.models.contract.seeding import generator
from fedsilo.models.maths.pacing import batch_of, ends_epoch, epoch_of
from fedsilo.models.methods.fedaligncl import (
    DISCRIMINATOR,
    EMBEDDINGS,
    EmbeddingNotes,
    FedAlignCLSettings,
    curriculum_order,
    curriculum_scores,
    perturb_arrays,
)
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.resnet22 import still_statistics

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

    def train(self, lab: Lab) -> Outgoing:
        """Train in the curriculum's order, and align after each step where others sent any."""
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        if lab.instruction.round == 1 and self.settings.pretraining_epochs:
            self._pretrain(lab, network)
        aligner = open_aligner(lab, network, self.settings)  # eq. 2 and 3
        order = partial(self._curriculum, lab, network)  # eq. 4
        lab.fit(network, order=order, after_step=aligner)
        keep = self._kept(lab, network, aligner)
        return Outgoing(network, keep=keep, send=self._outgoing(lab, network, aligner))

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
        if not self.settings.orders(epoch):
            return None
        scores = curriculum_scores(local_right, global_right, self.settings.forgotten_weight)
        rng = generator(lab.sampling.seed, "curriculum", epoch, lab.site)
        return curriculum_order(scores, rng)

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
                newest = newest or open_discriminator(lab, network.channels)
                own = {f"{DISCRIMINATOR}{n}": a.cpu() for n, a in newest.state_dict().items()}
                arrays |= own
                noisy |= own.keys()
        key = ("perturbation", lab.instruction.round, lab.instruction.step, lab.site)
        return perturb_arrays(arrays, noisy, self.settings, lab.session.noise(*key))

    def _kept(
        self, lab: Lab, network: TokenClassifier, aligner: Aligner | None
    ) -> dict[str, Tensor]:
        """Return the discriminator, and at an epoch's end what the local model gets right."""
        kept = kept_discriminator(lab) if aligner is None else aligner.kept()
        round_ = lab.instruction.round
        epoch = epoch_of(round_, lab.common)
        if ends_epoch(round_, lab.common) and self.settings.orders(epoch + 1):
            kept[_RIGHT] = _right(lab, network).to(torch.uint8)
            kept[_RIGHT_EPOCH] = torch.tensor(epoch)
        return kept

    def _embeddings_asked(self, lab: Lab) -> int:
        """Return how many embeddings leave: what is asked for, if the run's settings have it so."""
        number = EmbeddingNotes.from_values(lab.instruction.notes).embeddings
        used = epoch_of(lab.instruction.round + 1, lab.common)
        wanted = min(number, self.settings.shared_embeddings)
        return max(0, wanted) if self.settings.aligns(used) else 0

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


def _right(lab: Lab, network: SiteNetwork) -> Tensor:
    """Return (n,) bool: which training samples the network gets right, in eval mode."""
    train = lab.silo.train
    logits = over_batches(network, train.inputs, lab.compute, network)
    return logits.argmax(dim=1) == train.labels
