"""Settings of the regression ``glm``, the names of its arrays, and its columns.

Equations (Nelder and Wedderburn 1972, J. R. Stat. Soc. A 135, pages 370 to 384):
  (sums) gradient and Hessian over a site's patients -> models.maths.glm.sums_at
  (Newton) beta + H^-1 g -> models.maths.glm_steps.next_progress

Equations (doi:10.1111/j.2517-6161.1972.tb00899.x):
  (Cox) log partial likelihood within each hospital -> models.maths.cox.cox_sums

Equations (doi:10.1016/0197-2456(86)90046-2):
  (DerSimonian-Laird) fixed and random effects -> models.maths.meta_analysis.combine_effects
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.messages import Notes
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import SURVIVAL
from fedsilo.models.privacy.fixed_point import Floats, grid_of, join_sums
from fedsilo.models.privacy.secure_sum import SAMPLES, quantisation

SUMS = ("sums/1", "sums/2", "sums/3")  # the three parts of the sums, (m,) float32 each
# A constant, (1,), whose mean over sites shows whether a site had to clip its numbers
UNCLIPPED, CONSTANT = "sums/unclipped", 0.125
BETA, BETA_REST = "beta", "beta-rest"  # the coefficients, (k,) float32, and their rounding error
CENTERS, DEVIATIONS = "centers", "deviations"  # the units of outcome and columns, (k,) float32
ESTIMATES, VARIANCES, USABLE = "estimates", "variances", "usable"  # a site's own fit
OWN_FIT = "own-fit"  # the phase in which each site fits its own model


def part_norm(common: CommonSettings) -> float:
    """Return the factor by which each site multiplies the arrays with a regression's sums.

    A secret sum clips arrays to the norm 'secure.clip-norm'. The arrays have a norm of at most 1,
    so this setting is the largest factor that causes no clipping. Without a secret sum the factor
    is 1.
    """
    if common.secure_aggregation == "none":
        return 1.0
    return common.clip_norm


def grid_over(common: CommonSettings, sites: int) -> float:
    """Compute the grid of a regression's sums: the step to which sites round the numbers they send.

    A secret sum has a small error. A grid that is at least eight times as large lets the server
    round the error away. The grid is a power of two, computed for the clip norm 1 and 16,384
    samples per site (``grid_of``). Sites multiply by 'secure.clip-norm' only after rounding.

    Args:
        common: the run's settings.
        sites: the number of summed sites.

    Raises:
        SettingError: ``sites`` times 16,384 samples are too many for sums in 32 bits.
    """
    return grid_of(quantisation(replace(common, clip_norm=1.0), sites, SAMPLES), sites)


def join_parts(
    common: CommonSettings, samples: float, parts: Mapping[str, Floats], grid: float
) -> Floats | None:
    """Rebuild a regression's sums over all sites from the totals of the arrays that sites send.

    A site divides its sums by a scale, splits each number into three parts, and multiplies the
    parts by ``part_norm``. This function divides by that norm and joins the parts. The caller must
    multiply the result by the scale. Each site also sends a constant, which reveals clipping.

    Args:
        common: the run's settings.
        samples: the number of samples of all sites together.
        parts: array name -> the sum over sites of samples times array. The names are ``SUMS`` for
            the three parts and ``UNCLIPPED`` for the constant.
        grid: the step to which sites round the first two parts (``grid_over``).

    Returns:
        The sums, (m,). None if a site had to clip its numbers, which makes the totals wrong.
        Clipping lowers the constant's total or moves the parts off the grid.
    """
    norm = part_norm(common)
    constant = float(parts[UNCLIPPED][0]) / norm
    joined = join_sums([parts[name] / norm for name in SUMS], grid)
    # A clipped site sends less of everything, so of the constant too
    if abs(constant - samples * CONSTANT) > grid:
        return None
    return joined


@dataclass(frozen=True)
class ScaleNotes(Notes):
    """Tells sites the kind of their sums, and the scale.

    Attributes:
        moments: whether to sum each column's values and squares, not gradients and Hessians.
        scale: the sums are divided by it before they are split into parts.
        grid: the grid of the parts (``models.privacy.fixed_point``).
    """

    moments: bool
    scale: float
    grid: float


@dataclass(frozen=True)
class GLMSettings(OwnSettings):
    """Settings of a regression by sums."""

    title = "Regression"
    server = "fedsilo.strategies.methods.glm:GLM"
    site = "fedsilo.client_app.methods.glm:GLMSite"
    sums_suffice = True
    proves_sums = True
    why_not_private = "sends exact sums over patients, without noise"

    family: Literal["logistic", "linear", "poisson", "cox"] = setting(
        "logistic",
        "outcome: yes or no (odds ratios), a number, a count (rate ratios), or the time to an "
        "event (hazard ratios)",
    )
    outcome: str = setting(
        "", "the column that is explained, for 'cox' the event (empty: the table's label)"
    )
    time: str = setting(
        "",
        "family 'cox': the column with the time to the event or to censoring (empty: the label's)",
    )
    ties: Literal["efron", "breslow"] = setting(
        "efron", "family 'cox': how events at the same time count"
    )
    columns: str = setting(
        "", "the columns that explain it, with commas between (empty: all others)"
    )
    missing: Literal["mean", "drop"] = setting(
        "mean", "missing values: the mean of all sites, or leave out the patients"
    )
    heterogeneity: bool = setting(
        True, "at trust 'server': each site's own fit too, and whether sites differ"
    )

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that the data are a table, and that the other settings suit a regression.

        Args:
            common: the run's common settings.
            is_table: whether the data set is a table.

        Raises:
            SettingError: in one of these cases:

                - The data are images.
                - 'glm.time' is set, but the family is not 'cox'.
                - The family is 'cox', 'glm.time' is empty and the task is not 'survival'.
                - The family is 'linear' or 'poisson', but 'glm.outcome' is empty.
                - 'server.evaluate-every' or 'server.sites-per-round' is not 0.
        """
        if not is_table:
            raise SettingError(
                f"method 'glm' fits columns of a table, but data set '{common.dataset}' has "
                "images: choose another"
            )
        if self.family != "cox" and self.time:
            raise SettingError(
                "only a Cox regression has a time: set 'glm.time' to '', or 'glm.family' to 'cox'"
            )
        if self.family == "cox" and not self.time and common.task != SURVIVAL:
            raise SettingError(
                "a Cox regression needs a time: name its column as 'glm.time', or set 'task' to "
                "'survival' if the label of the table is the time to an event"
            )
        if self.family in ("linear", "poisson") and not self.outcome:
            raise SettingError(
                f"a {self.family} regression does not explain the label, which is a class: name a "
                "numeric column as 'glm.outcome'"
            )
        if common.evaluate_every:
            raise SettingError("a regression measures no network: set 'server.evaluate-every' to 0")
        if common.sites_per_round:
            raise SettingError(
                "a regression is of the patients of all sites: set 'server.sites-per-round' to 0"
            )


@dataclass(frozen=True)
class ChosenColumns:
    """The indices of a regression's columns among a table's features.

    Attributes:
        columns: the indices of the columns that explain.
        outcome: the index of the outcome; None if the table's label is the outcome.
        time: the index of the time to the event. None if the label has the time, or if the
            regression has no time.
    """

    columns: list[int]
    outcome: int | None
    time: int | None = None


def find_columns(features: Sequence[str], settings: GLMSettings) -> ChosenColumns:
    """Find the indices of the regression's columns among a table's features.

    'glm.columns' lists the columns. A name stands for the feature of that name or, for a category,
    for all of its features: 'cp' for 'cp=2', 'cp=3' and 'cp=4'. If the setting is empty, the
    regression uses all features except the outcome and the time.

    Args:
        features: the names of the table's features.
        settings: the settings of the regression.

    Raises:
        SettingError: in one of these cases:

            - A name is unknown.
            - A column is named twice.
            - The outcome or the time is a category, or is among the columns.
    """
    places = {name: place for place, name in enumerate(features)}
    explained = [name for name in (settings.outcome, settings.time) if name]
    for name in explained:
        if name not in places:
            raise unknown_name("column of the table", name, places)
    chosen: list[int] = []
    for name in filter(None, map(str.strip, settings.columns.split(","))):
        found = _features_of(features, name)
        if not found:
            raise unknown_name("column of the table", name, places)
        chosen += found
    if not settings.columns:
        chosen = [place for name, place in places.items() if name not in explained]
    named = [*chosen, *(places[name] for name in explained)]
    if len(set(named)) < len(named):
        raise SettingError(
            "'glm.columns' names a column twice, or the outcome or time itself: name each column "
            "once"
        )
    return ChosenColumns(chosen, places.get(settings.outcome), places.get(settings.time))


def _features_of(features: Sequence[str], name: str) -> list[int]:
    """Find the features of a table that belong to the column ``name``.

    A numeric column has a single feature, of the same name. A categorical column has a feature
    named ``<column>=<level>`` for each of several levels. For example, 'cp=2', 'cp=3' and 'cp=4'
    belong to 'cp'.

    Returns:
        The indices of these features in ``features``, ascending. The list is empty if there are
        none.
    """
    found = []
    for place, feature in enumerate(features):
        if feature == name or feature.startswith(f"{name}="):
            found.append(place)
    return found
