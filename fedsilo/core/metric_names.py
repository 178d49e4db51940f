"""The grammar of metric names: which keys a reply's MetricRecord may have, and how to read them.

A key is one of three kinds::

    seconds                         a number about the reply itself: one word
    unrepeatable.<operation>        an operation that ran and is not deterministic
    <model>.<split>.<metric>        a measurement; the model is 'incoming' or 'trained'

The metric of a measurement is one word (``accuracy``), perhaps of another site's model
(``accuracy-from-<site>``), or a member of a family, ``<family>.<place>.<part>``:

    class.<label>.<right, false or auc, or dice, iou, surface-distance or hausdorff-95>
    confidence.<bin>.<count, right or mean>     and so uncertainty, reliability and certainty
    finding.<number>.<count or auc>
    outcome.<bin>.<count, predicted or observed>
    routing.<site>.<mean, or q05 to q95>
    survival.<point>.<time, share, low, high or followed>

The server refuses a reply with any other key, and names the site (``strategies.loop.plausible``).
All later readers of metrics (records, pictures, reports) use ``read_metric``, so a reader knows
every name that passes the check.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedsilo.core.files.site_names import is_site_name
from fedsilo.core.messages import INCOMING, TRAINED, UNREPEATABLE
from fedsilo.core.site_facts import SPLITS

CLASS = "class"
# The largest class probability and the entropy of the class probabilities
CONFIDENCE, UNCERTAINTY = "confidence", "uncertainty"
# The same two for an evidential network
RELIABILITY, CERTAINTY = "reliability", "certainty"
ROUTING = "routing"
# The points of a Kaplan-Meier curve, numbered from 0 (models.measures.survival_curves)
SURVIVAL_CURVE = "survival"
SURVIVAL_POINTS = 40  # the most points of a curve
SURVIVAL_PARTS = ("time", "share", "low", "high", "followed")
# Samples by tenths of a predicted number, and their mean prediction and outcome
OUTCOME = "outcome"
FINDING = "finding"  # one of several findings that a sample may have
BIN_FAMILIES = (CONFIDENCE, UNCERTAINTY, RELIABILITY, CERTAINTY)
BINS = 10  # bins in each of these families
BIN_PARTS = ("count", "right", "mean")
FROM = "-from-"  # between a metric and the site whose model was measured
UPDATE = "update"  # metrics.csv has it as the split of statistics of the update in a reply
TRAINED_PREFIX = "trained-"  # metrics.csv puts it before metrics of a site's own trained model


class MetricRule(NamedTuple):
    """The values that a metric may have, and which of them are good."""

    better: int  # 1 if a higher value is better, -1 if a lower one is, 0 if neither
    low: float = 0.0  # the least value
    high: float = math.inf  # the largest value


_HIGH_SHARE, _LOW_SHARE = MetricRule(1, high=1.0), MetricRule(-1, high=1.0)
# Metrics of fedsilo's own tasks and methods over all samples of a split; a plugin may measure
# more. Some methods put "own-" or "own-labels-" before it (docs/run-directory.md)
METRICS: Mapping[str, MetricRule] = {
    "accuracy": _HIGH_SHARE,
    "balanced-accuracy": _HIGH_SHARE,
    "auc": _HIGH_SHARE,
    "average-precision": _HIGH_SHARE,
    "calibration-error": _LOW_SHARE,
    "loss": MetricRule(-1),
    "entropy": MetricRule(0),  # a model may be certain and wrong
    "perplexity": MetricRule(0),
    "codeword-distance": MetricRule(0),
    "codebook-loss": MetricRule(0),
    "vacuity": MetricRule(0, high=1.0),
    # Regression; the first two are in the outcome's unit
    "mae": MetricRule(-1),
    "rmse": MetricRule(-1),
    "r2": MetricRule(1, low=-math.inf, high=1.0),
    # Survival
    "c-index": _HIGH_SHARE,
    "brier": MetricRule(-1),
    # Segmentation; the last two are distances in pixels
    "dice": _HIGH_SHARE,
    "iou": _HIGH_SHARE,
    "surface-distance": MetricRule(-1),
    "hausdorff-95": MetricRule(-1),
}
OVERALL = tuple(METRICS)
_UNKNOWN = MetricRule(0, low=-math.inf)  # a metric that is not in the table

_PARTS: Mapping[str, tuple[str, ...]] = {
    CLASS: ("right", "false", "auc", "dice", "iou", "surface-distance", "hausdorff-95"),
    ROUTING: ("mean", "q05", "q25", "q50", "q75", "q95"),
    SURVIVAL_CURVE: SURVIVAL_PARTS,
    OUTCOME: ("count", "predicted", "observed"),
    FINDING: ("count", "auc"),
    **dict.fromkeys(BIN_FAMILIES, BIN_PARTS),
}
_LONGEST_WORD, _LONGEST_OPERATION = 64, 200
_WORD = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{_LONGEST_WORD - 1}}}")
_OPERATION = re.compile(rf"[A-Za-z0-9_.][A-Za-z0-9_.-]{{0,{_LONGEST_OPERATION - 1}}}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
GRAMMAR = (
    "it must be one word of letters, digits, '_' and '-', "
    f"'{UNREPEATABLE}<operation>', or '<incoming or trained>.<train, val or test>.<metric>' "
    "(docs/plugs.md lists the forms of a metric)"
)


@dataclass(frozen=True)
class Metric:
    """The parts of a metric's name.

    Attributes:
        word: the word before ``-from-``, or the name of the family.
        place: the label, bin or site of a family's member; otherwise empty.
        part: the quantity that a family's member gives for this class, bin or site; empty if the
            metric covers all samples.
        site: the other site in the name, whose model was measured (``-from-``) or whose expert was
            routed to; otherwise empty.
    """

    word: str
    place: str = ""
    part: str = ""
    site: str = ""


@dataclass(frozen=True)
class Measurement:
    """The parts of a measurement's key."""

    model: str  # INCOMING or TRAINED
    split: str  # one of SPLITS
    name: str  # the metric as it is written
    metric: Metric  # the same, taken apart


def best_direction(name: str) -> int:
    """Return 1 if a higher value of a metric is better, -1 if a lower value is, and 0 otherwise.

    The prefixes ``trained-``, ``own-`` and ``labels-`` and the end ``-from-<site>`` do not matter.
    The result is 0 for entropy, because a model may be certain and wrong. It is also 0 for a metric
    that fedsilo does not know, or that covers a single class or bin, such as ``class.0.auc``.
    """
    return METRICS.get(_plain_word(name), _UNKNOWN).better


def metric_range(name: str) -> tuple[float, float]:
    """Return the smallest and largest possible value of a metric, such as (0, 1) for a share.

    Infinity stands for a missing bound. Metrics that fedsilo does not know have no bounds, and
    neither do metrics of a single class or bin.
    """
    rule = METRICS.get(_plain_word(name), _UNKNOWN)
    return rule.low, rule.high


def _plain_word(name: str) -> str:
    """Reduce a metric's name to the plain metric: "auc" for "trained-own-auc-from-north".

    The prefixes ``trained-``, ``own-`` and ``labels-`` are removed, if they come in this order, and
    so is the end ``-from-<site>``. The result is empty for a name that ``read_metric`` refuses. It
    is also empty for a metric of a part of the samples, such as ``class.0.auc``. The result need
    not be in the table ``METRICS``.
    """
    metric = read_metric(name.removeprefix(TRAINED_PREFIX))
    if metric is None or metric.part:
        return ""
    return metric.word.removeprefix("own-").removeprefix("labels-")


def read_metric(name: str) -> Metric | None:
    """Parse a metric's name, such as ``accuracy``, ``class.0.right`` or ``auc-from-north``.

    A name that begins with a family such as ``class.`` has the form ``<family>.<place>.<part>``.
    Any other name is a word, which may end with ``-from-<site>``. A word that fedsilo does not know
    is accepted, because plugins may have metrics of their own. A family alone and the prefix
    ``trained-`` are refused.

    Returns:
        The fields of the name; None if it does not have such a form. For ``class.0.right``, the
        word is "class", the place "0" and the part "right". For ``auc-from-north``, the word is
        "auc" and the site "north". A field that the name lacks is empty.
    """
    family, dot, rest = name.partition(".")
    if dot and family in _PARTS:
        return _read_member(family, rest)
    word, between, source = name.partition(FROM)
    if not _WORD.fullmatch(word) or word.startswith(TRAINED_PREFIX) or word in _PARTS:
        return None
    if between and not is_site_name(source):
        return None
    return Metric(word, site=source)


def _read_member(family: str, rest: str) -> Metric | None:
    """Parse the name of a metric in a family, without the family and its dot.

    In ``class.0.right``, ``family`` is "class" and ``rest`` is "0.right". The text after the last
    dot ("right") is the part, and the text before it ("0") is the place. The table ``_PARTS`` lists
    the parts of each family. The family also decides which places are allowed:

    - "routing": the name of a site;
    - "class" and "finding": a whole number of up to six digits;
    - "outcome" and the families in ``BIN_FAMILIES``: the number of a bin, from 0 to 9;
    - "survival": the number of a point of the survival curve, from 0 to 39.

    Returns:
        The family, the place, the part and, for "routing", the site. None if the family does not
        have the part, or does not allow the place.
    """
    # The part follows the last dot, because the name of a site may have dots itself
    place, _, part = rest.rpartition(".")
    if part not in _PARTS[family]:
        return None
    if family == ROUTING:
        if not is_site_name(place):
            return None
        return Metric(family, place, part, site=place)
    is_known = bool(_NUMBER.fullmatch(place))
    if family in (*BIN_FAMILIES, OUTCOME) and is_known:
        is_known = int(place) < BINS
    if family == SURVIVAL_CURVE and is_known:
        is_known = int(place) < SURVIVAL_POINTS
    return Metric(family, place, part) if is_known else None


def read_measurement(key: str) -> Measurement | None:
    """Parse a measurement's key, ``<model>.<split>.<metric>``.

    The model must be ``incoming``, which a site received, or ``trained``. The split must be train,
    val or test. ``read_metric`` decides which metrics are allowed.

    Returns:
        The model, the split, the metric's name and the parsed name; None if the key breaks a rule.
    """
    model, _, rest = key.partition(".")
    split, dot, name = rest.partition(".")
    if model not in (INCOMING, TRAINED) or split not in SPLITS or not dot:
        return None
    metric = read_metric(name)
    return Measurement(model, split, name, metric) if metric else None


def is_metric_key(key: str) -> bool:
    """Return whether a site's reply may have a metric with this key.

    Three forms are allowed:

    - one word of up to 64 letters, digits, '_' and '-', which does not begin with '-';
    - ``unrepeatable.<operation>``, where the operation has up to 200 letters, digits, dots, '_' and
      '-', and does not begin with '-';
    - a measurement ``<model>.<split>.<metric>`` that ``read_measurement`` accepts.
    """
    if _WORD.fullmatch(key):
        return True
    if key.startswith(UNREPEATABLE):
        return bool(_OPERATION.fullmatch(key.removeprefix(UNREPEATABLE)))
    return read_measurement(key) is not None


@dataclass(frozen=True)
class BinCounts:
    """The content of one bin: its samples, the right predictions, and the mean score.

    All three are floats, as all metrics are. The mean is from 0 to 1.
    """

    count: float
    right: float
    mean: float


def read_bins(values: Mapping[str, float], family: str) -> dict[int, BinCounts]:
    """Collect the bins of one family of metrics, such as the bins of a calibration curve.

    A family divides a score from 0 to 1, such as the confidence, into ten equal bins. A bin has
    three metrics of its samples: their number (count), the number of right predictions (right), and
    the mean score (mean). A bin that lacks one of them is left out, so the result may be empty.

    Args:
        values: metric -> value, for one site and split, with keys such as ``<family>.0.count``.
        family: a name in ``BIN_FAMILIES``.

    Returns:
        Number of the bin, from 0 to 9 -> its content, in rising order.
    """
    bins: dict[int, BinCounts] = {}
    for number in range(BINS):
        parts = [values.get(f"{family}.{number}.{part}") for part in BIN_PARTS]
        count, right, mean = parts
        if count is not None and right is not None and mean is not None:
            bins[number] = BinCounts(count, right, mean)
    return bins
