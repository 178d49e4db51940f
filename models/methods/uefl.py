"""UEFL, the uncertainty-based extensible codebook (Zhang, Cao and Liu 2025, arXiv:2402.18888).

Encoder -> tokens z (batch, l, c) -> split into s segments -> nearest codeword (eq. 4) ->
straight-through -> classifier.

Equations (arXiv:2402.18888):
  (1) tokens, codewords, prediction -> models.networks.site_network.SiteNetwork.forward
  (2) local training -> client_app.training.loop.train_locally
  (3) mean weighted by samples -> strategies.loop.ask.weighted_mean
  (4) nearest codewords -> models.methods.uefl.nearest_codewords
  (4, gradient) straight-through estimator -> models.methods.uefl.straight_through
  (5) task loss -> models.networks.site_network.TokenClassifier.loss
  (6) codebook loss -> models.methods.uefl.codebook_loss
  (7) total loss -> models.methods.uefl.UEFLNetwork.loss
  (8) predictive entropy -> models.maths.mc_dropout.predictive_entropy
  (9) threshold of uncertainty -> models.methods.uefl.uncertain_sites
  (11) perplexity of code use -> models.methods.uefl.perplexity
  (section 3.2, start) new codewords by K-means -> models.maths.federated_kmeans.merge_centroids
  (section 3.2, refresh) first book refreshed -> strategies.methods.uefl.UEFL.round
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import INCOMING, Notes, measurement
from fedsilo.models.contract.own_settings import OwnSettings
from fedsilo.models.contract.seeding import generator
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import setting
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.maths.federated_kmeans import Centroids, FloatArray, local_centroids
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier

CODEBOOK = "codebook."  # the wire name of book b is codebook.<b>
NEW_CODEWORDS = "new-codewords"  # how many codewords a site started, in a centroids reply
ENTROPY = measurement(INCOMING, "val", "entropy")  # in an uncertainty reply


@dataclass(frozen=True)
class UEFLSettings(OwnSettings):
    """UEFL's own settings; defaults are the paper's for MNIST."""

    gamma: float = setting(
        0.3, "a silo is uncertain above (1+gamma) times the least entropy", minimum=0.0
    )
    codes: int = setting(32, "codewords of the first book and of each extension", minimum=1)
    segments: int = setting(1, "parts that a token is split into", minimum=1)
    codebook_weight: float = setting(1.0, "weight of |c - sg(z)|^2", minimum=0.0)
    commitment_weight: float = setting(0.25, "weight of |z - sg(c)|^2", minimum=0.0)
    iteration_rounds: int = setting(20, "rounds of the first iteration", minimum=1)
    extension_rounds: int = setting(5, "rounds of each later iteration", minimum=1)
    max_iterations: int = setting(3, "iterations at most; 1 is DisFL, never extended", minimum=1)
    stop_when_certain: bool = setting(True, "end the run once no silo is uncertain")
    codebooks: str = setting(
        "shared", "shared, or personal: never averaged nor sent", choices=("shared", "personal")
    )
    codeword_start: str = setting(
        "kmeans", "start of new codewords", choices=("kmeans", "gaussian")
    )
    refresh: str = setting(
        "kmeans",
        "the first book after an iteration: centroids of certain silos' features, or as trained",
        choices=("kmeans", "none"),
    )
    centroid_min_count: int = setting(10, "centroids of fewer features stay at the silo", minimum=1)

    @property
    def personal(self) -> bool:
        """Whether each site has books of its own, which it never sends."""
        return self.codebooks == "personal"

    def refuse_exact_centroids(self, common: CommonSettings) -> None:
        """Refuse centroids of features where training is private: they have no noise.

        Raises:
            SettingError: names the settings by which none leaves a site.
        """
        if common.is_private() and "kmeans" in (self.codeword_start, self.refresh):
            raise SettingError(
                "setting 'sample-clip-norm' is set, and centroids of a site's features have no "
                "noise: set 'uefl.codeword-start' to 'gaussian' and 'uefl.refresh' to 'none'"
            )

    def sends_centroids(self, uncertain: bool) -> bool:
        """Tell whether uncertain or else certain sites send codewords, found by K-means."""
        found = self.codeword_start if uncertain else self.refresh
        return not self.personal and found == "kmeans"

    @property
    def senders(self) -> tuple[bool, bool]:
        """Whether uncertain sites send codewords, and whether certain ones do."""
        return self.sends_centroids(True), self.sends_centroids(False)

    def ends_iteration(self, iteration: int, round_: int, rounds: int) -> bool:
        """Tell whether ``round_`` is the last of an iteration, from 1, and another may follow."""
        end = self.iteration_rounds + (iteration - 1) * self.extension_rounds
        return round_ == end and iteration < self.max_iterations and round_ < rounds

    def why_unfit(self, facts: SiteFacts) -> str | None:
        """Refuse a site that withholds what its uncertainty would be judged by."""
        if self.max_iterations == 1 or "val" in facts.measured:
            return None
        return (
            f"site {facts.site} withholds its measurements on validation samples, on which UEFL "
            "judges uncertainty: leave the site out, or set 'uefl.max-iterations' to 1 (DisFL)"
        )

    def refuse_small(self, site: str, sizes: Mapping[str, int], features: int) -> None:
        """Refuse a site that is too small, by its samples by split and ``features`` to train on.

        Raises:
            SettingError: it has no validation samples, or fewer features than a book codewords.
        """
        if self.max_iterations > 1 and sizes.get("val") == 0:
            raise SettingError(
                f"site {site} has no validation samples, on which UEFL judges uncertainty: set "
                "'val-folds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )
        if self.max_iterations > 1 and self.refresh == "kmeans" and features < self.codes:
            raise SettingError(
                f"site {site} has {features} features for 'uefl.codes' {self.codes} "
                "codewords: lower 'uefl.codes', or set 'uefl.refresh' to 'none'"
            )

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Refuse a run without dropout, or one that ends before a codebook could be extended."""
        self.refuse_exact_centroids(common)
        if common.dropout == 0 or common.mc_passes == 0:
            raise SettingError(
                f"settings 'dropout' ({common.dropout:g}) and 'mc-passes' ({common.mc_passes}) "
                "must be above 0: UEFL's uncertainty is that of Monte Carlo dropout"
            )
        if self.max_iterations > 1 and common.rounds <= self.iteration_rounds:
            raise SettingError(
                f"setting 'rounds' is {common.rounds}, not more than 'uefl.iteration-rounds' "
                f"({self.iteration_rounds}): no codebook would ever be extended; raise "
                "'rounds', lower 'uefl.iteration-rounds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )


@dataclass(frozen=True)
class CentroidNotes(Notes):
    """Whether a site's centroids refresh the first book, or start a new one."""

    refreshes: bool = False


@dataclass(frozen=True)
class Discretised:
    """Codes (batch, l, s) of the nearest codewords, and those codewords as (batch, l, c)."""

    codes: Tensor
    codewords: Tensor


def nearest_codewords(tokens: Tensor, codebook: Tensor, segments: int = 1) -> Discretised:
    """Replace each segment of tokens z (batch, l, c) by the nearest codeword in L2 (eq. 4).

    The codebook, (n, c / segments), is shared by all segments.
    """
    batch, length, channels = tokens.shape
    parts = tokens.reshape(-1, channels // segments)
    with torch.no_grad():
        # |z|^2 is the same for all codewords: the argmin needs only |c|^2 - 2 <z, c>
        squared = codebook.square().sum(dim=1) - 2 * parts @ codebook.T
        codes = squared.argmin(dim=1)
    return Discretised(
        codes=codes.reshape(batch, length, segments),
        codewords=codebook[codes].reshape(batch, length, channels),
    )


def straight_through(tokens: Tensor, codewords: Tensor) -> Tensor:
    """Return ``codewords`` in value; the gradient goes to ``tokens`` unchanged."""
    # The argmin has no gradient, so the encoder takes the one of the codewords for its own (Bengio
    # et al. 2013). The codewords get none here; only the codebook loss moves them
    return tokens + (codewords - tokens).detach()


def codebook_loss(
    tokens: Tensor, codewords: Tensor, codebook_weight: float, commitment_weight: float
) -> Tensor:
    """Return eq. 6, mean-reduced.

    The paper prints beta on the other term; VQ-VAE and the authors' code have it here.
    """
    pull_codewords = nn.functional.mse_loss(codewords, tokens.detach())
    commit_tokens = nn.functional.mse_loss(tokens, codewords.detach())
    return codebook_weight * pull_codewords + commitment_weight * commit_tokens


def perplexity(counts: Tensor) -> float:
    """Return the exponential of the entropy of code use (eq. 11); ``counts`` is (n,)."""
    share = counts.double() / counts.sum()
    return math.exp(torch.special.entr(share).sum().item())


def uncertain_sites(entropies: Mapping[str, float], gamma: float) -> list[str]:
    """Return the sites, sorted, with e_k > (1 + gamma) * min_j e_j (the negation of eq. 9)."""
    threshold = (1 + gamma) * min(entropies.values())
    return sorted(site for site, entropy in entropies.items() if entropy > threshold)


def gaussian_codebook(codes: int, dimension: int, seed: int, book: int) -> Tensor:
    """Return (codes, dimension) standard normal numbers, keyed on seed and book."""
    return torch.randn(codes, dimension, generator=generator(seed, "codebook", book))


def clustered(tokens: Tensor, settings: UEFLSettings, seed: int, min_samples: int) -> Centroids:
    """Return the centroids of tokens (n, l, c), at which new codewords start (section 3.2).

    Those of fewer features than 'uefl.centroid-min-count', or of fewer samples, are left out.
    """
    features = tokens.reshape(-1, tokens.shape[-1] // settings.segments)
    return local_centroids(
        features.numpy(),
        settings.codes,
        seed,
        settings.centroid_min_count,
        each=len(features) // len(tokens),
        min_samples=min_samples,
    )


def centroid_fault(
    centres: FloatArray, counts: FloatArray, told: float, codes: int, features: float
) -> str | None:
    """Return why centroids (k, c / s) with counts (k,) cannot be a site's, or None if they can.

    They are as many as the site has ``told``, at most ``codes``, and together stand for no more
    than its ``features``.
    """
    whole = (counts >= 1).all() and (counts == np.floor(counts)).all()
    if not len(centres) == len(counts) == told or not whole:
        return f"{len(centres)} centroids came with counts {counts.tolist()}"
    if len(counts) > codes:
        return f"{len(counts)} centroids came, more than 'uefl.codes' {codes}"
    if (total := float(counts.sum(dtype=np.float64))) > features:
        return f"its centroids stand for {total:g} features, more than it has"
    return None


def round_marks(extended: Mapping[str, Sequence[str]], refreshed: Sequence[int]) -> dict[int, str]:
    """Return in words after which rounds books were ``extended`` for sites, or ``refreshed``."""
    none = "no new codewords: no cluster was large enough ('uefl.centroid-min-count')"
    marks = {
        int(round_): [f"new codewords for {', '.join(sites)}" if sites else none]
        for round_, sites in extended.items()
    }
    for round_ in refreshed:
        marks.setdefault(round_, []).append("first codewords re-initialised")
    return {round_: "; ".join(words) for round_, words in sorted(marks.items())}


class UEFLNetwork(SiteNetwork):
    """A classifier whose head reads codewords; ``codebooks`` holds the books this site may use."""

    def __init__(
        self, classifier: TokenClassifier, books: Mapping[str, Tensor], settings: UEFLSettings
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.codebooks = nn.ParameterDict(
            {name: nn.Parameter(books[name].clone()) for name in sorted(books, key=int)}
        )
        self.settings = settings

    def codebook(self) -> Tensor:
        """Return all books, concatenated in order, (n, c / s)."""
        return torch.cat([self.codebooks[name] for name in sorted(self.codebooks, key=int)])

    def books(self) -> dict[str, Tensor]:
        """Return the books by the names of their arrays."""
        return {f"{CODEBOOK}{name}": book.detach() for name, book in self.codebooks.items()}

    def encode(self, inputs: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to tokens z (batch, l, c)."""
        return self.classifier.encode(inputs)

    def nearest(self, tokens: Tensor) -> Discretised:
        """Return the nearest codewords of ``tokens`` in this site's books, in float32."""
        with torch.autocast(tokens.device.type, enabled=False):  # bf16 would choose other codes
            return nearest_codewords(tokens.float(), self.codebook(), self.settings.segments)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the codewords in place of ``tokens``, (batch, l, c), straight-through."""
        return straight_through(tokens, self.nearest(tokens).codewords)

    def classify(self, features: Tensor) -> Tensor:
        """Map codewords (batch, l, c) to logits (batch, classes)."""
        return self.classifier.classify(features)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return eq. 7, the criterion and the codebook loss of a batch."""
        tokens, settings = self.encode(inputs), self.settings
        codewords = self.nearest(tokens).codewords
        logits = self.classify(straight_through(tokens, codewords))
        return self.classifier.criterion(logits, labels) + codebook_loss(
            tokens.float(), codewords, settings.codebook_weight, settings.commitment_weight
        )


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


def segment_dimension(channels: int, segments: int) -> int:
    """Return c / s.

    Raises:
        SettingError: ``segments`` does not divide the encoder's channels.
    """
    if channels % segments:
        raise SettingError(
            f"setting 'segments' is {segments}, which does not divide the encoder's "
            f"{channels} channels; choose a divisor"
        )
    return channels // segments
