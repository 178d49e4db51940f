"""UEFL (arXiv:2402.18888, algorithm 1): FedAvg of the network, books for those who need them.

Phases of a round: ``train``; in the last round of an iteration also ``uncertainty`` (every site
measures the new global model on validation data) and ``centroids``: uncertain sites for a new book,
and with 'uefl.refresh' certain sites, whose features re-initialise the first book (section 3.2).

Messages: ``arrays`` holds the network by state-dict name and ``codebook.<b>`` (n, c/s) for each
book b that the site may use; a ``train`` reply the same, trained; a ``centroids`` reply
``centroids`` (k, c/s) and ``counts`` (k,), both float32. Personal codebooks never cross the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE, INCOMING, TRAIN, measurement
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.maths.federated_kmeans import Centroids, merge_centroids
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    NEW_CODEWORDS,
    CentroidNotes,
    UEFLSettings,
    gaussian_codebook,
    segment_dimension,
    uncertain_sites,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.ask import Ask, Replies
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.method import Disclosures, Method, State
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply

UNCERTAINTY, CENTROIDS = "uncertainty", "centroids"
ENTROPY = measurement(INCOMING, "val", "entropy")


@dataclass(frozen=True)
class UEFLState(State):
    """The network and the books.

    Attributes:
        iteration: counted from 1.
        access: book -> the sites that use it.
        uncertain: sites found uncertain in the current round.
        certain: whether no site was, at the last check.
        entropies: per check the round, the entropy of each site and those uncertain.
        extended: round -> the sites that got a new book.
        refreshed: rounds after which the first book was re-initialised.
    """

    iteration: int = 1
    access: Mapping[str, Sequence[str]] = field(default_factory=dict)
    uncertain: Sequence[str] = ()
    certain: bool = False
    entropies: Sequence[Mapping[str, Any]] = ()
    extended: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refreshed: Sequence[int] = ()

    def books_for(self, site: str) -> Arrays:
        """Return the network and the books that ``site`` may use."""
        return {
            name: array
            for name, array in sorted(self.arrays.items())
            if not name.startswith(CODEBOOK) or site in self.access[name.removeprefix(CODEBOOK)]
        }


class UEFL(Method):
    """Extends the codebook of uncertain sites after each iteration."""

    settings: UEFLSettings
    title = "UEFL"
    # A book's users may be too few to drop some of them
    capabilities = Capabilities(
        vit=False, initial_weights=True, aggregations=("mean", "norm-clip", "median")
    )
    state_class = UEFLState

    def initial_state(self, task: Task) -> UEFLState:
        """Return initial weights and, if shared, the first book, Gaussian.

        Raises:
            SettingError: uncertainty is to be judged, and a site has no validation samples, or
                fewer features than the first book, which they may re-initialise, has codewords.
        """
        if self.settings.max_iterations > 1:
            for site, facts in self.participants.facts.items():
                self._refuse_small(site, facts.sizes())
        network = starting_network(self.common, task)
        arrays = initial_weights(network)
        dimension = segment_dimension(network.channels, self.settings.segments)
        if not self.settings.personal:
            first = gaussian_codebook(self.settings.codes, dimension, self.common.seed, 0)
            arrays[f"{CODEBOOK}0"] = first.numpy()
        return UEFLState(arrays, access={"0": self.participants.sites()})

    def round(self, state: UEFLState, ask: Ask) -> UEFLState:
        """Train and average; at an iteration's end extend the codebook where it is needed."""
        trained = ask(TRAIN, {site: state.books_for(site) for site in ask.sites})
        state = replace(state, arrays=self._averaged(state, trained), uncertain=())  # eq. 3
        if not self._ends_iteration(state):
            return state
        entropies = ask(  # eq. 8
            UNCERTAINTY,
            {site: state.books_for(site) for site in ask.sites},
            expect={},
            metrics=[ENTROPY],
            fault=_fault_of_entropy,
        )
        state = self._judged(state, entropies)  # eq. 9
        asked = self._asked_for_centroids(state, ask.sites)
        replies = ask(
            CENTROIDS,
            {site: state.books_for(site) for site in asked},
            expect={site: self._centroid_specs(site, state) for site in asked},
            notes={site: CentroidNotes(refreshes=site not in state.uncertain) for site in asked},
            metrics=[NEW_CODEWORDS],
            fault=self._fault_of_centroids,
        )
        return self._refreshed(self._extended(state, replies), replies)  # section 3.2

    def evaluate(self, state: UEFLState, ask: Ask) -> None:
        """Have the network measured with the books that each site may use."""
        ask(EVALUATE, {site: state.books_for(site) for site in ask.sites}, expect={})

    def _averaged(self, state: UEFLState, trained: Replies) -> dict[str, NDArray]:
        """Return the mean of the network over all sites, and of each book over its users."""
        network = {n: array for n, array in state.arrays.items() if not n.startswith(CODEBOOK)}
        arrays = self.average(trained, network)
        for name in (n for n in state.arrays if n.startswith(CODEBOOK)):
            users = trained.of(state.access[name.removeprefix(CODEBOOK)])
            book = {name: state.arrays[name]}
            arrays |= self.average(users, book) if users else book
        return arrays

    def _ends_iteration(self, state: UEFLState) -> bool:
        """Tell whether the current round is an iteration's last and another one may follow."""
        rounds = self.common.rounds
        return self.settings.ends_iteration(state.iteration, state.round + 1, rounds)

    def _judged(self, state: UEFLState, replies: Replies) -> UEFLState:
        entropies = {site: reply.metrics[ENTROPY] for site, reply in replies.items()}
        uncertain = uncertain_sites(entropies, self.settings.gamma)
        check = {"round": state.round + 1, "entropies": entropies, "uncertain": uncertain}
        return replace(
            state,
            iteration=state.iteration + 1,
            uncertain=uncertain,
            certain=not uncertain,
            entropies=[*state.entropies, check],
        )

    def _asked_for_centroids(self, state: UEFLState, sites: Sequence[str]) -> Sequence[str]:
        """Return all sites; without a refresh, or in a run's last round, the uncertain ones."""
        over = self.settings.stop_when_certain and state.certain
        return state.uncertain if over or self.settings.refresh == "none" else sites

    def _extended(self, state: UEFLState, replies: Replies) -> UEFLState:
        """Add a book for the sites that found codewords for it; the round is marked in any case."""
        if not state.uncertain:
            return state
        book = str(len(state.access))
        sites = [site for site in state.uncertain if _found_codewords(replies, site)]
        state = replace(state, extended={**state.extended, str(state.round + 1): sites})
        if not sites:
            return state
        arrays = dict(state.arrays)
        if not self.settings.personal:
            arrays[f"{CODEBOOK}{book}"] = self._new_book(state, replies.of(sites))
        return replace(state, arrays=arrays, access={**state.access, book: sites})

    def _refreshed(self, state: UEFLState, replies: Replies) -> UEFLState:
        """Re-initialise the first book by the centroids of certain sites, if some sent any."""
        certain = [site for site in replies if site not in state.uncertain]
        sites = [site for site in certain if _found_codewords(replies, site)]
        if not sites:
            return state
        arrays = dict(state.arrays)
        if not self.settings.personal:
            arrays[f"{CODEBOOK}0"] = self._merged(state, "refresh", replies.of(sites))
        return replace(state, arrays=arrays, refreshed=[*state.refreshed, state.round + 1])

    def _new_book(self, state: UEFLState, replies: Replies) -> NDArray:
        if self.settings.codeword_start == "kmeans":
            return self._merged(state, "merge", replies)
        dimension, book = state.arrays[f"{CODEBOOK}0"].shape[1], len(state.access)
        codewords = gaussian_codebook(self.settings.codes, dimension, self.common.seed, book)
        start: NDArray = codewords.numpy()
        return start

    def _merged(self, state: UEFLState, purpose: str, replies: Replies) -> NDArray:
        """Return the sites' centroids merged into one book by weighted K-means."""
        parts = [
            Centroids(reply.arrays["centroids"], reply.arrays["counts"].astype(np.int64))
            for reply in replies.values()
        ]
        seed = derive_seed(self.common.seed, purpose, state.round + 1)
        return merge_centroids(parts, self.settings.codes, seed)

    def _centroid_specs(self, site: str, state: UEFLState) -> dict[str, ArraySpec]:
        if not self.settings.sends_centroids(site in state.uncertain):
            return {}
        dimension = state.arrays[f"{CODEBOOK}0"].shape[1]
        return {"centroids": ArraySpec((None, dimension)), "counts": ArraySpec((None,))}

    def _fault_of_centroids(self, reply: Reply) -> str | None:
        """Refuse counts that cannot be: of too many codes, or of more features than there are."""
        if not reply.arrays:
            return None
        centroids, counts = reply.arrays["centroids"], reply.arrays["counts"]
        whole = (counts >= 1).all() and (counts == np.floor(counts)).all()
        if not len(centroids) == len(counts) == reply.metrics[NEW_CODEWORDS] or not whole:
            return f"{len(centroids)} centroids came with counts {counts.tolist()}"
        if len(counts) > self.settings.codes:
            return f"{len(counts)} centroids came, more than 'uefl.codes' {self.settings.codes}"
        samples = self.participants.facts[reply.site].sizes()["train"]
        if (total := float(counts.sum(dtype=np.float64))) > samples * self._features:
            return f"its centroids stand for {total:g} features, more than it has"
        return None

    def why_finished(self, state: UEFLState) -> str | None:
        """Say that no silo is uncertain, where that ends the run."""
        certain = self.settings.stop_when_certain and state.certain
        if not certain or state.round >= self.common.rounds:
            return None
        return (
            f"after round {state.round} no silo's entropy is above {1 + self.settings.gamma:g} "
            "times the least: the run ends ('uefl.stop-when-certain')"
        )

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: UEFLSettings) -> None:
        """Refuse a run without dropout, or one that ends before a codebook could be extended."""
        settings.refuse_exact_centroids(common)
        if common.dropout == 0 or common.mc_passes == 0:
            raise SettingError(
                f"settings 'dropout' ({common.dropout:g}) and 'mc-passes' ({common.mc_passes}) "
                "must be above 0: UEFL's uncertainty is that of Monte Carlo dropout"
            )
        if settings.max_iterations > 1 and common.rounds <= settings.iteration_rounds:
            raise SettingError(
                f"setting 'rounds' is {common.rounds}, not more than 'uefl.iteration-rounds' "
                f"({settings.iteration_rounds}): no codebook would ever be extended; raise "
                "'rounds', lower 'uefl.iteration-rounds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )

    @classmethod
    def why_unfit(
        cls, common: CommonSettings, settings: UEFLSettings, facts: SiteFacts
    ) -> str | None:
        """Refuse a site that withholds what its uncertainty would be judged by."""
        if settings.max_iterations == 1 or "val" in facts.measured:
            return None
        return (
            f"site {facts.site} withholds its measurements on validation samples, on which UEFL "
            "judges uncertainty: leave the site out, or set 'uefl.max-iterations' to 1 (DisFL)"
        )

    def _refuse_small(self, site: str, sizes: Mapping[str, int]) -> None:
        if sizes.get("val") == 0:
            raise SettingError(
                f"site {site} has no validation samples, on which UEFL judges uncertainty: set "
                "'val-folds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )
        features = sizes["train"] * self._features
        if self.settings.refresh == "kmeans" and features < self.settings.codes:
            raise SettingError(
                f"site {site} has {features} features for 'uefl.codes' {self.settings.codes} "
                "codewords: lower 'uefl.codes', or set 'uefl.refresh' to 'none'"
            )

    @cached_property
    def _features(self) -> int:
        """Features of one sample, of which a token has one per segment."""
        with torch.device("meta"):  # only the size is wanted, no weight
            network = build_classifier(self.common, self.participants.task())
        return int(network.tokens) * self.settings.segments

    @classmethod
    def marks(cls, state: UEFLState) -> dict[int, str]:
        """Return where codewords were added, and for whom, and where the first were renewed."""
        none = "no new codewords: no cluster was large enough ('uefl.centroid-min-count')"
        marks = {
            int(round_): f"new codewords for {', '.join(sites)}" if sites else none
            for round_, sites in state.extended.items()
        }
        for round_ in state.refreshed:
            refreshed = "first codewords re-initialised"
            marks[round_] = f"{marks[round_]}; {refreshed}" if round_ in marks else refreshed
        return dict(sorted(marks.items()))

    def disclosures(self) -> Disclosures:
        """Name the weights and, unless they are personal, codebooks and centroids."""
        sentences = ["all weights and batch-norm statistics of the network, each round"]
        if not self.settings.personal:
            sentences.append("the codebooks that the site may use, trained, each round")
        sends = tuple(map(self.settings.sends_centroids, (True, False)))
        if any(sends):
            when: dict[tuple[bool, ...], str] = {
                (True, False): "when uncertain",
                (False, True): "when certain",
            }
            sentences.append(
                f"{when.get(sends, 'after each iteration')}: centroids of the site's features with "
                f"counts, none of fewer than {self.settings.centroid_min_count} features"
            )
        return Disclosures(*sentences)


def _found_codewords(replies: Mapping[str, Reply], site: str) -> bool:
    return site in replies and replies[site].metrics[NEW_CODEWORDS] > 0


def _fault_of_entropy(reply: Reply) -> str | None:
    entropy = reply.metrics[ENTROPY]
    return f"metric '{ENTROPY}' is {entropy}, less than 0" if entropy < 0 else None
