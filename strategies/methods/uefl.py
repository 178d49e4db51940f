"""UEFL (arXiv:2402.18888, algorithm 1): FedAvg, and new codebooks for uncertain sites.

Phases of a round: ``train``; in the last round of an iteration also ``uncertainty`` (every site
measures the new global model on validation data) and ``centroids``: from uncertain sites for a new
book, and with 'uefl.refresh' from certain sites, whose features re-initialise the first book
(section 3.2).

Messages: ``arrays`` holds the network by state-dict name and ``codebook.<b>`` (n, c/s) for each
book b that the site may use. A ``train`` reply holds the same arrays, trained. A ``centroids``
reply holds ``centroids`` (k, c/s) and ``counts`` (k,), both float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsilo.core.messages import TRAIN
from fedsilo.models.maths.federated_kmeans import Centroids
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    ENTROPY,
    NEW_CODEWORDS,
    CentroidNotes,
    UEFLSettings,
    round_marks,
    uncertain_sites,
)
from fedsilo.models.methods.uefl_books import (
    centroid_fault,
    gaussian_codebook,
    segment_dimension,
    start_book,
)
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import (
    Arrays,
    ArraySpec,
    Ask,
    Capabilities,
    Disclosures,
    Method,
    Reply,
    State,
)
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Specs

UNCERTAINTY, CENTROIDS = "uncertainty", "centroids"


@dataclass(frozen=True)
class UEFLState(State):
    """The network, the codebooks and the history of checks."""

    iteration: int = 1  # the iteration, from 1
    # Book -> the sites that use it
    access: Mapping[str, Sequence[str]] = field(default_factory=dict)
    uncertain: Sequence[str] = ()  # the sites found uncertain in the current round
    certain: bool = False  # whether the last check found no uncertain site
    # Each check has its round, the entropy of each site, and the uncertain sites
    entropies: Sequence[Mapping[str, Any]] = ()
    # Round -> the sites that got a new book
    extended: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refreshed: Sequence[int] = ()  # the rounds that ended by re-initialising the first book


class UEFL(Method):
    """Extends the codebook of uncertain sites after each iteration."""

    settings: UEFLSettings
    # No trimmed mean or multikrum, because a book may have too few users to leave some out
    capabilities = Capabilities(
        vit=False, initial_weights=True, aggregations=("mean", "norm-clip", "median")
    )
    state_class = UEFLState

    def initial_state(self) -> UEFLState:
        """Return the initial weights and the first codebook, which all sites use.

        A codebook is a list of vectors. The first one is Gaussian.

        Raises:
            SettingError: 'uefl.max-iterations' is above 1, and a site has no validation samples, on
                which uncertainty is measured. If 'uefl.refresh' is 'kmeans', each site also needs
                at least 'uefl.codes' training features.
        """
        for site, facts in self.participants.facts.items():
            features = facts.sizes["train"] * self._features
            self.settings.refuse_small(site, facts.sizes, features)
        arrays = self.starting_weights()
        dimension = segment_dimension(self.blueprint.channels, self.settings.segments)
        first = gaussian_codebook(self.settings.codes, dimension, self.common.seed, 0)
        arrays[f"{CODEBOOK}0"] = first.numpy()
        return UEFLState(arrays, access={"0": self.participants.sites()})

    def notices(self) -> list[str]:
        """Return a list with one warning if some sites' clusters are probably too small to send.

        K-means finds up to 'uefl.codes' clusters of a site's training features. The site sends the
        centre of each cluster with at least 'uefl.centroid-min-count' features. A site is too small
        if it has fewer features than the product of these settings. The list is empty if no site is
        too small, or if no setting of the codebooks is 'kmeans'.
        """
        features: dict[str, int] = {}
        for site, facts in self.participants.facts.items():
            features[site] = facts.sizes["train"] * self._features
        return self.settings.few_centroids(features)

    def round(self, state: UEFLState, ask: Ask) -> UEFLState:
        """Train and average the network and codebooks, and between iterations extend the codebooks.

        A codebook is a list of vectors, the codewords. The network replaces each feature by the
        nearest codeword. Each asked site trains the network and the codebooks that it may use. If
        'uefl.first-book' is 'kmeans', clusters of the sites' features fill the first codebook
        before round 1.

        An iteration is a series of rounds. In the last round of each iteration but the last, the
        server checks the sites' uncertainty after training. The uncertain sites that find codewords
        get one new codebook together. If 'uefl.refresh' is 'kmeans', clusters of the certain sites'
        features fill the first codebook again in the same round, unless the run stops because all
        sites are certain.
        """
        if not state.round and self.settings.first_book == "kmeans":
            found = self._request_codewords(state, ask, ask.sites)
            state = replace(self._refresh_first_book(state, found), refreshed=())
        send = self._models_for(state, ask.sites)
        trained = ask(TRAIN, send, expect=send, reference=send)  # eq. 2 and 4 to 7 run at the sites
        state = replace(state, arrays=self._average_books(state, trained), uncertain=())  # eq. 3
        own = self.settings
        if not own.ends_iteration(state.iteration, state.round + 1, self.common.rounds):
            return state
        books = self._models_for(state, ask.sites)
        entropies = ask(UNCERTAINTY, books, expect={}, metrics=[ENTROPY])  # eq. 8
        state = self._judge(state, entropies)  # eq. 9
        asked = state.uncertain
        # A run that ends now needs no new first book
        is_over = own.stop_when_certain and state.certain
        if own.refresh == "kmeans" and not is_over:
            asked = ask.sites  # certain sites re-initialise the first book
        found = self._request_codewords(state, ask, asked)
        return self._refresh_first_book(self._extend_books(state, found), found)

    def _request_codewords(self, state: UEFLState, ask: Ask, sites: Sequence[str]) -> Replies:
        """Ask ``sites`` for new codewords, and return the replies of the sites that found some.

        Codewords are vectors, here the centroids that K-means finds in a site's features. Sites in
        ``state.uncertain`` are asked for codewords of a new codebook, and other sites for codewords
        of the first one. If new codebooks are Gaussian, their sites send no centroids but only the
        number of codewords. A reply with 0 codewords is left out, because all clusters were too
        small.
        """
        expect: dict[str, Specs] = {}
        notes: dict[str, CentroidNotes] = {}
        for site in sites:
            expect[site] = self._centroid_specs(site, state)
            notes[site] = CentroidNotes(refreshes=site not in state.uncertain)
        clustered = ask(
            CENTROIDS,
            self._models_for(state, sites),
            expect=expect,
            notes=notes,
            metrics=[NEW_CODEWORDS],
            fault=self._fault_of_centroids,
        )
        return clustered.of(
            site for site, reply in clustered.items() if reply.metrics[NEW_CODEWORDS]
        )

    def model_for(self, site: str, state: UEFLState) -> Arrays:
        """Return the network and the codebooks that ``site`` may use, ordered by array name.

        ``state.access`` lists the sites of each codebook. All sites may use the first one.
        """
        arrays: dict[str, NDArray] = {}
        for name, array in sorted(state.arrays.items()):
            book = name.removeprefix(CODEBOOK)
            if not name.startswith(CODEBOOK) or site in state.access[book]:
                arrays[name] = array
        return arrays

    def _models_for(self, state: UEFLState, sites: Sequence[str]) -> dict[str, Arrays]:
        return {site: self.model_for(site, state) for site in sites}

    def _average_books(self, state: UEFLState, trained: Replies) -> Arrays:
        """Average the network over all replies, and each codebook over its users' replies.

        The users of a codebook are the sites in ``state.access``. 'server.aggregation' is the rule
        of the average, usually the mean weighted by samples. Without any reply to average, an array
        is unchanged.
        """
        network: dict[str, NDArray] = {}
        books: dict[str, NDArray] = {}
        for name, array in state.arrays.items():
            if not name.startswith(CODEBOOK):
                network[name] = array
                continue
            # Sites without access never received the book, so only its users count
            users = trained.of(state.access[name.removeprefix(CODEBOOK)])
            books |= self.average(users, {name: array})
        return self.average(trained, network) | books

    def _judge(self, state: UEFLState, replies: Replies) -> UEFLState:
        entropies = {site: reply.metrics[ENTROPY] for site, reply in replies.items()}
        uncertain = uncertain_sites(entropies, self.settings.gamma, self.settings.threshold)
        check = {"round": state.round + 1, "entropies": entropies, "uncertain": uncertain}
        return replace(
            state,
            iteration=state.iteration + 1,
            uncertain=uncertain,
            certain=not uncertain,
            entropies=[*state.entropies, check],
        )

    def _extend_books(self, state: UEFLState, found: Replies) -> UEFLState:
        """Add a codebook for the uncertain sites that found codewords.

        A codebook is a list of vectors, the codewords. Only these sites may use the new codebook.
        ``extended`` in the state lists them under the number of the current round. If no uncertain
        site found codewords, the list is empty and no codebook is added. If ``state.uncertain`` is
        empty, the state is unchanged.
        """
        if not state.uncertain:
            return state
        sites = [site for site in state.uncertain if site in found]
        book = len(state.access)
        state = replace(state, extended={**state.extended, str(state.round + 1): sites})
        if not sites:
            return state
        arrays = {**state.arrays, **self._build_book(book, state, found.of(sites))}
        access = {**state.access, str(book): sites}
        return replace(state, arrays=arrays, access=access)

    def _refresh_first_book(self, state: UEFLState, found: Replies) -> UEFLState:
        """Replace the first codebook, which all sites use, by codewords from certain sites.

        A site is certain if ``state.uncertain`` does not list it. The new codewords are the K-means
        centroids in the certain sites' replies, merged if there are too many. ``refreshed`` in the
        new state also lists the current round. If ``found`` has no reply from a certain site, the
        state is unchanged.

        Args:
            state: the state of the method.
            found: the replies with codewords, from certain and uncertain sites.
        """
        certain = [site for site in found if site not in state.uncertain]
        if not certain:
            return state
        arrays = {**state.arrays, **self._build_book(0, state, found.of(certain))}
        return replace(state, arrays=arrays, refreshed=[*state.refreshed, state.round + 1])

    def _build_book(self, book: int, state: UEFLState, found: Replies) -> Arrays:
        """Return the codewords of a new codebook as ``codebook.<book>``, (n, codeword length).

        The codewords are the centroids in the replies. If these are more than 'uefl.codes', K-means
        merges them to that number, with each centroid weighted by its number of features. If the
        replies have no centroids, 'uefl.codes' Gaussian codewords are drawn from the seed and the
        codebook's number.
        """
        dimension = state.arrays[f"{CODEBOOK}0"].shape[1]
        parts = []
        for reply in found.values():
            if reply.arrays:  # Gaussian books need no centroids, so none are sent
                counts = reply.arrays["counts"].astype(np.int64)
                parts.append(Centroids(reply.arrays["centroids"], counts))
        where = dimension, self.common.seed, state.round + 1
        return {f"{CODEBOOK}{book}": start_book(book, parts, self.settings, *where)}

    def _centroid_specs(self, site: str, state: UEFLState) -> dict[str, ArraySpec]:
        if not self.settings.sends_centroids(site in state.uncertain, first=not state.entropies):
            return {}
        dimension = state.arrays[f"{CODEBOOK}0"].shape[1]
        return {"centroids": ArraySpec((None, dimension)), "counts": ArraySpec((None,))}

    def _fault_of_centroids(self, reply: Reply) -> str | None:
        found, codes = reply.metrics[NEW_CODEWORDS], self.settings.codes
        features = self.participants.facts[reply.site].sizes["train"] * self._features
        return centroid_fault(reply.arrays, found, codes, features)

    def why_finished(self, state: UEFLState) -> str | None:
        """Return the reason to end the run before its last round, or None if the run continues.

        There is a reason only if 'uefl.stop-when-certain' is set, and the newest check found no
        uncertain site. A site is uncertain if its entropy is high compared with all sites. After
        the last round the result is always None.
        """
        if not self.settings.stop_when_certain or not state.certain:
            return None
        if state.round >= self.common.rounds:
            return None
        return self.settings.why_certain(state.round)

    @property
    def _features(self) -> int:
        """The number of features of one sample: one per token and segment."""
        return self.blueprint.tokens * self.settings.segments

    @classmethod
    def marks(cls, state: UEFLState) -> dict[int, str]:
        """Return the codebook events of a run, for logs and plots: round -> description.

        There are three kinds:

        - Some sites got a new codebook.
        - No codewords were found for a new codebook, because all clusters were too small.
        - The first codebook was re-initialised.

        If a round has two events, a semicolon joins them. Rounds without an event are left out.
        """
        return round_marks(state.extended, state.refreshed)

    def disclosures(self) -> Disclosures:
        """List the data that a site sends: weights, codebooks and, with K-means, centroids."""
        return Disclosures(*self.settings.list_disclosures())
