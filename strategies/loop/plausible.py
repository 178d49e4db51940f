"""Which numbers of a reply are plausible, and how far each reply is from the others.

The ranges stop what no honest site can send and what every other site would pay for: an accuracy of
1e308 in a mean, a weight of 1e30 that leaves all sites with models that are not finite, a variance
below 0. A number within them may still be untrue.

For updates, weights and batch norm's running statistics are measured apart: these are as large as
pixels are. Sums are numpy's own over float64, whose bits do not depend on threads.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedsilo.models.contract.array_names import is_statistic
from fedsilo.models.contract.messages import (
    DP_EPSILON,
    KEPT_STATE,
    PEAK_MEMORY,
    SAMPLES,
    SECONDS,
    STEPS,
    UNREPEATABLE,
)
from fedsilo.models.contract.metric_names import (
    BIN_PARTS,
    CLASS,
    incomplete_bins,
    read_measurement,
)
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.privacy.promises import statistics_noise
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply

_ROUNDING = 1e-6
_LARGEST, _LARGEST_LOSS, _LARGEST_COUNT = 1e12, 1e9, 1e12
_DIVERGED = 1e30  # under much noise an honest loss of training is 1e17, and nothing weighs by it
_LARGEST_WEIGHT, _LARGEST_STATISTIC = 1e6, 1e12
_STATISTICS = {"running_mean", "running_var", "counts"}
_NEVER_BELOW = {"running_var": "variance", "counts": "count"}


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; with ``whole`` only whole ones."""

    low: float
    high: float
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Tell whether ``value`` is in the range; sums of shares may be off by rounding."""
        slack = 0.0 if self.whole else _ROUNDING
        inside = self.low - slack <= value <= self.high + slack
        return inside and (not self.whole or value == math.floor(value))

    def __str__(self) -> str:
        """Return it in words."""
        return f"{'a whole number from ' if self.whole else ''}{self.low:g} to {self.high:g}"


_SHARE, _ANY = Range(0, 1), Range(-_LARGEST, _LARGEST)
_COUNT = Range(0, _LARGEST_COUNT, whole=True)
_OWN = {
    SECONDS: Range(0, 1e9),
    PEAK_MEMORY: Range(0, 2.0**50),
    STEPS: _COUNT,
    SAMPLES: _COUNT,
    KEPT_STATE: Range(0, 1, whole=True),
    DP_EPSILON: Range(0, _LARGEST),
    "new-codewords": _COUNT,
}
_SHARES = (
    *("accuracy", "balanced-accuracy", "auc", "average-precision", "calibration-error"),
    *("vacuity", "forgotten", "sensitivity", "specificity", "f1", "precision", "recall"),
)
_RANGES = dict.fromkeys(_SHARES, _SHARE) | {
    "perplexity": Range(0, _LARGEST),
    "codeword-distance": Range(0, _DIVERGED),
    "codebook-loss": Range(0, _DIVERGED),
    "closeness": Range(-1, 1),
    "kappa": Range(-1, 1),
    "mcc": Range(-1, 1),
}
_COUNTS = {"count", "right", "false"}  # parts of a family that count samples; others are shares
_TAIL = 10  # standard deviations of noise


def most_counted(facts: SiteFacts, common: CommonSettings) -> dict[str, int]:
    """Return how many samples of each split a site may count.

    Those that it has reported; in a private run these may have noise, which hides some.
    """
    noise = statistics_noise(common) if common.is_private() else 0.0
    hidden = math.ceil(_TAIL * noise * math.sqrt(facts.classes))
    return {split: size + hidden for split, size in facts.sizes().items()}


def metric_range(key: str, classes: int, most: Mapping[str, int] | None = None) -> Range:
    """Return what metric ``key`` of a site with so many classes can be.

    ``most`` has how many samples of each split it may count, or None for any number.
    """
    read = read_measurement(key)
    if read is None:
        return _OWN.get(key, _ANY)
    if read.metric.is_of_family:
        if read.metric.part not in _COUNTS:
            return _SHARE
        return _COUNT if most is None else Range(0, most.get(read.split, 0), whole=True)
    name = read.metric.word.removeprefix("own-labels-").removeprefix("own-")
    if name == "entropy":
        return Range(0, math.log(classes))
    if name == "loss":  # of training: what a method adds to it may be below 0
        return Range(-_DIVERGED, _DIVERGED) if read.split == "train" else Range(0, _LARGEST_LOSS)
    return _RANGES.get(name, _ANY)


def metric_fault(
    key: str, value: float, classes: int, most: Mapping[str, int] | None = None
) -> str | None:
    """Say why a metric is not plausible, if it is not; arguments as of ``metric_range``."""
    allowed = metric_range(key, classes, most)
    return None if allowed.holds(value) else f"metric '{key}' is {value:g}, not {allowed}"


_MOST_WORDS = 500  # metrics of a reply that are not of a class, a bin or a site; ours have 60
_MOST_OPERATIONS = 100


def names_fault(metrics: Mapping[str, float], classes: int, sites: Collection[str]) -> str | None:
    """Say why the metrics of a reply do not belong together, if they do not.

    A checkpoint keeps the last rounds' metrics, and reports read them long after the reply: what
    they name must exist, a bin must have all of its parts, and there must not be too many.

    Args:
        metrics: of a reply, by key; each key is of the grammar (``is_metric_key``).
        classes: how many classes the task has.
        sites: names of the sites that take part.
    """
    words = operations = 0
    for key in metrics:
        read = read_measurement(key)
        if read is None:
            operations += key.startswith(UNREPEATABLE)
            words += not key.startswith(UNREPEATABLE)
            continue
        metric = read.metric
        if metric.site and metric.site not in sites:
            return f"metric '{key}' is of site '{metric.site}', but no such site takes part"
        if metric.word == CLASS and metric.is_of_family and int(metric.place) >= classes:
            return f"metric '{key}' is of class {metric.place}, but there are {classes} classes"
        words += not metric.is_of_family and not metric.site
    if words > _MOST_WORDS or operations > _MOST_OPERATIONS:
        return (
            f"it has {words} metrics and {operations} operations that are not repeatable, but at "
            f"most {_MOST_WORDS} and {_MOST_OPERATIONS} are taken"
        )
    for start in incomplete_bins(metrics):
        return f"metric '{start}' lacks one of {', '.join(BIN_PARTS)}"
    return None


def array_fault(name: str, array: NDArray) -> str | None:
    """Say why a finite float array cannot be what its name says, if it cannot.

    Batch norm's statistics are those of activations, which raw pixels make large; all else is a
    weight, an embedding or a share.
    """
    last = name.rpartition("/")[2].rpartition(".")[2]
    largest = _LARGEST_STATISTIC if last in _STATISTICS else _LARGEST_WEIGHT
    if last in _NEVER_BELOW and (array < 0).any():
        return f"array '{name}' has a number below 0, which no {_NEVER_BELOW[last]} is"
    if array.size and float(np.abs(array).max()) > largest:
        return (
            f"array '{name}' has a number beyond {largest:g}: if training has diverged, lower "
            "'learning-rate'"
        )
    return None


_FEWEST = 3  # sites: of two no median tells which is odd


@dataclass(frozen=True)
class UpdateStatistics:
    """A site's part in a phase."""

    norm: float  # L2 norm of the update of its weights
    cosine: float | None  # of the angle between that and what the model became; None where one is 0


def update_norm(reply: Reply, before: Arrays, names: Iterable[str]) -> float:
    """Return the L2 norm of what a reply changes of the arrays ``names`` together."""
    squares = (
        float(np.square(reply.arrays[name].astype(np.float64) - before[name]).sum())
        for name in sorted(names)
    )
    return math.sqrt(sum(squares))


def in_kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of weights and of statistics, where there are some."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault("statistics" if is_statistic(name) else "weights", []).append(name)
    return kinds


def far_out(
    limit: float, before: Mapping[str, Arrays], replies: Mapping[str, Reply]
) -> dict[str, str]:
    """Return the sites whose update is longer than ``limit`` medians, each with why, in one line.

    ``before`` has by site what its reply is an update of.
    """
    norms: dict[str, dict[str, float]] = {}
    for site, reply in replies.items():
        for kind, names in in_kinds(before.get(site, ())).items():
            norms.setdefault(kind, {})[site] = update_norm(reply, before[site], names)
    found: dict[str, str] = {}
    for kind, by_site in norms.items():
        median = float(np.median(list(by_site.values())))
        for site, norm in by_site.items():
            if len(by_site) >= _FEWEST and median and norm > limit * median:
                found.setdefault(
                    site,
                    f"the update of its {kind} has norm {norm:.3g}, {norm / median:.3g} times the "
                    f"median, more than 'max-update-norm' ({limit:g})",
                )
    return found


def update_statistics(
    before: Mapping[str, Arrays], after: Arrays, replies: Mapping[str, Reply]
) -> dict[str, UpdateStatistics]:
    """Compare each site's update of its weights with the step that the model took.

    Args:
        before: by site, the arrays that its reply is an update of.
        after: the model's arrays once the replies were combined.
        replies: the sites' replies. A site without weights in both ``before`` and ``after`` is left
            out.
    """
    weights = {
        site: [n for n in before.get(site, ()) if n in after and not is_statistic(n)]
        for site in replies
    }
    sums = {site: np.zeros(3) for site, names in weights.items() if names}
    for name in sorted({name for names in weights.values() for name in names}):
        steps: dict[int, tuple[NDArray, float]] = {}  # of one array: most sites began alike
        for site in (site for site in sums if name in weights[site]):
            array = before[site][name]
            if id(array) not in steps:
                step = after[name].astype(np.float64) - array
                steps[id(array)] = step, float(np.square(step).sum())
            step, squared = steps[id(array)]
            own = replies[site].arrays[name].astype(np.float64) - array
            sums[site] += float(np.square(own).sum()), squared, float((own * step).sum())
    statistics: dict[str, UpdateStatistics] = {}
    for site, (own_squared, step_squared, product) in sums.items():
        norms = math.sqrt(own_squared) * math.sqrt(step_squared)
        cosine = None
        if norms:
            cosine = max(-1.0, min(1.0, float(product) / norms))
        statistics[site] = UpdateStatistics(math.sqrt(own_squared), cosine)
    return statistics
