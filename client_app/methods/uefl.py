"""UEFL at a site: train through the codebooks it was given, cluster its features when asked.

Phases: ``train``; ``uncertainty`` measures the aggregated model on validation data; ``centroids``
runs K-means on the training features and sends centroids with counts (shared codebooks), or makes
the site's own books of them (personal codebooks, which are never sent): a new one where the site is
uncertain, the first one again where it is certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedsilo.client_app.lab import Lab, Measured
from fedsilo.client_app.methods.base import Answer, SiteMethod
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import measure, tokens_of
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.models.contract.messages import INCOMING, measurement
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.maths.federated_kmeans import Centroids, local_centroids
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    NEW_CODEWORDS,
    CentroidNotes,
    CodeUse,
    UEFLNetwork,
    UEFLSettings,
    gaussian_codebook,
    segment_dimension,
)
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork


class UEFLSite(SiteMethod):
    """Sends the network and the books it may use; a book it was not given it never sees."""

    settings: UEFLSettings

    def admit(self, session: SiteSession) -> None:
        """Refuse to send centroids that no noise hides where training is private."""
        self.settings.refuse_exact_centroids(session.settings)

    def open(self, lab: Lab) -> UEFLNetwork:
        """Build the network from the message and, if they are personal, the site's own books."""
        arrays = lab.arrays()
        classifier = initial_classifier(lab.common, lab.silo)
        books = {
            name.removeprefix(CODEBOOK): arrays.pop(name)
            for name in sorted(arrays)
            if name.startswith(CODEBOOK)
        }
        if self.settings.personal:
            dimension = segment_dimension(classifier.channels, self.settings.segments)
            books = self._own_books(lab, dimension)
        load_exchanged(classifier, arrays)
        return lab.compute.place(UEFLNetwork(classifier, books, self.settings))

    def train(self, lab: Lab) -> Answer:
        """Train classifier and books; personal books stay."""
        network = cast(UEFLNetwork, lab.open())
        lab.measure(network)
        lab.fit(network)
        weights, books = exchanged_arrays(network.classifier), _books(network)
        if self.settings.personal:
            return lab.reply(network, send=weights, keep=books)
        return lab.reply(network, send=weights | books)

    def uncertainty(self, lab: Lab) -> Answer:
        """Answer with the entropy of the incoming model on validation data (eq. 8)."""
        key = (lab.instruction.round, lab.site, "uncertainty")
        values = measure(lab.open(), lab.silo.val, lab.sampling, lab.compute, key)
        lab.metrics[measurement(INCOMING, "val", "entropy")] = values["entropy"]
        return lab.reply()

    def centroids(self, lab: Lab) -> Answer:
        """Answer with centroids and counts, or make personal codewords of them."""
        network = cast(UEFLNetwork, lab.open())
        refreshes = CentroidNotes.from_values(lab.instruction.notes).refreshes
        gaussian = self.settings.codeword_start == "gaussian" and not refreshes
        if (
            gaussian and not self.settings.personal
        ):  # the server draws it: nothing need leave the site
            lab.metrics[NEW_CODEWORDS] = self.settings.codes
            return lab.reply()
        found = self._sampled(lab, network) if gaussian else self._clustered(lab, network)
        centres, counts = torch.from_numpy(found.centres), torch.from_numpy(found.counts)
        lab.metrics[NEW_CODEWORDS] = float(len(counts))
        if not self.settings.personal:
            return lab.reply(send={"centroids": centres, "counts": counts})
        books = _books(network)
        if len(counts):
            books[f"{CODEBOOK}{0 if refreshes else len(books)}"] = centres
        return lab.reply(keep=books)

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Yield the network, and measure its use of codes."""
        uefl = cast(UEFLNetwork, network)
        plain = super().measured(lab, network)
        return [replace(one, probe=lambda split: CodeUse(uefl)) for one in plain]

    def _sampled(self, lab: Lab, network: UEFLNetwork) -> Centroids:
        dimension, book = network.codebook().shape[1], len(network.codebooks)
        codewords = gaussian_codebook(self.settings.codes, dimension, lab.common.seed, book)
        return Centroids(codewords.numpy(), np.ones(len(codewords), np.int64))

    def _clustered(self, lab: Lab, network: UEFLNetwork) -> Centroids:
        dimension = network.codebook().shape[1]
        seed = derive_seed(lab.sampling.seed, "kmeans", lab.instruction.round, lab.site)
        tokens = tokens_of(network, lab.silo.train, lab.compute)
        features = tokens.reshape(-1, dimension)
        return local_centroids(
            features.numpy(),
            self.settings.codes,
            seed,
            self.settings.centroid_min_count,
            each=len(features) // len(tokens),
            min_samples=lab.session.limits.sums_min_count,
        )

    def _own_books(self, lab: Lab, dimension: int) -> dict[str, Tensor]:
        own = lab.state()
        if not own:
            return {"0": gaussian_codebook(self.settings.codes, dimension, lab.common.seed, 0)}
        return {name.removeprefix(CODEBOOK): book for name, book in own.items()}


def _books(network: UEFLNetwork) -> dict[str, Tensor]:
    return {f"{CODEBOOK}{name}": book.detach() for name, book in network.codebooks.items()}
