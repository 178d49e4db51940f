"""UEFL (arXiv:2402.18888, algorithm 1): FedAvg of the network, books for those who need them.

Phases of a round: ``train``; in the last round of an iteration also ``uncertainty`` (every site
measures the new global model on validation data) and ``centroids``: uncertain sites for a new book,
and with 'uefl.refresh' certain sites, by whose features the first book is laid anew (section 3.2).

Messages: ``arrays`` holds the network by state-dict name and ``codebook.<b>`` (n, c/s) for each
book b that the site may use; a ``train`` reply the same, trained; a ``centroids`` reply
``centroids`` (k, c/s) and ``counts`` (k,), both float32. Personal codebooks never cross the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import INCOMING, TRAIN, measurement
from fedsilo.models.contract.notes import Notes
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
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.wire.records import NDArray

UNCERTAINTY, CENTROIDS = "uncertainty", "centroids"
ENTROPY = measurement(INCOMING, "val", "entropy")


class UEFL(Method):
    """Extends the codebook of uncertain sites after each iteration.

    The round state's extras: ``iteration`` (from 1), ``access`` (book -> sites), ``uncertain``
    (sites found uncertain in the current round), ``certain`` (none was, at the last check),
    ``entropies`` (per check: round and entropy per site), ``extended`` (round -> sites) and
    ``refreshed`` (rounds after which the first book was laid anew).
    """

    settings: UEFLSettings
    title = "UEFL"
    # A book's users may be too few to drop some of them
    capabilities = Capabilities(
        vit=False, initial_weights=True, aggregations=("mean", "norm-clip", "median")
    )

    def disclosures(self) -> Disclosures:
        """Name the weights and, unless they are personal, codebooks and centroids."""
        sentences = ["all weights and batch-norm statistics of the network, each round"]
        if not self._personal():
            sentences.append("the codebooks that the site may use, trained, each round")
        sends = self._by_kmeans(uncertain=True), self._by_kmeans(uncertain=False)
        if any(sends):
            when = {(True, False): "when uncertain", (False, True): "when certain"}
            sentences.append(
                f"{when.get(sends, 'after each iteration')}: centroids of the site's features with "
                f"counts, none of fewer than {self.settings.centroid_min_count} features"
            )
        return Disclosures(*sentences)

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: UEFLSettings) -> None:
        """Refuse a run without dropout, or one that ends before a codebook could be extended."""
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
    def why_unfit(cls, common: CommonSettings, settings: UEFLSettings, facts: SiteFacts) -> str:
        """Refuse a site that withholds what its uncertainty would be judged by."""
        if settings.max_iterations == 1 or "val" in facts.measured:
            return ""
        return (
            f"site {facts.site} withholds its measurements on validation samples, on which UEFL "
            "judges uncertainty: leave the site out, or set 'uefl.max-iterations' to 1 (DisFL)"
        )

    def initial_state(self, task: Task) -> RoundState:
        """Return initial weights and, if shared, the first book, Gaussian.

        Raises:
            SettingError: uncertainty is to be judged, and a site has no validation samples, or
                fewer features than the first book, which they may lay anew, has codewords.
        """
        if self.settings.max_iterations > 1:
            for site, facts in self.participants.facts.items():
                self._refuse_small(site, facts.sizes())
        network = starting_network(self.common, task)
        arrays = initial_weights(network)
        dimension = segment_dimension(network.channels, self.settings.segments)
        if not self._personal():
            first = gaussian_codebook(self.settings.codes, dimension, self.common.seed, 0)
            arrays[f"{CODEBOOK}0"] = first.numpy()
        extras = {
            "iteration": 1,
            "access": {"0": self.participants.sites()},
            "uncertain": [],
            "certain": False,
            "entropies": [],
            "extended": {},
            "refreshed": [],
        }
        return RoundState(0, arrays, extras)

    def _refuse_small(self, site: str, sizes: Mapping[str, int]) -> None:
        if sizes.get("val") == 0:
            raise SettingError(
                f"site {site} has no validation samples, on which UEFL judges uncertainty: set "
                "'val-folds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )
        features = sizes["train"] * self._features
        if self.settings.refresh == "kmeans" and features < self.settings.codes:
            raise SettingError(
                f"site {site} has {features} features to lay 'uefl.codes' {self.settings.codes} "
                "codewords by: lower 'uefl.codes', or set 'uefl.refresh' to 'none'"
            )

    @classmethod
    def marks(cls, state: RoundState) -> dict[int, str]:
        """Return where codewords were added, and for whom, and where the first were laid anew."""
        none = "no new codewords: no cluster was large enough ('uefl.centroid-min-count')"
        marks = {
            int(round_): f"new codewords for {', '.join(sites)}" if sites else none
            for round_, sites in state.extras["extended"].items()
        }
        for round_ in state.extras.get("refreshed", ()):  # an older checkpoint has none
            told = "first codewords laid anew"
            marks[round_] = f"{marks[round_]}; {told}" if round_ in marks else told
        return dict(sorted(marks.items()))

    def why_finished(self, state: RoundState) -> str:
        """Say that no silo is uncertain, where that ends the run."""
        certain = self.settings.stop_when_certain and state.extras["certain"]
        if not certain or state.round >= self.common.rounds:
            return ""
        return (
            f"after round {state.round} no silo's entropy is above {1 + self.settings.gamma:g} "
            "times the least: the run ends ('uefl.stop-when-certain')"
        )

    def phases(self, state: RoundState) -> Sequence[str]:
        """Return the three phases in an iteration's last round, else ``train`` alone."""
        if state.round + 1 == self._iteration_end(state) and self._may_extend(state):
            return (TRAIN, UNCERTAINTY, CENTROIDS)
        return (TRAIN,)

    def recipients(self, phase: str, state: RoundState) -> list[str]:
        """Ask all sites, but for centroids certain ones only if they refresh the first book."""
        over = self.settings.stop_when_certain and state.extras["certain"]
        if phase == CENTROIDS and (over or self.settings.refresh == "none"):
            return list(state.extras["uncertain"])
        return self.participants.sites()

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Tell a site that is asked for centroids what for."""
        if phase != CENTROIDS:
            return Notes()
        return CentroidNotes(refreshes=site not in state.extras["uncertain"])

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the network and the books that ``site`` may use."""
        return {name: state.arrays[name] for name in self._names_for(site, state)}

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect what was sent, trained; centroids with counts; or metrics alone."""
        if phase == TRAIN:
            return {
                name: ArraySpec(state.arrays[name].shape) for name in self._names_for(site, state)
            }
        if phase == CENTROIDS and self._sends_centroids(site, state):
            dimension = state.arrays[f"{CODEBOOK}0"].shape[1]
            return {"centroids": ArraySpec((None, dimension)), "counts": ArraySpec((None,))}
        return {}

    def rejection_reason(self, phase: str, reply: SiteReply, state: RoundState) -> str | None:
        """Refuse a reply without what its phase is for, or counts that cannot be."""
        needed = {UNCERTAINTY: ENTROPY, CENTROIDS: NEW_CODEWORDS}.get(phase)
        if needed and needed not in reply.metrics():
            return f"metric '{needed}' is missing"
        if phase == UNCERTAINTY and reply.metric(ENTROPY) < 0:
            return f"metric '{ENTROPY}' is {reply.metric(ENTROPY)}, less than 0"
        if phase == CENTROIDS and self._sends_centroids(reply.site, state):
            centroids, counts = reply.array("centroids"), reply.array("counts")
            whole = (counts >= 1).all() and (counts == np.floor(counts)).all()
            if not len(centroids) == len(counts) == reply.metric(NEW_CODEWORDS) or not whole:
                return f"{len(centroids)} centroids came with counts {counts.tolist()}"
            return self._why_too_many(reply.site, counts)
        return None

    def _why_too_many(self, site: str, counts: NDArray) -> str | None:
        """Refuse more centroids than codes, and more features behind them than the site has."""
        if len(counts) > self.settings.codes:
            return f"{len(counts)} centroids came, more than 'uefl.codes' {self.settings.codes}"
        samples = self.participants.facts[site].sizes()["train"]
        noise = 10 * self.common.clip_norm * self.common.noise_multiplier * len(counts)
        if (total := float(counts.sum(dtype=np.float64))) > samples * self._features + noise:
            return f"its centroids stand for {total:g} features, more than it has"
        return None

    @cached_property
    def _features(self) -> int:
        """Features of one sample, of which a token has one per segment."""
        with torch.device("meta"):  # only the size is wanted, no weight
            network = build_classifier(self.common, self.participants.task())
        return int(network.tokens) * self.settings.segments

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Average (eq. 3), judge uncertainty (eq. 9), or extend the codebook."""
        if phase == TRAIN:
            arrays = self._averaged(state, replies)
            return RoundState(state.round, arrays, {**state.extras, "uncertain": []})
        if phase == UNCERTAINTY:
            return RoundState(state.round, state.arrays, self._judged(state, replies))
        return self._refreshed(self._extended(state, replies), replies)

    def _averaged(self, state: RoundState, replies: Mapping[str, SiteReply]) -> dict[str, NDArray]:
        books = [name for name in state.arrays if name.startswith(CODEBOOK)]
        network = {name: array for name, array in state.arrays.items() if name not in books}
        arrays = self.average(replies, network)
        for name in books:
            users = {
                site: reply
                for site, reply in replies.items()
                if site in state.extras["access"][name.removeprefix(CODEBOOK)]
            }
            book = {name: state.arrays[name]}
            arrays |= self.average(users, book) if users else book
        return arrays

    def _judged(self, state: RoundState, replies: Mapping[str, SiteReply]) -> dict[str, Any]:
        entropies = {site: reply.metric(ENTROPY) for site, reply in replies.items()}
        uncertain = uncertain_sites(entropies, self.settings.gamma)
        check = {"round": state.round + 1, "entropies": entropies, "uncertain": uncertain}
        return {
            **state.extras,
            "iteration": state.extras["iteration"] + 1,
            "uncertain": uncertain,
            "certain": not uncertain,
            "entropies": [*state.extras["entropies"], check],
        }

    def _extended(self, state: RoundState, replies: Mapping[str, SiteReply]) -> RoundState:
        """Add a book for the sites that have codewords for it; none: the round is only marked."""
        if not state.extras["uncertain"]:
            return state
        book, round_ = str(len(state.extras["access"])), str(state.round + 1)
        sites = [site for site in state.extras["uncertain"] if _laid(replies, site)]
        extras = {**state.extras, "extended": {**state.extras["extended"], round_: sites}}
        if not sites:
            return RoundState(state.round, state.arrays, extras)
        arrays = dict(state.arrays)
        if not self._personal():
            arrays[f"{CODEBOOK}{book}"] = self._new_book(state, [replies[site] for site in sites])
        extras["access"] = {**state.extras["access"], book: sites}
        return RoundState(state.round, arrays, extras)

    def _refreshed(self, state: RoundState, replies: Mapping[str, SiteReply]) -> RoundState:
        """Lay the first book anew by the certain sites' centroids; none: it stays as trained."""
        certain = [site for site in replies if site not in state.extras["uncertain"]]
        sites = [site for site in certain if _laid(replies, site)]
        if not sites:
            return state
        rounds = [*state.extras.get("refreshed", ()), state.round + 1]
        arrays = dict(state.arrays)
        if not self._personal():
            arrays[f"{CODEBOOK}0"] = self._merged(state, "refresh", [replies[s] for s in sites])
        return RoundState(state.round, arrays, {**state.extras, "refreshed": rounds})

    def _new_book(self, state: RoundState, replies: Sequence[SiteReply]) -> NDArray:
        if self.settings.codeword_start == "kmeans":
            return self._merged(state, "merge", replies)
        dimension, book = state.arrays[f"{CODEBOOK}0"].shape[1], len(state.extras["access"])
        codewords = gaussian_codebook(self.settings.codes, dimension, self.common.seed, book)
        start: NDArray = codewords.numpy()
        return start

    def _merged(self, state: RoundState, what_for: str, replies: Sequence[SiteReply]) -> NDArray:
        parts = [
            Centroids(reply.array("centroids"), reply.array("counts").astype(np.int64))
            for reply in replies
        ]
        seed = derive_seed(self.common.seed, what_for, state.round + 1)
        return merge_centroids(parts, self.settings.codes, seed)

    def _names_for(self, site: str, state: RoundState) -> list[str]:
        return [
            name
            for name in sorted(state.arrays)
            if not name.startswith(CODEBOOK)
            or site in state.extras["access"][name.removeprefix(CODEBOOK)]
        ]

    def _iteration_end(self, state: RoundState) -> int:
        later: int = state.extras["iteration"] - 1
        return self.settings.iteration_rounds + later * self.settings.extension_rounds

    def _may_extend(self, state: RoundState) -> bool:
        more: bool = state.extras["iteration"] < self.settings.max_iterations
        return more and state.round + 1 < self.common.rounds

    def _sends_centroids(self, site: str, state: RoundState) -> bool:
        checks = state.extras["entropies"]
        judged = bool(checks) and checks[-1]["round"] == state.round + 1
        if not judged:  # it may become either
            return self._by_kmeans(uncertain=True) or self._by_kmeans(uncertain=False)
        return self._by_kmeans(uncertain=site in state.extras["uncertain"])

    def _by_kmeans(self, *, uncertain: bool) -> bool:
        """Tell whether K-means at such sites lays codewords that leave them."""
        settings = self.settings
        laid = settings.codeword_start if uncertain else settings.refresh
        return not self._personal() and laid == "kmeans"

    def _personal(self) -> bool:
        return self.settings.codebooks == "personal"


def _laid(replies: Mapping[str, SiteReply], site: str) -> bool:
    return site in replies and replies[site].metric(NEW_CODEWORDS) > 0
