"""Fed-Align-CL at a site: local steps, alignment to the others' embeddings, curriculum, noise.

The site stores its discriminator (``adversarial_alignment``), the state of paced epochs, and which
of its samples the local model predicted right at the end of an epoch (``right``, ``right-epoch``).
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.adversarial_alignment import (
    Aligner,
    kept_discriminator,
    mean_embeddings,
    open_aligner,
    open_discriminator,
)
from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, TokenClassifier
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.client_app.training.loop import micro_batches
from fedsilo.client_app.training.paced_epochs import Pacing, refuse_other_data
from fedsilo.core.messages import INCOMING, measurement
from fedsilo.core.seeding import generator
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
from fedsilo.models.networks.resnet22 import still_statistics
from fedsilo.models.networks.site_network import exchanged_arrays

_RIGHT, _RIGHT_EPOCH = "right", "right-epoch"


class FedAlignCLSite(SiteMethod):
    """Receives global weights and the others' noisy embeddings; sends weights and embeddings."""

    settings: FedAlignCLSettings

    def admit(self, session: SiteSession) -> None:
        """Require a real hospital's consent if the run sends embeddings of images to other sites.

        Embeddings are sent if 'fedaligncl.align' is true. Without it, and at a simulated site, no
        consent is needed.

        Raises:
            RefusedError: the run aligns embeddings, but the node config does not set
                'allow-embeddings=true'.
        """
        if self.settings.align:
            session.require_consent(
                "allow-embeddings",
                "the run sends embeddings, each of one training image, to all other sites; "
                "'fedaligncl.align' false goes without",
            )

    def train(self, lab: Lab) -> Outgoing:
        """Train on the samples in the curriculum's order, and align embeddings after each step.

        - In the curriculum's order, samples that the local model predicted correctly but the
          averaged model does not tend to come early. In an epoch without a curriculum the order is
          random.
        - Alignment is a further optimiser step that makes this site's embeddings like other sites'.
          It is left out before 'fedaligncl.warmup-epochs' have passed, and if no other site's
          embeddings were received.
        - In round 1 the network is first pretrained, if 'fedaligncl.pretraining-epochs' is above 0.

        The weights, and the embeddings that the server asks for, leave with noise
        ('fedaligncl.noise-variance').

        Raises:
            SiteError: received embeddings or discriminators are unusable, or the training diverged.
            RefusedError: the hospital's limits forbid the training.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        if lab.instruction.round == 1 and self.settings.pretraining_epochs:
            self._pretrain(lab, network)
        aligner = open_aligner(lab, network, self.settings)  # eq. 2 and 3
        order = partial(self._order_by_curriculum, lab, network)  # eq. 4
        lab.fit(network, order=order, after_step=aligner)
        keep = self._state_to_keep(lab, network, aligner)
        return Outgoing(network, keep=keep, send=self._arrays_to_send(lab, network, aligner))

    def _pretrain(self, lab: Lab, network: TokenClassifier) -> None:
        """Train the network on this site's data alone, before the training of round 1.

        It trains for 'fedaligncl.pretraining-epochs' epochs of 'train.epoch-steps' steps each. Each
        epoch has its own random order of the samples at each site. This training has a separate
        optimiser, and its loss is not reported.
        """
        settings, count = lab.sampling, len(lab.silo.train)
        steps, size = settings.epoch_steps, batch_of(count, settings)

        def batches(epoch: int) -> list[Tensor]:
            rng = generator(settings.seed, "pretraining-order", epoch, lab.site)
            return Pacing(epoch, 0, torch.randperm(count, generator=rng), steps, size).batches()

        plan = map(batches, range(self.settings.pretraining_epochs))
        lab.fit(network, plan=plan, aside=("pretraining",))

    def _order_by_curriculum(self, lab: Lab, network: SiteNetwork, epoch: int) -> Tensor | None:
        """Draw the order (n,) in which the epoch uses its samples, forgotten ones early (eq. 4).

        A sample is forgotten if this site's trained model predicted it correctly at the end of the
        last epoch, but ``network``, the received model, does not. Samples are drawn one by one, and
        a forgotten sample is 'fedaligncl.forgotten-weight' times as likely as another. The share of
        forgotten samples is also reported as a metric.

        If the site has stored no predictions of the last epoch, nothing is reported, and the result
        is None, which means a random order. The site stores predictions at an epoch's end only if
        the next epoch has a curriculum.

        Raises:
            SiteError: the site has more or fewer training samples than at the end of the last
                epoch.
        """
        stored = lab.state()
        right_epoch = stored.get(_RIGHT_EPOCH)
        # The site missed the end of the epoch before
        if right_epoch is None or int(right_epoch) != epoch - 1:
            return None
        local_right, global_right = stored[_RIGHT].bool(), _right_predictions(lab, network)
        refuse_other_data(len(local_right), len(global_right))
        forgotten = (local_right & ~global_right).double().mean().item()
        lab.metrics[measurement(INCOMING, "train", "forgotten")] = forgotten
        if not self.settings.orders(epoch):
            return None
        scores = curriculum_scores(local_right, global_right, self.settings.forgotten_weight)
        rng = generator(lab.sampling.seed, "curriculum", epoch, lab.site)
        return curriculum_order(scores, rng)

    def _arrays_to_send(
        self, lab: Lab, network: TokenClassifier, aligner: Aligner | None
    ) -> dict[str, Tensor]:
        """Return the arrays that leave: the weights and, if the server asks for them, embeddings.

        With embeddings and 'fedaligncl.align-target' "others", the site's discriminator leaves too,
        because the other sites align to it. A discriminator is a small network that tells this
        site's embeddings from others. If this round did not align, the stored discriminator leaves
        or, if none is stored, one drawn from the seed.

        All these arrays get Gaussian noise ('fedaligncl.noise-variance'), except batch norm's
        statistics.
        """
        arrays = exchanged_arrays(network)
        # Only parameters get noise, not batch norm's statistics: a noisy variance could be negative
        noisy = {name for name, _ in network.named_parameters()} & arrays.keys()
        count = self._embedding_count(lab)
        if count:
            arrays[EMBEDDINGS] = self._embeddings(lab, network, count)
            noisy.add(EMBEDDINGS)
            # These are what other sites align to; at first drawn from the seed
            if self.settings.align_target == "others":
                if aligner:
                    newest = aligner.discriminator
                else:
                    newest = open_discriminator(lab, network.channels)
                own = {f"{DISCRIMINATOR}{n}": a.cpu() for n, a in newest.state_dict().items()}
                arrays |= own
                noisy |= own.keys()
        key = ("perturbation", lab.instruction.round, lab.instruction.step, lab.site)
        return perturb_arrays(arrays, noisy, self.settings, lab.session.noise(*key))

    def _state_to_keep(
        self, lab: Lab, network: TokenClassifier, aligner: Aligner | None
    ) -> dict[str, Tensor]:
        """Return the arrays to store: the discriminator and, at an epoch's end, right predictions.

        The discriminator is a small network that tells this site's embeddings from others. If this
        round did not align, the stored arrays are kept.

        Predictions are stored only if the next epoch has a curriculum. ``right`` (n,) uint8 is 1
        for each training sample that the trained model predicts correctly, otherwise 0.
        ``right-epoch`` is the number of the epoch that ends.
        """
        kept = kept_discriminator(lab)
        if aligner is not None:
            kept = aligner.kept()
        round_ = lab.instruction.round
        epoch = epoch_of(round_, lab.common)
        if ends_epoch(round_, lab.common) and self.settings.orders(epoch + 1):
            kept[_RIGHT] = _right_predictions(lab, network).to(torch.uint8)
            kept[_RIGHT_EPOCH] = torch.tensor(epoch)
        return kept

    def _embedding_count(self, lab: Lab) -> int:
        """Return the number of embeddings to send to the server after this round's training.

        The server's message requests a number. The site sends that many, at most
        'fedaligncl.shared-embeddings'. The number is 0 if the settings do not align embeddings in
        the epoch of the next round, because nobody would use them. It is never negative, and may
        exceed the site's number of samples.
        """
        used = epoch_of(lab.instruction.round + 1, lab.common)
        if not self.settings.aligns(used):
            return 0
        number = EmbeddingNotes.from_values(lab.instruction.notes).embeddings
        return max(0, min(number, self.settings.shared_embeddings))

    def _embeddings(self, lab: Lab, network: TokenClassifier, count: int) -> Tensor:
        """Compute embeddings (n, c) of random training samples, on the CPU and without noise.

        n is ``count``, or the number of training samples if that is smaller. With
        'fedaligncl.embedding-draw' "round" each round draws its own samples. Otherwise every round
        takes the same samples. An embedding is the mean of the encoder's outputs for a sample.

        The network is put into training mode, in which the embeddings of the alignment are computed
        too, because batch norm scales them differently in eval mode. Batch norm's running
        statistics do not change.
        """
        inputs = lab.silo.train.inputs
        key: tuple[int | str, ...] = (lab.site,)
        if self.settings.embedding_draw == "round":
            key = (lab.instruction.round, lab.site)
        rng = generator(lab.sampling.seed, "shared-embeddings", *key)
        chosen = torch.randperm(len(inputs), generator=rng)[:count]
        network.train()
        embeddings = []
        with torch.no_grad(), still_statistics(network), lab.compute.autocast():
            size = batch_of(len(inputs), lab.common)
            for part in micro_batches(len(chosen), min(size, lab.common.micro_batch or size)):
                batch = lab.compute.bring(inputs[chosen[part]])
                embeddings.append(mean_embeddings(network, float_inputs(batch)).cpu())
        return torch.cat(embeddings)


def _right_predictions(lab: Lab, network: SiteNetwork) -> Tensor:
    """Return a bool tensor (n,): whether the network predicts each training sample correctly.

    The samples keep their order. The network is put into eval mode and stays in it. Ties between
    classes go to the first class.
    """
    train = lab.silo.train
    logits = over_batches(network, train.inputs, lab.compute, network)
    return logits.argmax(dim=1) == train.labels
