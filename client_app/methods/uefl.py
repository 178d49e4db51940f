"""UEFL at a site: train through the codebooks it was given, cluster its features when asked.

Phases: ``train``; ``uncertainty`` measures the aggregated model on validation data; ``centroids``
clusters the training features. Centroids with counts leave: they start a new book where the site is
uncertain, and the first one again where it is certain.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from fedsilo.client_app.methods.base import Lab, Measured, Outgoing, SiteMethod, SiteNetwork
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import Probes, measure, tokens_of
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.models.contract.array_names import arrays_below
from fedsilo.models.contract.errors import RefusedError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    ENTROPY,
    NEW_CODEWORDS,
    CentroidNotes,
    UEFLSettings,
)
from fedsilo.models.methods.uefl_books import cluster_tokens
from fedsilo.models.methods.uefl_network import CodeUse, UEFLNetwork
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged


class UEFLSite(SiteMethod):
    """Sends the network and the books it may use; a book it was not given it never sees."""

    settings: UEFLSettings

    def admit(self, session: SiteSession) -> None:
        """Refuse to send centroids that no noise hides where training is private."""
        self.settings.refuse_exact_centroids(session.settings)

    def open(self, lab: Lab) -> UEFLNetwork:
        """Build the network and the books from the message."""
        arrays, classifier = lab.arrays(), initial_classifier(lab.common, lab.silo)
        load_exchanged(classifier, {n: a for n, a in arrays.items() if not n.startswith(CODEBOOK)})
        books = arrays_below(CODEBOOK, arrays)
        return lab.compute.place(UEFLNetwork(classifier, books, self.settings))

    def train(self, lab: Lab) -> Outgoing:
        """Train classifier and books (eq. 2, by the loss of eq. 7)."""
        network = cast(UEFLNetwork, lab.open())
        lab.measure(network)
        lab.fit(network)
        return Outgoing(network, send=exchanged_arrays(network.classifier) | network.books())

    def uncertainty(self, lab: Lab) -> Outgoing:
        """Answer with the entropy of the incoming model on validation data (eq. 8)."""
        if lab.session.cap:
            lab.measure_privately(lab.open(), "val", ("uncertainty",), ("entropy",))
            return lab.reply()
        key = (lab.instruction.round, lab.site, "uncertainty")
        values = measure(lab.open(), lab.silo.val, lab.sampling, lab.compute, key)
        lab.metrics[ENTROPY] = values["entropy"]
        return Outgoing()

    def centroids(self, lab: Lab) -> Outgoing:
        """Answer with centroids and counts (section 3.2), or with the number of new codewords."""
        network, own = cast(UEFLNetwork, lab.open()), self.settings
        refreshes = CentroidNotes.from_values(lab.instruction.notes).refreshes
        if own.codeword_start == "gaussian" and not refreshes:
            lab.metrics[NEW_CODEWORDS] = own.codes
            return Outgoing()  # the server draws it: nothing need leave the site
        if lab.common.is_private():  # whatever the message says: centroids have no noise
            raise RefusedError("training is private, and no centroids of features are made")
        tokens = tokens_of(network, lab.silo.train, lab.compute)
        seed = derive_seed(lab.sampling.seed, "kmeans", lab.instruction.round, lab.site)
        found = cluster_tokens(tokens, own, seed, lab.session.limits.sums_min_count)
        centres, counts = torch.from_numpy(found.centres), torch.from_numpy(found.counts)
        lab.metrics[NEW_CODEWORDS] = len(counts)
        return Outgoing(send={"centroids": centres, "counts": counts})

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the network, and measure its use of codes (eq. 11) too."""
        uefl = cast(UEFLNetwork, network)
        plain, *others = super().measured(lab, network)
        own = plain.probe

        def probe(split: str) -> Probes:
            return Probes([CodeUse(uefl), *([own(split)] if own else [])])

        return [replace(plain, probe=probe), *others]
