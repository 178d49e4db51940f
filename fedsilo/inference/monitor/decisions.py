"""The decision curve: compares acting on the model with acting on everybody or on nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedsilo.core.drawing.palette import line_styles
from fedsilo.inference.monitor.groups import Examined
from fedsilo.models.measures.decision_curve import net_benefit
from fedsilo.pages.page import Picture, Table
from fedsilo.pages.page_pictures import curves
from fedsilo.reports.clinic import Examination

_THRESHOLDS = [percent / 100 for percent in range(5, 100, 5)]
_EVEN = 0.5  # the second class is the prediction if its probability is at least this
_LOWEST = -0.15  # the curve for acting on all falls without limit, so it is cut off here
_TITLE = "Benefit of acting on the model"


def thresholds(scores: Tensor, floor: int) -> Iterator[float]:
    """Yield thresholds of scores (n,), with at least ``floor`` patients between two of them.

    Closer thresholds would reveal the model's predictions for the few patients between them. 0.5
    counts as a threshold, because sensitivity and specificity are shown for it.
    """
    before = 0.0
    for threshold in _THRESHOLDS:
        # Patients between the threshold and its neighbours on both sides; 0.5 is always one
        start, end = before, math.inf
        if threshold > _EVEN:
            start = max(before, _EVEN)
        if threshold < _EVEN:
            end = _EVEN
        below = (scores >= start) & (scores < threshold)
        above = (scores >= threshold) & (scores < end)
        if min(int(below.sum()), int(above.sum())) >= floor:
            yield threshold
            before = threshold


def examine_decisions(found: Examined) -> Examination:
    """Compute the decision curve and its table, or say why there is none."""
    if len(found.classes) != 2:
        return Examination(_TITLE, ["A decision curve needs two classes, but this run has more."])
    benefits = _net_benefits(found)
    if not benefits:
        return Examination(_TITLE, ["There are too few test patients for a decision curve."])
    explained = (
        f"A threshold is the probability of '{found.classes[1]}' from which somebody acts. It "
        "states how bad a miss is compared with a false alarm: 9 times as bad at 0.1, equally bad "
        "at 0.5. Net benefit is the number of true positives per patient, minus the false alarms "
        "weighted by the threshold's odds. The model is useful at a threshold if its net benefit "
        "is above that of acting on everybody and above 0, that of acting on nobody."
    )
    picture = _draw_benefits(benefits, found.classes[1])
    return Examination(_TITLE, [explained], picture, [_table(found, benefits)])


@dataclass(frozen=True)
class _Benefit:
    """The net benefits per patient at a threshold."""

    threshold: float
    of_model: float  # acting on the patients whose score reaches the threshold
    of_all: float  # acting on everybody


def _net_benefits(found: Examined) -> list[_Benefit]:
    scores, ill = found.probabilities[:, 1], found.labels == 1
    patients, benefits = len(scores), list[_Benefit]()
    for threshold in thresholds(scores, found.floor):
        acted = scores >= threshold
        hits, false_alarms = int((acted & ill).sum()), int((acted & ~ill).sum())
        of_model = net_benefit(hits, false_alarms, patients, threshold)
        of_all = net_benefit(int(ill.sum()), int((~ill).sum()), patients, threshold)
        benefits.append(_Benefit(threshold, of_model, of_all))
    return benefits


def _draw_benefits(benefits: Sequence[_Benefit], ill: str) -> Picture:
    """Draw the curves of the model, of acting on all, and of acting on nobody."""
    model, everybody, nobody = dict[int, float](), dict[int, float](), dict[int, float]()
    best = []
    for one in benefits:
        percent = round(100 * one.threshold)
        model[percent], nobody[percent] = one.of_model, 0.0
        # The curve ends where it leaves the picture
        if one.of_all > _LOWEST:
            everybody[percent] = one.of_all
        if one.of_model > max(0.0, one.of_all):
            best.append(f"{one.threshold:g}")
    lines = {"the model": model, f"all are '{ill}'": everybody, "nobody": nobody}
    said = f"Thresholds at which the model is above both: {', '.join(best) or 'none'}."
    svg = curves("decision", lines, line_styles(list(lines)), "net benefit", "threshold in percent")
    return Picture(svg, f"Net benefit by threshold. {said}", said)


def _table(found: Examined, benefits: Sequence[_Benefit]) -> Table:
    rows = []
    for benefit in benefits:
        cells = [f"{benefit.of_model:.3f}", f"{benefit.of_all:.3f}"]
        rows.append([f"{benefit.threshold:g}", *cells])
    note = (
        f"Vickers and Elkin 2006; {len(found.labels)} test patients of {', '.join(found.sites)}. "
        f"At least {found.floor} patients lie between two thresholds."
    )
    return Table("Net benefit", ("threshold", "the model", "acting on all"), rows, note)
