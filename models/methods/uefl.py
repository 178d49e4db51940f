"""UEFL, the uncertainty-based extensible codebook (Zhang, Cao and Liu 2025, arXiv:2402.18888).

Encoder -> tokens z (batch, l, c) -> split into s segments -> nearest codeword (eq. 4) ->
straight-through -> classifier.

Equations (arXiv:2402.18888):
  (1) tokens, codewords, prediction -> models.networks.site_network.SiteNetwork.forward
  (2) local training -> client_app.training.loop.LocalTraining.run
  (3) mean weighted by samples -> strategies.loop.ask.weighted_mean
  (4) nearest codewords -> models.maths.codebook.nearest_codewords
  (4, gradient) straight-through estimator -> models.maths.codebook.straight_through
  (5) task loss -> models.networks.site_network.TokenClassifier.loss
  (6) codebook loss -> models.maths.codebook.codebook_loss
  (7) total loss -> models.methods.uefl_network.UEFLNetwork.loss
  (8) predictive entropy -> models.maths.mc_dropout.predictive_entropy
  (9) threshold of uncertainty -> models.methods.uefl.uncertain_sites
  (11) perplexity of code use -> models.maths.codebook.perplexity
  (section 3.2, first book) standard normal codewords -> models.methods.uefl_books.gaussian_codebook
  (section 3.2, features) each silo's K-means -> models.methods.uefl_books.cluster_tokens
  (section 3.2, start) new codewords by K-means -> models.maths.federated_kmeans.merge_centroids
  (section 3.2, refresh) first book refreshed -> strategies.methods.uefl.UEFL.round
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import INCOMING, Notes, measurement
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.site_facts import SiteFacts
from fedsilo.core.tasks import CLASSIFICATION

CODEBOOK = "codebook."  # the wire name of book b is codebook.<b>
NEW_CODEWORDS = "new-codewords"  # how many codewords a site started, in a centroids reply
ENTROPY = measurement(INCOMING, "val", "entropy")  # key in an uncertainty reply
# Weight of |c - sg(z)|^2 in eq. 6, which pulls codewords to tokens
CODEBOOK_WEIGHT = 1.0
# Weight beta of |z - sg(c)|^2 in eq. 6, which pulls tokens to codewords, as in the authors' code
COMMITMENT_WEIGHT = 0.25


@dataclass(frozen=True)
class UEFLSettings(OwnSettings):
    """UEFL's own settings; defaults are the paper's for MNIST."""

    title = "UEFL"
    tasks = (CLASSIFICATION,)
    why_tasks = "grows its codebook by the entropy of class probabilities"
    server = "fedsilo.strategies.methods.uefl:UEFL"
    site = "fedsilo.client_app.methods.uefl:UEFLSite"

    gamma: float = setting(
        0.3, "a silo is uncertain above (1+gamma) times the least entropy", ge=0.0
    )
    codes: int = setting(32, "codewords of the first book and of each extension", ge=1)
    segments: int = setting(1, "parts that a token is split into", ge=1)
    iteration_rounds: int = setting(20, "rounds of the first iteration", ge=1)
    extension_rounds: int = setting(5, "rounds of each later iteration", ge=1)
    max_iterations: int = setting(3, "iterations at most; 1 is DisFL, never extended", ge=1)
    stop_when_certain: bool = setting(True, "end the run once no silo is uncertain")
    codeword_start: Literal["kmeans", "gaussian"] = setting("kmeans", "start of new codewords")
    refresh: Literal["kmeans", "none"] = setting(
        "kmeans",
        "the first book after an iteration: centroids of certain silos' features, or as trained",
    )
    centroid_min_count: int = setting(10, "centroids of fewer features stay at the silo", ge=1)
    first_book: Literal["gaussian", "kmeans"] = setting(
        "gaussian",
        "start of the first book: gaussian, or kmeans of the silos' features before round 1",
    )
    token_norm: Literal["none", "layer"] = setting(
        "none", "layer: tokens are normalised over channels before the codes"
    )
    threshold: Literal["least", "mean"] = setting(
        "least", "entropy that gamma compares with: the least of all silos, or their mean"
    )

    def refuse_exact_centroids(self, common: CommonSettings) -> None:
        """Check that no site sends exact centroids of its features if training is private.

        Raises:
            SettingError: 'privacy.sample-clip-norm' is above 0, but 'uefl.codeword-start',
                'uefl.refresh' or 'uefl.first-book' is 'kmeans'.
        """
        if common.is_private() and "kmeans" in (self.codeword_start, self.refresh):
            raise SettingError(
                "setting 'privacy.sample-clip-norm' is set, and centroids of a site's features "
                "have no noise: set 'uefl.codeword-start' to 'gaussian' and 'uefl.refresh' to "
                "'none'"
            )
        if common.is_private() and self.first_book == "kmeans":
            raise SettingError(
                "setting 'privacy.sample-clip-norm' is set, and the centroids of a first book have "
                "no noise: set 'uefl.first-book' to 'gaussian'"
            )

    def sends_centroids(self, uncertain: bool, first: bool = False) -> bool:
        """Tell whether sites send centroids of their features to start or refresh a codebook.

        Sites are uncertain if ``uncertain_sites`` names them, because the entropy of their
        predictions is high. All other sites are certain. The result is True if this setting is
        'kmeans':

        - 'uefl.codeword-start' for uncertain sites, whose centroids start new codewords.
        - 'uefl.first-book' for certain sites before round 1. Their centroids start the first
          codebook, which all sites share.
        - 'uefl.refresh' for certain sites after a round. Their centroids refresh the first
          codebook.

        Args:
            uncertain: whether the sites are uncertain.
            first: whether round 1 is still to come. It is ignored if ``uncertain`` is True.
        """
        # New books start from the uncertain sites; the first book comes from the certain ones
        if uncertain:
            return self.codeword_start == "kmeans"
        if first:
            return self.first_book == "kmeans"
        return self.refresh == "kmeans"

    def list_disclosures(self) -> list[str]:
        """List the data that a site sends, one phrase for each kind, for privacy.json.

        Weights and codebooks are always listed. Centroids of the site's features are listed if a
        setting lets sites send them, with the time at which they are sent.
        """
        sentences = [
            "all weights and batch-norm statistics of the network, each round",
            "the codebooks that the site may use, trained, each round",
        ]
        if self.codeword_start == "kmeans" and self.refresh == "kmeans":
            sentences.append(f"after each iteration: {self._centroids()}")
        elif self.codeword_start == "kmeans":
            sentences.append(f"when uncertain: {self._centroids()}")
        elif self.refresh == "kmeans":
            sentences.append(f"when certain: {self._centroids()}")
        if self.sends_centroids(False, first=True):
            sentences.append(f"before the first round: {self._centroids()}")
        return sentences

    def _centroids(self) -> str:
        return (
            "centroids of the site's features with counts, none of fewer than "
            f"{self.centroid_min_count} features"
        )

    def why_certain(self, round_: int) -> str:
        """Build the message that the run ends after ``round_`` because no silo is uncertain.

        It says that no silo's entropy is above 1 + 'uefl.gamma' times a reference. The reference is
        the least entropy of all silos or, if 'uefl.threshold' is "mean", the mean of their
        entropies.
        """
        level = {"least": "the least", "mean": "their mean"}[self.threshold]
        return (
            f"after round {round_} no silo's entropy is above {1 + self.gamma:g} times {level}: "
            "the run ends ('uefl.stop-when-certain')"
        )

    def ends_iteration(self, iteration: int, round_: int, rounds: int) -> bool:
        """Tell whether an iteration ends with ``round_``, and another iteration follows.

        UEFL may add codewords after an iteration, which is a series of rounds. The first iteration
        has 'uefl.iteration-rounds' rounds, and each later one 'uefl.extension-rounds'. No iteration
        follows after 'uefl.max-iterations' iterations or after the run's last round.

        Args:
            iteration: the number of the current iteration, from 1.
            round_: the number of the round, from 1.
            rounds: the number of rounds in the run.
        """
        # The first iteration has a length of its own; all later ones have ``extension_rounds``
        end = self.iteration_rounds + (iteration - 1) * self.extension_rounds
        return round_ == end and iteration < self.max_iterations and round_ < rounds

    def why_unfit(self, facts: SiteFacts) -> str | None:
        """Return the reason why UEFL cannot use a site, or None if it can.

        UEFL judges uncertainty by measurements on validation samples. It cannot use a site that
        withholds them, unless 'uefl.max-iterations' is 1.
        """
        if self.max_iterations == 1 or "val" in facts.measured:
            return None
        return (
            f"site {facts.site} withholds its measurements on validation samples, on which UEFL "
            "judges uncertainty: leave the site out, or set 'uefl.max-iterations' to 1 (DisFL)"
        )

    def refuse_small(self, site: str, sizes: Mapping[str, int], features: int) -> None:
        """Check that a site has validation samples and enough features for the run's settings.

        Nothing is checked if 'uefl.max-iterations' is 1.

        Args:
            site: the site's name, for errors.
            sizes: split -> number of samples. Empty if the site does not report its sizes.
            features: the number of training features. Each segment of each token of a sample is
                one.

        Raises:
            SettingError: in one of these cases:

                - The site reports its sizes and has no validation samples.
                - 'uefl.refresh' is 'kmeans', but there are fewer features than 'uefl.codes'.
        """
        if self.max_iterations > 1 and sizes and not sizes.get("val"):
            raise SettingError(
                f"site {site} has no validation samples, on which UEFL judges uncertainty: set "
                "'split.val-folds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )
        if self.max_iterations > 1 and self.refresh == "kmeans" and features < self.codes:
            raise SettingError(
                f"site {site} has {features} features for 'uefl.codes' {self.codes} "
                "codewords: lower 'uefl.codes', or set 'uefl.refresh' to 'none'"
            )

    def few_centroids(self, features: Mapping[str, int]) -> list[str]:
        """Warn if some sites have too few features to fill all K-means clusters.

        Smaller clusters than 'uefl.centroid-min-count' features start no codewords. A site has too
        few features if it has fewer than 'uefl.codes' times this number.

        Args:
            features: site -> number of training features.

        Returns:
            A list with one sentence: how many such sites there are, and which has the fewest
            features. The list is empty if there are none, or if no setting asks for K-means.
        """
        # Clusters are seldom of equal size, so even this number is optimistic
        wanted = self.codes * self.centroid_min_count
        small = []
        for site, count in features.items():
            if count < wanted:
                small.append((count, site))
        small.sort()
        if not small or "kmeans" not in (self.codeword_start, self.refresh, self.first_book):
            return []
        return [
            f"{len(small)} sites (site {small[0][1]} has {small[0][0]} features) cannot fill "
            f"'uefl.codes' ({self.codes}) clusters of 'uefl.centroid-min-count' "
            f"({self.centroid_min_count}) features: smaller clusters start no codewords; lower one "
            "of the two, the second as far as the hospitals allow"
        ]

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that uncertainty can be measured, and that codewords can be added before the end.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: in one of these cases:

                - Private training would send centroids (``refuse_exact_centroids``).
                - 'network.dropout' or 'train.mc-passes' is 0.
                - 'uefl.max-iterations' is above 1, but the first iteration takes all rounds.
        """
        self.refuse_exact_centroids(common)
        if common.dropout == 0 or common.mc_passes == 0:
            raise SettingError(
                f"settings 'network.dropout' ({common.dropout:g}) and 'train.mc-passes' "
                f"({common.mc_passes}) must be above 0: UEFL's uncertainty is that of Monte Carlo "
                "dropout"
            )
        if self.max_iterations > 1 and common.rounds <= self.iteration_rounds:
            raise SettingError(
                f"setting 'rounds' is {common.rounds}, not more than 'uefl.iteration-rounds' "
                f"({self.iteration_rounds}): no codebook would ever be extended; raise "
                "'rounds', lower 'uefl.iteration-rounds', or set 'uefl.max-iterations' to 1 (DisFL)"
            )


@dataclass(frozen=True)
class CentroidNotes(Notes):
    """Tells a site whether its centroids refresh the first book or start a new one."""

    refreshes: bool = False


def uncertain_sites(
    entropies: Mapping[str, float], gamma: float, threshold: str = "least"
) -> list[str]:
    """Return the names of the sites whose predictions are uncertain, in alphabetical order.

    These are the sites for which UEFL adds codewords. A site is uncertain if its entropy is above
    (1 + ``gamma``) times a reference. The reference is the least entropy of all sites or, with
    ``threshold`` 'mean', the unweighted mean of all sites' entropies.

    Args:
        entropies: site -> mean predictive entropy, for at least one site.
        gamma: how far a site may be above the reference, as a share of it.
        threshold: 'least' or 'mean'.
    """
    values = list(entropies.values())
    level = min(values)
    if threshold == "mean":
        level = sum(values) / len(values)
    # Eq. 9 is the condition for certain sites; all other sites are uncertain
    limit = (1 + gamma) * level
    return sorted(site for site, entropy in entropies.items() if entropy > limit)


def round_marks(extended: Mapping[str, Sequence[str]], refreshed: Sequence[int]) -> dict[int, str]:
    """Describe how the codebooks changed, to mark rounds in plots.

    Args:
        extended: round, as text -> the sites that got new codewords. An empty list means that no
            cluster of features was large enough for new codewords.
        refreshed: the rounds after which the first codebook, which all sites share, was initialised
            again.

    Returns:
        Round -> text, in the order of rising rounds.
    """
    marks: dict[int, list[str]] = {}
    for number, sites in extended.items():
        words = f"new codewords for {', '.join(sites)}"
        if not sites:
            words = "no new codewords: no cluster was large enough ('uefl.centroid-min-count')"
        marks[int(number)] = [words]
    for round_ in refreshed:
        marks.setdefault(round_, []).append("first codewords re-initialised")
    return {round_: "; ".join(words) for round_, words in sorted(marks.items())}
