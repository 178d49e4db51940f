"""UEFL at a site: train through the codebooks it was given, cluster its features when asked.

Phases: ``train``; ``uncertainty`` measures the aggregated model on validation data; ``centroids``
clusters the training features. Centroids with counts leave, or start the site's own books (personal
codebooks): a new one where the site is uncertain, the first one again where it is certain.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from fedsilo.client_app.methods.base import Answer, Lab, Measured, SiteMethod, SiteNetwork
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
from fedsilo.models.methods.uefl_books import clustered, gaussian_codebook, segment_dimension
from fedsilo.models.methods.uefl_network import CodeUse, UEFLNetwork, code_use
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged


class UEFLSite(SiteMethod):
    """Sends the network and the books it may use; a book it was not given it never sees."""

    settings: UEFLSettings

    def admit(self, session: SiteSession) -> None:
        """Refuse to send centroids that no noise hides where training is private."""
        self.settings.refuse_exact_centroids(session.settings)

    def open(self, lab: Lab) -> UEFLNetwork:
        """Build the network from the message and, if they are personal, the site's own books."""
        arrays, classifier = lab.arrays(), initial_classifier(lab.common, lab.silo)
        load_exchanged(classifier, {n: a for n, a in arrays.items() if not n.startswith(CODEBOOK)})
        books = arrays_below(CODEBOOK, lab.state() if self.settings.personal else arrays)
        if not books:
            dimension = segment_dimension(classifier.channels, self.settings.segments)
            books["0"] = gaussian_codebook(self.settings.codes, dimension, lab.common.seed, 0)
        weight = self.settings.commitment_at(lab.instruction.round)
        settings = replace(self.settings, commitment_weight=weight)
        return lab.compute.place(UEFLNetwork(classifier, books, settings))

    def train(self, lab: Lab) -> Answer:
        """Train classifier and books (eq. 2, by the loss of eq. 7); personal books stay."""
        network = cast(UEFLNetwork, lab.open())
        lab.measure(network)
        if self.settings.codeword_update == "average":
            network.moves_by_average()
        lab.fit(network)
        weights, books = exchanged_arrays(network.classifier), network.books()
        if self.settings.dead_codes == "split":
            tokens = tokens_of(network, lab.silo.train, lab.compute)
            floor = max(self.settings.centroid_min_count, lab.session.limits.sums_min_count)
            weights |= code_use(network, tokens, floor)
        if self.settings.personal:
            return lab.reply(network, send=weights, keep=books)
        return lab.reply(network, send=weights | books)

    def uncertainty(self, lab: Lab) -> Answer:
        """Answer with the entropy of the incoming model on validation data (eq. 8)."""
        if lab.session.cap:
            lab.measure_privately(lab.open(), "val", ("uncertainty",), ("entropy",))
            return lab.reply()
        key = (lab.instruction.round, lab.site, "uncertainty")
        values = measure(lab.open(), lab.silo.val, lab.sampling, lab.compute, key)
        lab.metrics[ENTROPY] = values["entropy"]
        return lab.reply()

    def centroids(self, lab: Lab) -> Answer:
        """Answer with centroids and counts (section 3.2), or make personal codewords of them."""
        network, own = cast(UEFLNetwork, lab.open()), self.settings
        refreshes = CentroidNotes.from_values(lab.instruction.notes).refreshes
        first, books = f"{CODEBOOK}0", network.books()
        number = 1 + int(list(books)[-1].removeprefix(CODEBOOK))  # of a new personal book
        stay = books if own.books_used == "all" else {first: books[first]}
        if own.codeword_start == "gaussian" and not refreshes:
            lab.metrics[NEW_CODEWORDS] = own.codes
            if not own.personal:
                return lab.reply()  # the server draws it: nothing need leave the site
            width, seed = network.codebook().shape[1], lab.common.seed
            centres = gaussian_codebook(own.codes, width, seed, number)
            return lab.reply(keep=stay | {f"{CODEBOOK}{number}": centres})
        if lab.common.is_private():  # whatever the message says: centroids have no noise
            raise RefusedError("training is private, and no centroids of features are made")
        tokens = tokens_of(network, lab.silo.train, lab.compute)
        seed = derive_seed(lab.sampling.seed, "kmeans", lab.instruction.round, lab.site)
        found = clustered(tokens, own, seed, lab.session.limits.sums_min_count)
        centres, counts = torch.from_numpy(found.centres), torch.from_numpy(found.counts)
        lab.metrics[NEW_CODEWORDS] = len(counts)
        if not own.personal:
            return lab.reply(send={"centroids": centres, "counts": counts})
        if len(counts):
            books = (
                books | {first: centres} if refreshes else stay | {f"{CODEBOOK}{number}": centres}
            )
        return lab.reply(keep=books)

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the network, and measure its use of codes (eq. 11) too."""
        uefl = cast(UEFLNetwork, network)
        plain, *others = super().measured(lab, network)
        own = plain.probe

        def probe(split: str) -> Probes:
            return Probes([CodeUse(uefl), *([own(split)] if own else [])])

        return [replace(plain, probe=probe), *others]
