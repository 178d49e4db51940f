"""UEFL at a site: train with the codebooks it receives, and cluster its features when asked.

The phase ``train`` trains, ``uncertainty`` measures the averaged model on validation data, and
``centroids`` clusters the training features. Centroids leave with their counts: the centroids of an
uncertain site start a new codebook, those of a certain site re-initialise the first codebook.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from fedsilo.client_app.methods.base import Lab, Measured, Outgoing, SiteMethod, SiteNetwork
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.evaluation import Probes, measure, tokens_of
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.core.array_names import arrays_below
from fedsilo.core.errors import RefusedError
from fedsilo.core.seeding import derive_seed
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    ENTROPY,
    NEW_CODEWORDS,
    CentroidNotes,
    UEFLSettings,
)
from fedsilo.models.methods.uefl_books import cluster_tokens
from fedsilo.models.methods.uefl_network import CodeUse, UEFLNetwork
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged


class UEFLSite(SiteMethod):
    """Trains and sends the network and the codebooks that it may use; it sees no other books."""

    settings: UEFLSettings
    trains_stacked = True
    phases = ("train", "uncertainty", "centroids")

    def admit(self, session: SiteSession) -> None:
        """Reject a private run that would send centroids, because centroids have no noise.

        A centroid is the mean of a cluster of this site's features, found by K-means. Centroids are
        sent if one of three settings is "kmeans". A run that is not private always passes.

        Raises:
            SettingError: the run is private, but 'uefl.codeword-start', 'uefl.refresh' or
                'uefl.first-book' is "kmeans".
        """
        self.settings.refuse_exact_centroids(session.settings)

    def open(self, lab: Lab) -> UEFLNetwork:
        """Build the network with the weights and codebooks from the server's message.

        A codebook is a set of learned vectors. The network is placed on the compute device.

        Args:
            lab: the message's arrays, the site's data and the settings.

        Raises:
            SettingError: the arrays do not fit the network.
        """
        arrays, classifier = lab.arrays(), initial_classifier(lab.common, lab.silo, lab.task)
        load_exchanged(classifier, {n: a for n, a in arrays.items() if not n.startswith(CODEBOOK)})
        books = arrays_below(CODEBOOK, arrays)
        return lab.compute.place(UEFLNetwork(classifier, books, self.settings))

    def train(self, lab: Lab) -> Outgoing:
        """Train the network and its codebooks (eq. 2, with the loss of eq. 7), and send both.

        A codebook is a set of learned vectors (codewords). The network replaces each segment of its
        encoder's outputs by the nearest codeword. The received model is measured first, if the
        server asks for metrics.
        """
        network = cast(UEFLNetwork, lab.open())
        lab.measure(network)
        lab.fit(network)
        return Outgoing(network, send=exchanged_arrays(network.classifier) | network.books())

    def uncertainty(self, lab: Lab) -> Outgoing:
        """Report the mean entropy of the received model's predictions on validation data (eq. 8).

        The entropy is the only metric, and no arrays are sent. If the hospital has its own cap on
        epsilon, the entropy gets noise when the reply is packed. Without such a cap, the site must
        have validation samples. This function does not check that it has any.
        """
        if lab.session.cap:
            lab.measure_privately(lab.open(), "val", ("uncertainty",), ("entropy",))
            return lab.reply()
        key = (lab.instruction.round, lab.site, "uncertainty")
        values = measure(lab.open(), lab.silo.val, lab.sampling, lab.compute, key)
        lab.metrics[ENTROPY] = values["entropy"]
        return Outgoing()

    def centroids(self, lab: Lab) -> Outgoing:
        """Cluster the features of this site's training samples, and send the centroids.

        The server asks for centroids to start a new codebook (a set of learned vectors) or to
        refresh the first one. To start one with 'uefl.codeword-start' "gaussian", the server draws
        the vectors itself. Nothing is clustered or sent then, and only their number 'uefl.codes' is
        reported.

        In any other case K-means (section 3.2) starts from random samples. A centroid needs at
        least 'uefl.centroid-min-count' features, and as many samples as the hospital's
        'sums-min-count'. The centroids are sent with their numbers of features, and the number of
        centroids is reported.

        Raises:
            RefusedError: centroids are needed but the run is private, and centroids have no noise.
        """
        network, own = cast(UEFLNetwork, lab.open()), self.settings
        refreshes = CentroidNotes.from_values(lab.instruction.notes).refreshes
        if own.codeword_start == "gaussian" and not refreshes:
            lab.metrics[NEW_CODEWORDS] = own.codes
            # The server draws a Gaussian book itself, so nothing needs to leave the site
            return Outgoing()
        # Refused whatever the message asks for, because centroids have no noise
        if lab.common.is_private():
            raise RefusedError(
                "training is private, but centroids of features would leave without noise"
            )
        tokens = tokens_of(network, lab.silo.train, lab.compute)
        # The site's own seed, because K-means begins at samples, which a server must not know
        seed = derive_seed(lab.sampling.seed, "kmeans", lab.instruction.round, lab.site)
        found = cluster_tokens(tokens, own, seed, lab.session.limits.sums_min_count)
        centres, counts = torch.from_numpy(found.centres), torch.from_numpy(found.counts)
        lab.metrics[NEW_CODEWORDS] = len(counts)
        return Outgoing(send={"centroids": centres, "counts": counts})

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the networks to measure, the first of which also reports its codeword use.

        A codeword is a learned vector that replaces similar segments of the encoder's outputs. The
        report has the perplexity of the use (eq. 11) and the distance to the codewords. The
        networks and other metrics are those of ``SiteMethod.measured``, such as the vacuity of an
        evidential network.
        """
        uefl = cast(UEFLNetwork, network)
        plain, *others = super().measured(lab, network)
        own = plain.probe

        def probe(split: str) -> Probes:
            probes = Probes([CodeUse(uefl)])
            if own:
                probes.append(own(split))
            return probes

        return [replace(plain, probe=probe), *others]
