"""Fed-Align-CL: FedAvg with noise; sites align embeddings and follow a curriculum.

Messages down: every parameter and float buffer by its state-dict name, and, once alignment has
begun, ``embeddings/<site>`` (k, c) of each other site. Messages up: the same names, with noise on
the parameters, and ``embeddings`` (k, c), with noise, if ``note.embeddings`` asks for k of them: in
each round before one that aligns. With ``align-target=others`` the discriminator is sent with them
(``discriminator/<array>``) and goes to the other sites (``discriminators/<site>/<array>``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedsilo.core.array_names import arrays_below, select_others, with_prefix
from fedsilo.core.messages import INCOMING, TRAIN, measurement
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.methods.fedaligncl import (
    DISCRIMINATOR,
    DISCRIMINATORS,
    EMBEDDINGS,
    Discriminator,
    EmbeddingNotes,
    FedAlignCLSettings,
)
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import Arrays, ArraySpec, Ask, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.records import NDArray

_BUFFER = f"{EMBEDDINGS}/"
_FORGOTTEN = measurement(INCOMING, "train", "forgotten")


@dataclass(frozen=True)
class FedAlignCLState(State):
    """The weights, and the sites' embeddings and discriminators of the last round."""

    # Epoch -> site -> share of its training samples that were forgotten
    forgotten: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class FedAlignCL(FedAvg):
    """Averages noisy weights and passes each site's noisy embeddings to all other sites."""

    settings: FedAlignCLSettings
    beside = (_BUFFER, DISCRIMINATORS)
    capabilities = replace(
        FedAvg.capabilities, vit=False, tables=False, some_sites=False, updates=False
    )
    state_class = FedAlignCLState

    def variant(self) -> str:
        """Return the paper's name of the variant: Fed, Fed-Align, Fed-CL or Fed-Align-CL.

        The setting 'align' adds "-Align" to the name, and the setting 'curriculum' adds "-CL".
        """
        name = "Fed"
        if self.settings.align:
            name += "-Align"
        if self.settings.curriculum:
            name += "-CL"
        return name

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: the weights, and data for alignment and the curriculum.

        With the setting 'align', sites share embeddings. With 'align-target' "others" they also
        share the weights of their discriminators. With the setting 'curriculum', they send the
        share of images that the averaged model has forgotten. The noise on weights and embeddings
        is described too.
        """
        own, noisy, noise = self.settings, " without noise", ""
        if own.noise_variance:
            size = sizes = f"of variance {own.noise_variance:g}"
            if own.noise_scale == "relative":
                size = f"of {own.noise_variance:g} times each array's own spread"
                sizes = f"of {own.noise_variance:g} times their spread"
            noisy = f" with Gaussian noise {sizes}"
            noise = f"Gaussian perturbation {size}, without clipping: no bound on epsilon"
        chosen = "in the end all of them"
        if own.embedding_draw == "run":
            chosen = "the same all run"
        weights = f"all weights of the network{noisy}, and batch-norm statistics without noise"
        sentences = [f"each round: {weights}"]
        if own.align:
            sentences.append(
                f"in the round before each that aligns: up to {own.shared_embeddings} embeddings, "
                f"each of one training image ({chosen}),{noisy}; they go to all other sites"
            )
        if own.align and own.align_target == "others":
            sentences.append(
                "with the embeddings: the weights of the site's discriminator, which has learnt to "
                f"tell its images from others',{noisy}; they go to all other sites"
            )
        if own.curriculum:
            sentences.append("each epoch: the share of training images that were forgotten")
        return Disclosures(*sentences, noise=noise)

    def round(self, state: FedAlignCLState, ask: Ask) -> FedAlignCLState:
        """Let sites train, average their noisy weights, and collect data for the next round.

        Each asked site gets the weights. It also gets the other sites' embeddings and
        discriminators, if the state has any. In the average all replies have the same weight. If
        the next round aligns embeddings, each reply has the site's embeddings and, with
        'align-target' "others", its discriminator. The new state has only these embeddings and
        discriminators. ``_forgotten_shares`` adds the shares of forgotten samples.
        """
        weights = self.model(state)
        send: dict[str, Arrays] = {}
        expect: dict[str, Mapping[str, NDArray | ArraySpec]] = {}
        notes: dict[str, EmbeddingNotes] = {}
        for site in ask.sites:
            count = self._embedding_count(site, state)
            send[site] = {**weights, **select_others(site, state.arrays, *self.beside)}
            expect[site] = {**weights, **self._embedding_specs(count)}
            notes[site] = EmbeddingNotes(count)
        before = dict.fromkeys(ask.sites, weights)
        replies = ask(TRAIN, send, expect=expect, reference=before, notes=notes)
        arrays = self.average(replies, weights, equal=True)  # equal weights, as in algorithm 1
        for site, reply in replies.items():
            if EMBEDDINGS in expect[site]:
                arrays[f"{_BUFFER}{site}"] = reply.arrays[EMBEDDINGS]
                discriminator = arrays_below(DISCRIMINATOR, reply.arrays)
                arrays |= with_prefix(f"{DISCRIMINATORS}{site}/", discriminator)
        return replace(state, arrays=arrays, forgotten=self._forgotten_shares(state, replies))

    def _forgotten_shares(
        self, state: FedAlignCLState, replies: Replies
    ) -> Mapping[str, Mapping[str, float]]:
        """Return the stored shares of forgotten samples, with those in this round's replies added.

        A sample is forgotten if the site's own trained model classified it correctly, but the
        averaged model does not. If a site has already reported a share in this epoch, the new share
        replaces it. If no site has reported one in this epoch, the epoch has no entry.

        Returns:
            For each epoch, as a string, the share by site, from 0 to 1.
        """
        epoch = str(epoch_of(state.round + 1, self.common))
        shares = dict(state.forgotten.get(epoch, {}))
        for site, reply in replies.items():
            if _FORGOTTEN in reply.metrics:
                shares[site] = reply.metrics[_FORGOTTEN]
        if not shares:
            return state.forgotten
        return {**state.forgotten, epoch: shares}

    def documents(
        self, state: FedAlignCLState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the content of forgotten.json: the share of forgotten samples by epoch and site.

        The file has the keys "variant", the name of the variant, and "epochs". Epochs are strings.
        If no site reported a share, there is no file, and the result is empty. ``values`` is not
        used.
        """
        if not state.forgotten:
            return {}
        return {"forgotten.json": {"variant": self.variant(), "epochs": state.forgotten}}

    def _embedding_count(self, site: str, state: State) -> int:
        """Return the number of embeddings that ``site`` must return in the round after ``state``.

        The round after that one uses them. The number is therefore 0 if that round does not align
        embeddings, or comes after the run's last round. Otherwise it is 'shared-embeddings', or the
        number of the site's training samples if that is smaller.
        """
        asks = state.round + 2  # embeddings that arrive in a round are used in the next one
        if asks > self.common.rounds or not self.settings.aligns(epoch_of(asks, self.common)):
            return 0
        return min(self.settings.shared_embeddings, self.participants.facts[site].sizes["train"])

    def _embedding_specs(self, count: int) -> dict[str, ArraySpec]:
        """Return the type and shape of each array that a site sends in addition to the weights.

        The array ``embeddings`` is float32 with the shape (``count``, channels), where channels is
        the length of an embedding. With 'align-target' "others", the discriminator's weights follow
        as ``discriminator/<name>``. If ``count`` is 0, the mapping is empty.
        """
        if not count:
            return {}
        channels = self.blueprint.channels
        specs = {EMBEDDINGS: ArraySpec((count, channels))}
        if self.settings.align_target == "others":
            with torch.device("meta"):  # only the shapes are needed
                discriminator = Discriminator(channels).state_dict()
            for name, array in discriminator.items():
                specs[f"{DISCRIMINATOR}{name}"] = ArraySpec(tuple(array.shape))
        return specs
