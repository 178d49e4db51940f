"""UEFL (arXiv:2402.18888, algorithm 1): FedAvg of the network, books for those who need them.

Phases of a round: ``train``; in the last round of an iteration also ``uncertainty`` (every site
measures the new global model on validation data) and ``centroids``: uncertain sites for a new book,
and with 'uefl.refresh' certain sites, whose features re-initialise the first book (section 3.2).

Messages: ``arrays`` holds the network by state-dict name and ``codebook.<b>`` (n, c/s) for each
book b that the site may use; a ``train`` reply the same, trained; a ``centroids`` reply
``centroids`` (k, c/s) and ``counts`` (k,), both float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsilo.models.contract.messages import TRAIN
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
    started_book,
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

UNCERTAINTY, CENTROIDS = "uncertainty", "centroids"


@dataclass(frozen=True)
class UEFLState(State):
    """The network and the books."""

    iteration: int = 1  # counted from 1
    # Book -> the sites that use it
    access: Mapping[str, Sequence[str]] = field(default_factory=dict)
    uncertain: Sequence[str] = ()  # sites found uncertain in the current round
    certain: bool = False  # whether no site was, at the last check
    # Per check the round, the entropy of each site and those uncertain
    entropies: Sequence[Mapping[str, Any]] = ()
    # Round -> the sites that got a new book
    extended: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refreshed: Sequence[int] = ()  # rounds after which the first book was re-initialised


class UEFL(Method):
    """Extends the codebook of uncertain sites after each iteration."""

    settings: UEFLSettings
    # A book's users may be too few to drop some of them
    capabilities = Capabilities(
        vit=False, initial_weights=True, aggregations=("mean", "norm-clip", "median")
    )
    state_class = UEFLState

    def initial_state(self) -> UEFLState:
        """Return initial weights and the first book, Gaussian.

        Raises:
            SettingError: uncertainty is to be judged, and a site has no validation samples, or
                fewer features than the first book, which they may re-initialise, has codewords.
        """
        for site, facts in self.participants.facts.items():
            features = facts.sizes()["train"] * self._features
            self.settings.refuse_small(site, facts.sizes(), features)
        arrays = self.starting_weights()
        dimension = segment_dimension(self.blueprint.channels, self.settings.segments)
        first = gaussian_codebook(self.settings.codes, dimension, self.common.seed, 0)
        arrays[f"{CODEBOOK}0"] = first.numpy()
        return UEFLState(arrays, access={"0": self.participants.sites()})

    def notices(self) -> list[str]:
        """Say which sites have many clusters that are too small to be sent."""
        facts = self.participants.facts.items()
        return self.settings.few_centroids(
            {site: each.sizes()["train"] * self._features for site, each in facts}
        )

    def round(self, state: UEFLState, ask: Ask) -> UEFLState:
        """Train and average; at an iteration's end extend the codebook where it is needed."""
        if not state.round and self.settings.first_book == "kmeans":
            found = self._found(state, ask, ask.sites)
            state = replace(self._refreshed(state, found), refreshed=())
        send = self._books(state, ask.sites)
        trained = ask(TRAIN, send, expect=send, reference=send)  # eq. 2, 4 to 7, at the sites
        state = replace(state, arrays=self._averaged(state, trained), uncertain=())  # eq. 3
        own = self.settings
        if not own.ends_iteration(state.iteration, state.round + 1, self.common.rounds):
            return state
        books = self._books(state, ask.sites)
        entropies = ask(UNCERTAINTY, books, expect={}, metrics=[ENTROPY])  # eq. 8
        state = self._judged(state, entropies)  # eq. 9
        over = own.stop_when_certain and state.certain
        refreshes = own.refresh == "kmeans" and not over
        found = self._found(state, ask, ask.sites if refreshes else state.uncertain)
        return self._refreshed(self._extended(state, found), found)

    def _found(self, state: UEFLState, ask: Ask, sites: Sequence[str]) -> Replies:
        """Return the replies of those who found codewords (section 3.2, K-means initialization)."""
        clustered = ask(
            CENTROIDS,
            self._books(state, sites),
            expect={site: self._centroid_specs(site, state) for site in sites},
            notes={site: CentroidNotes(refreshes=site not in state.uncertain) for site in sites},
            metrics=[NEW_CODEWORDS],
            fault=self._fault_of_centroids,
        )
        return clustered.of(s for s, reply in clustered.items() if reply.metrics[NEW_CODEWORDS])

    def model_for(self, site: str, state: UEFLState) -> Arrays:
        """Return the network and the books that ``site`` may use."""
        return {
            name: array
            for name, array in sorted(state.arrays.items())
            if not name.startswith(CODEBOOK) or site in state.access[name.removeprefix(CODEBOOK)]
        }

    def _books(self, state: UEFLState, sites: Sequence[str]) -> dict[str, Arrays]:
        return {site: self.model_for(site, state) for site in sites}

    def _averaged(self, state: UEFLState, trained: Replies) -> Arrays:
        """Return the mean of the network over all sites, and of each book over its users."""
        books = {n: array for n, array in state.arrays.items() if n.startswith(CODEBOOK)}
        arrays = self.average(trained, {n: a for n, a in state.arrays.items() if n not in books})
        for name, book in books.items():
            users = trained.of(state.access[name.removeprefix(CODEBOOK)])
            arrays |= self.average(users, {name: book})
        return arrays

    def _judged(self, state: UEFLState, replies: Replies) -> UEFLState:
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

    def _extended(self, state: UEFLState, found: Replies) -> UEFLState:
        """Add a book for the uncertain sites that found codewords; mark the round in any case."""
        if not state.uncertain:
            return state
        sites, book = [site for site in state.uncertain if site in found], len(state.access)
        state = replace(state, extended={**state.extended, str(state.round + 1): sites})
        if not sites:
            return state
        arrays = {**state.arrays, **self._book(book, state, found.of(sites))}
        access = {**state.access, str(book): sites}
        return replace(state, arrays=arrays, access=access)

    def _refreshed(self, state: UEFLState, found: Replies) -> UEFLState:
        """Re-initialise the first book by the centroids of certain sites, if some found any."""
        certain = [site for site in found if site not in state.uncertain]
        if not certain:
            return state
        arrays = {**state.arrays, **self._book(0, state, found.of(certain))}
        return replace(state, arrays=arrays, refreshed=[*state.refreshed, state.round + 1])

    def _book(self, book: int, state: UEFLState, found: Replies) -> Arrays:
        """Return a book: centroids merged by weighted K-means, or a Gaussian new one."""
        dimension = state.arrays[f"{CODEBOOK}0"].shape[1]
        parts = [
            Centroids(reply.arrays["centroids"], reply.arrays["counts"].astype(np.int64))
            for reply in found.values()
            if reply.arrays
        ]
        where = dimension, self.common.seed, state.round + 1
        return {f"{CODEBOOK}{book}": started_book(book, parts, self.settings, *where)}

    def _centroid_specs(self, site: str, state: UEFLState) -> dict[str, ArraySpec]:
        if not self.settings.sends_centroids(site in state.uncertain, first=not state.entropies):
            return {}
        dimension = state.arrays[f"{CODEBOOK}0"].shape[1]
        return {"centroids": ArraySpec((None, dimension)), "counts": ArraySpec((None,))}

    def _fault_of_centroids(self, reply: Reply) -> str | None:
        found, codes = reply.metrics[NEW_CODEWORDS], self.settings.codes
        features = self.participants.facts[reply.site].sizes()["train"] * self._features
        return centroid_fault(reply.arrays, found, codes, features)

    def why_finished(self, state: UEFLState) -> str | None:
        """Say that no silo is uncertain, where that ends the run."""
        early = self.settings.stop_when_certain and state.round < self.common.rounds
        return self.settings.why_certain(state.round) if early and state.certain else None

    @property
    def _features(self) -> int:
        """Features of one sample, of which a token has one per segment."""
        return self.blueprint.tokens * self.settings.segments

    @classmethod
    def marks(cls, state: UEFLState) -> dict[int, str]:
        """Return where codewords were added, and for whom, and where the first were renewed."""
        return round_marks(state.extended, state.refreshed)

    def disclosures(self) -> Disclosures:
        """Name the weights, codebooks and centroids."""
        return Disclosures(*self.settings.list_disclosures())
