"""UEFL at a site: train through the codebooks it was given, cluster its features when asked.

Phases: ``train``; ``uncertainty`` measures the aggregated model on validation data; ``centroids``
runs K-means on the training features and sends centroids with counts (shared codebooks), or lays
the site's own books by them (personal codebooks, which are never sent): a new one where the site is
uncertain, the first one anew where it is certain.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Answer, SiteMethod
from fedsilo.client_app.training.evaluation import measure, tokens_of
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.models.contract.messages import INCOMING, measurement
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.maths.federated_kmeans import Centroids, local_centroids
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    NEW_CODEWORDS,
    CentroidNotes,
    UEFLNetwork,
    UEFLSettings,
    gaussian_codebook,
    perplexity,
    segment_dimension,
)
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork


class CodeUse:
    """Code use as perplexity (eq. 11), and how far tokens are from their codewords (eq. 6)."""

    def __init__(self, network: UEFLNetwork) -> None:
        self.network = network
        self.counts = torch.zeros(len(network.codebook()), dtype=torch.int64)
        self.squared = 0.0
        self.elements = 0

    def see(self, tokens: Tensor) -> None:
        """Count the codes of a batch of tokens (batch, l, c)."""
        nearest = self.network.nearest(tokens)
        codes = nearest.codes.flatten().cpu()
        self.counts += torch.bincount(codes, minlength=len(self.counts))
        self.squared += float((nearest.codewords - tokens.float()).square().sum())
        self.elements += tokens.numel()

    def values(self) -> dict[str, float]:
        """Return ``perplexity``, ``codebook-loss`` and, without its weights, the distance."""
        settings, distance = self.network.settings, self.squared / self.elements
        return {
            "perplexity": perplexity(self.counts),
            "codeword-distance": distance,
            "codebook-loss": (settings.codebook_weight + settings.commitment_weight) * distance,
        }


class UEFLSite(SiteMethod):
    """Sends the network and the books it may use; a book it was not given it never sees."""

    settings: UEFLSettings

    def open_network(self) -> UEFLNetwork:
        """Build the network from the message and, if they are personal, the site's own books."""
        arrays = self.request.arrays()
        classifier = initial_classifier(self.common, self.silo)
        books = {
            name.removeprefix(CODEBOOK): arrays.pop(name)
            for name in sorted(arrays)
            if name.startswith(CODEBOOK)
        }
        if self._personal():
            books = self._own_books(segment_dimension(classifier.channels, self.settings.segments))
        load_exchanged(classifier, arrays)
        network = UEFLNetwork(classifier, books, self.settings)
        return self.compute.place(network)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the classifier's weights and, unless personal, the books."""
        uefl = cast(UEFLNetwork, network)
        books = {} if self._personal() else self._books(uefl)
        return exchanged_arrays(uefl.classifier) | books

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the personal books."""
        return self._books(cast(UEFLNetwork, network)) if self._personal() else {}

    def probe(self, network: SiteNetwork, split: str) -> CodeUse:
        """Return a probe of code use."""
        return CodeUse(cast(UEFLNetwork, network))

    def phase_uncertainty(self) -> Answer:
        """Answer with the entropy of the incoming model on validation data (eq. 8)."""
        network = self.open_network()
        instruction = self.request.instruction
        values = measure(
            network,
            self.silo.val,
            self.drawing,
            self.compute,
            (instruction.round, self.silo.name, "uncertainty"),
        )
        return Answer({measurement(INCOMING, "val", "entropy"): values["entropy"]})

    def phase_centroids(self) -> Answer:
        """Answer with centroids and counts, or lay personal codewords by them."""
        network = self.open_network()
        refreshes = CentroidNotes.from_values(self.request.instruction.notes).refreshes
        gaussian = self.settings.codeword_start == "gaussian" and not refreshes
        if gaussian and not self._personal():  # the server draws it: nothing need leave the site
            return Answer({NEW_CODEWORDS: self.settings.codes})
        laid = self._drawn(network) if gaussian else self._centroids(network)
        metrics = {NEW_CODEWORDS: float(len(laid.counts))}
        if not self._personal():
            centres, counts = torch.from_numpy(laid.centres), torch.from_numpy(laid.counts)
            return Answer(metrics, {"centroids": centres, "counts": counts})
        books = self._books(network)
        if len(laid.counts):
            name = f"{CODEBOOK}{0 if refreshes else len(books)}"
            books[name] = torch.from_numpy(laid.centres)
        return Answer(metrics, kept=books)

    def _drawn(self, network: UEFLNetwork) -> Centroids:
        dimension, book = network.codebook().shape[1], len(network.codebooks)
        codewords = gaussian_codebook(self.settings.codes, dimension, self.common.seed, book)
        return Centroids(codewords.numpy(), np.ones(len(codewords), np.int64))

    def _centroids(self, network: UEFLNetwork) -> Centroids:
        dimension = network.codebook().shape[1]
        seed = derive_seed(
            self.drawing.seed, "kmeans", self.request.instruction.round, self.silo.name
        )
        tokens = tokens_of(network, self.silo.train, self.compute)
        features = tokens.reshape(-1, dimension)
        return local_centroids(
            features.numpy(),
            self.settings.codes,
            seed,
            self.settings.centroid_min_count,
            each=len(features) // len(tokens),
            min_samples=self.context.limits.sums_min_count,
        )

    def _personal(self) -> bool:
        return self.settings.codebooks == "personal"

    def _own_books(self, dimension: int) -> dict[str, Tensor]:
        own = self.own_state()
        if not own:
            return {"0": gaussian_codebook(self.settings.codes, dimension, self.common.seed, 0)}
        return {name.removeprefix(CODEBOOK): book for name, book in own.items()}

    @staticmethod
    def _books(network: UEFLNetwork) -> dict[str, Tensor]:
        return {f"{CODEBOOK}{name}": book.detach() for name, book in network.codebooks.items()}
