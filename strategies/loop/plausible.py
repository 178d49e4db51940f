"""Check that a reply's numbers are plausible, and measure how far each reply is from the others.

The ranges stop numbers that no honest site can send and that would harm every other site: an
accuracy of 1e308 in a mean, a weight of 1e30 that makes all models non-finite, a variance below 0.
A number within its range may still be untrue.

Weights and batch norm's running statistics are measured separately, because statistics are as large
as the pixels are. Sums use numpy over float64, so their bits do not depend on the thread count.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedsilo.core.array_names import BATCH_NORM
from fedsilo.core.messages import (
    DP_EPSILON,
    KEPT_STATE,
    PEAK_MEMORY,
    SAMPLES,
    SECONDS,
    STEPS,
    UNREPEATABLE,
)
from fedsilo.core.metric_names import (
    BIN_FAMILIES,
    BIN_PARTS,
    CLASS,
    FINDING,
    METRICS,
    OUTCOME,
    read_measurement,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.models.privacy.promises import statistics_noise
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply

_ROUNDING = 1e-6
_LARGEST, _LARGEST_LOSS, _LARGEST_COUNT = 1e12, 1e9, 1e12
# an honest training loss reaches 1e17 with strong noise; no mean is weighted by it
_DIVERGED = 1e30
_LARGEST_WEIGHT, _LARGEST_STATISTIC = 1e6, 1e12
_STATISTICS = {"running_mean", "running_var", "counts"}
_NEVER_BELOW = {"running_var": "variance", "counts": "count"}


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; only whole numbers if ``whole``."""

    low: float
    high: float
    whole: bool = False

    def __str__(self) -> str:
        """Return the range in words, for errors."""
        limits = f"{self.low:g} to {self.high:g}"
        if self.whole:
            return f"a whole number from {limits}"
        return limits


_SHARE, _ANY = Range(0, 1), Range(-_LARGEST, _LARGEST)
_COUNT = Range(0, _LARGEST_COUNT, whole=True)
_OWN = {
    SECONDS: Range(0, 1e9),
    PEAK_MEMORY: Range(0, 2.0**50),
    STEPS: _COUNT,
    "inverse-steps": _SHARE,
    SAMPLES: _COUNT,
    KEPT_STATE: Range(0, 1, whole=True),
    DP_EPSILON: Range(0, _LARGEST),
    "new-codewords": _COUNT,
}
_SHARES = (*("forgotten", "sensitivity", "specificity", "f1", "precision", "recall"),)


def _known_ranges() -> dict[str, Range]:
    """Return the ranges of the metrics of ``METRICS``, with 1e12 in place of infinity."""
    ranges = {}
    for name, rule in METRICS.items():
        ranges[name] = Range(max(rule.low, -_LARGEST), min(rule.high, _LARGEST))
    return ranges


_RANGES = {
    **_known_ranges(),
    **dict.fromkeys(_SHARES, _SHARE),
    "perplexity": Range(0, _LARGEST),
    "codeword-distance": Range(0, _DIVERGED),
    "codebook-loss": Range(0, _DIVERGED),
    "closeness": Range(-1, 1),
    "kappa": Range(-1, 1),
    "mcc": Range(-1, 1),
}
# Parts of a family in a unit of their own: distances in pixels, and times
_UNITS = {"surface-distance", "hausdorff-95", "time"}
# Parts of a family that count samples; others are shares
_COUNTS = {"count", "right", "false", "followed"}
_TAIL = 10  # standard deviations of noise


def most_counted(facts: SiteFacts, common: CommonSettings) -> dict[str, int]:
    """Return, for each split, the largest number of samples that a site's metrics may count.

    This is the number of samples that the site reported. In a differentially private run the site
    may have added noise to this number. Ten standard deviations of the noise are then added,
    rounded up. A split that the site did not report is absent.
    """
    hidden = 0
    if common.is_private():
        # A size is a sum over the classes, and each class has noise of its own
        hidden = math.ceil(_TAIL * statistics_noise(common) * math.sqrt(facts.classes))
    return {split: size + hidden for split, size in facts.sizes.items()}


def metric_range(key: str, classes: int, most: Mapping[str, int] | None = None) -> Range:
    """Return the range of values that an honest site can report for a metric.

    - Entropy is from 0 to log(``classes``).
    - Most other metrics, such as accuracy and loss, have a fixed range.
    - A count of samples of one class, bin or site is a whole number. The largest is the number for
      its split in ``most``, or 0 if the split is absent.
    - Any other metric is from -1e12 to 1e12.

    Args:
        key: the metric's key, such as ``incoming.test.accuracy``.
        classes: the number of classes.
        most: the largest number of samples by split. None allows counts up to 1e12.
    """
    read = read_measurement(key)
    if read is None:
        return _OWN.get(key, _ANY)
    if read.metric.word == OUTCOME and read.metric.part != "count":
        return _ANY  # in the outcome's own unit
    if read.metric.part:  # a member of a family: of one class, bin or site
        if read.metric.part in _UNITS:
            return Range(0, _LARGEST)
        if read.metric.part not in _COUNTS:
            return _SHARE
        if most is None:
            return _COUNT
        return Range(0, most.get(read.split, 0), whole=True)
    name = read.metric.word.removeprefix("own-labels-").removeprefix("own-")
    if name == "entropy":
        return Range(0, math.log(classes))
    if name == "loss" and read.split == "train":  # a method may add negative terms
        return Range(-_DIVERGED, _DIVERGED)
    if name == "loss":
        return Range(0, _LARGEST_LOSS)
    return _RANGES.get(name, _ANY)


def metric_fault(
    key: str, value: float, classes: int, most: Mapping[str, int] | None = None
) -> str | None:
    """Explain why a metric's value is out of range, or return None if it is in range.

    ``metric_range`` gives the range, and both its ends are allowed. A count must be a whole number.
    Any other metric may exceed its range by 1e-6, a rounding error. NaN is always out of range.

    Args:
        key: the metric's key, such as ``incoming.test.accuracy``.
        value: the reported value.
        classes: the number of classes.
        most: the largest number of samples by split. None allows counts up to 1e12.
    """
    allowed = metric_range(key, classes, most)
    if allowed.whole:
        is_plausible = allowed.low <= value <= allowed.high and value == math.floor(value)
    else:  # a share may exceed its range by a rounding error
        is_plausible = allowed.low - _ROUNDING <= value <= allowed.high + _ROUNDING
    if is_plausible:
        return None
    return f"metric '{key}' is {value:g}, not {allowed}"


_MOST_WORDS = 500  # metrics of a reply other than per class, bin or site; fedsilo's methods have 60
_MOST_OPERATIONS = 100


def names_fault(metrics: Mapping[str, float], classes: int, sites: Collection[str]) -> str | None:
    """Explain why the names of a reply's metrics are invalid, or return None if they are valid.

    Values are not checked. The rules are:

    - A metric may name only classes and sites that exist.
    - If one metric of a calibration bin is present, all metrics of this bin are.
    - At most 500 metrics are not for a single class, bin or site.
    - At most 100 further metrics name a PyTorch operation that is not repeatable
      (``UNREPEATABLE``).

    Args:
        metrics: a reply's metrics by key. The keys must have passed ``is_metric_key``.
        classes: the number of classes of the task.
        sites: the names of the sites that take part.
    """
    words = operations = 0
    parts_of_bin: dict[str, int] = {}
    for key in metrics:
        read = read_measurement(key)
        if read is None:
            operations += key.startswith(UNREPEATABLE)
            words += not key.startswith(UNREPEATABLE)
            continue
        metric = read.metric
        if metric.site and metric.site not in sites:
            return f"metric '{key}' names site '{metric.site}', but no such site takes part"
        is_numbered = metric.word in (CLASS, FINDING) and metric.part
        if is_numbered and int(metric.place) >= classes:
            return (
                f"metric '{key}' names {metric.word} {metric.place}, but there are {classes} "
                f"{'classes' if metric.word == CLASS else 'findings'}"
            )
        if metric.word in BIN_FAMILIES and metric.part:
            start = key.rpartition(".")[0]  # such as incoming.test.reliability.3
            parts_of_bin[start] = parts_of_bin.get(start, 0) + 1
        words += not metric.part and not metric.site
    if words > _MOST_WORDS or operations > _MOST_OPERATIONS:
        return (
            f"it has {words} metrics and {operations} operations that are not repeatable, but the "
            f"limits are {_MOST_WORDS} and {_MOST_OPERATIONS}"
        )
    for start, count in sorted(parts_of_bin.items()):
        if count < len(BIN_PARTS):
            return f"metric '{start}' lacks one of {', '.join(BIN_PARTS)}"
    return None


def array_fault(name: str, array: NDArray) -> str | None:
    """Explain why the values of a float array are impossible, or return None if they are possible.

    No absolute value may exceed 1e6. The limit is 1e12 if the last part of the name is
    ``running_mean``, ``running_var`` or ``counts``. Parts are separated by "/" and ".". Values of
    ``running_var`` and ``counts`` must not be negative. An empty array has no fault. The caller has
    checked that all values are finite.
    """
    last = name.rpartition("/")[2].rpartition(".")[2]
    largest = _LARGEST_WEIGHT
    if last in _STATISTICS:
        largest = _LARGEST_STATISTIC
    if last in _NEVER_BELOW and (array < 0).any():
        return f"array '{name}' has a number below 0, but a {_NEVER_BELOW[last]} cannot be negative"
    if array.size and float(np.abs(array).max()) > largest:
        return (
            f"array '{name}' has a number beyond {largest:g}: if training has diverged, lower "
            "'train.learning-rate'"
        )
    return None


_FEWEST = 3  # sites: with only two, the median cannot tell which one is unusual


@dataclass(frozen=True)
class UpdateStatistics:
    """The size and direction of one site's update in a phase."""

    norm: float  # the L2 norm of the update of the site's weights
    # The cosine of the angle between the update and the model's change; None if either is 0
    cosine: float | None


def update_norm(reply: Reply, before: Arrays, names: Iterable[str]) -> float:
    """Return the L2 norm of a site's update over all named arrays, computed in float64.

    The update is the reply's arrays minus the arrays in ``before``, from which the site started.
    Each name must be in the reply and in ``before``. Without names the norm is 0.
    """
    squared = 0.0
    # Sorted, because the bits of a sum of floats depend on the order
    for name in sorted(names):
        update = reply.arrays[name].astype(np.float64) - before[name]
        squared += float(np.square(update).sum())
    return math.sqrt(squared)


def group_by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Group array names into "weights" and batch norm's "statistics", each a sorted list.

    A name that ends in ``running_mean`` or ``running_var`` is a statistic, and any other name is a
    weight. A kind without names is left out of the mapping.
    """
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kind = "weights"
        if name.endswith(BATCH_NORM):
            kind = "statistics"
        kinds.setdefault(kind, []).append(name)
    return kinds


def find_far_updates(
    limit: float, before: Mapping[str, Arrays], replies: Mapping[str, Reply]
) -> dict[str, str]:
    """Find the sites whose update norm is above ``limit`` times the median norm over the sites.

    Weights and batch norm's statistics are judged separately. The median includes the far sites. A
    kind is skipped if fewer than three sites have updated it, or if its median is 0.

    Args:
        limit: the setting 'server.max-update-norm', above 0.
        before: the arrays that each site started from, by site. A site without an entry is skipped.
        replies: the replies by site.

    Returns:
        The reason as a sentence, by site. A site that is far in both kinds has only one reason.
    """
    norms: dict[str, dict[str, float]] = {}
    for site, reply in replies.items():
        for kind, names in group_by_kind(before.get(site, ())).items():
            norms.setdefault(kind, {})[site] = update_norm(reply, before[site], names)
    found: dict[str, str] = {}
    for kind, by_site in norms.items():
        median = float(np.median(list(by_site.values())))
        for site, norm in by_site.items():
            if len(by_site) >= _FEWEST and median and norm > limit * median:
                found.setdefault(
                    site,
                    f"the update of its {kind} has norm {norm:.3g}, {norm / median:.3g} times the "
                    f"median, more than 'server.max-update-norm' ({limit:g})",
                )
    return found


def update_statistics(
    before: Mapping[str, Arrays], after: Arrays, replies: Mapping[str, Reply]
) -> dict[str, UpdateStatistics]:
    """Compute the norm of each site's update, and its cosine with the change of the model.

    A site's update is its reply minus the arrays from which it started. The model's change is
    ``after`` minus the same arrays. Batch norm's statistics are left out.

    Args:
        before: the arrays from which each site started, by site.
        after: the model's arrays after the replies were combined.
        replies: the sites' replies.

    Returns:
        The statistics by site. The cosine is None if the update or the model's change is 0. A site
        without any weights that are in both ``before`` and ``after`` is left out.
    """
    # The sites that trained each array; per site the squared lengths of its update and of the
    # model's step, and their scalar product
    sites_of: dict[str, list[str]] = {}
    sums: dict[str, NDArray] = {}
    for site in replies:
        for name in before.get(site, ()):
            if name in after and not name.endswith(BATCH_NORM):
                sites_of.setdefault(name, []).append(site)
                sums[site] = np.zeros(3)
    # One array at a time over all sites: replies may lie in a file, and a model may be large
    for name, sites in sorted(sites_of.items()):
        # Most sites began from the same array, so the model's step from it is kept
        steps: dict[int, tuple[NDArray, float]] = {}
        for site in sites:
            array = before[site][name]
            if id(array) not in steps:
                step = after[name].astype(np.float64) - array
                steps[id(array)] = step, float(np.square(step).sum())
            step, squared = steps[id(array)]
            own = replies[site].arrays[name].astype(np.float64) - array
            sums[site] += float(np.square(own).sum()), squared, float((own * step).sum())
    statistics: dict[str, UpdateStatistics] = {}
    for site, (own_squared, step_squared, product) in sums.items():
        # Two roots instead of the root of a product, which could overflow or become 0
        norms = math.sqrt(own_squared) * math.sqrt(step_squared)
        cosine = None
        if norms:
            cosine = max(-1.0, min(1.0, float(product) / norms))
        statistics[site] = UpdateStatistics(math.sqrt(own_squared), cosine)
    return statistics
