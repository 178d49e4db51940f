"""The decision curve: compares acting on the model with acting on everybody or on nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from fedsilo.models.figures.palette import line_styles
from fedsilo.models.measures.decision_curve import net_benefit
from fedsilo.server_app.studies.monitor.groups import Examined
from fedsilo.server_app.studies.report.page import Block, Picture, Pictures, Section, Table, Text
from fedsilo.server_app.studies.report.pictures import curves

_THRESHOLDS = [percent / 100 for percent in range(5, 100, 5)]
_EVEN = 0.5  # from this probability on, the second class is the prediction
_LOWEST = -0.15  # the curve for acting on all falls without limit, so it is cut off here
_TITLE = "Benefit of acting on the model"


def thresholds(scores: Tensor, floor: int) -> Iterator[float]:
    """Yield thresholds of scores (n,), with at least ``floor`` patients between two of them.

    Closer thresholds would reveal the model's predictions for the few patients between them. 0.5
    counts as a threshold, because sensitivity and specificity are shown for it.
    """
    before = 0.0
    for threshold in _THRESHOLDS:
        start = max(before, _EVEN) if threshold > _EVEN else before
        below = (scores >= start) & (scores < threshold)
        above = (scores >= threshold) & (scores < (_EVEN if threshold < _EVEN else math.inf))
        if min(int(below.sum()), int(above.sum())) >= floor:
            yield threshold
            before = threshold


def decision_section(found: Examined) -> Section:
    """Build the section with the curve and its table, or with the reason why there is none."""
    if len(found.classes) != 2:
        return Section(
            _TITLE, [Text(["A decision curve needs two classes, but this run has more."])]
        )
    scores, ill = found.probabilities[:, 1], found.labels == 1
    n, rows = len(scores), list[tuple[float, float, float]]()
    for threshold in thresholds(scores, found.floor):
        acted = scores >= threshold
        by_model = net_benefit(int((acted & ill).sum()), int((acted & ~ill).sum()), n, threshold)
        by_all = net_benefit(int(ill.sum()), int((~ill).sum()), n, threshold)
        rows.append((threshold, by_model, by_all))
    if not rows:
        return Section(_TITLE, [Text(["There are too few test patients for a decision curve."])])
    return Section(_TITLE, list(_blocks(found, rows)))


def _blocks(found: Examined, rows: list[tuple[float, float, float]]) -> Iterator[Block]:
    name = found.classes[1]
    yield Text(
        [
            f"A threshold is the probability of '{name}' from which somebody acts. It states how "
            "bad a miss is compared with a false alarm: 9 times as bad at 0.1, equally bad at 0.5. "
            "Net benefit is the number of true positives per patient, minus the false alarms "
            "weighted by the threshold's odds. The model is useful at a threshold if its net "
            "benefit is above that of acting on everybody and above 0, that of acting on nobody."
        ]
    )
    lines = {
        "the model": {round(100 * at): model for at, model, _ in rows},
        f"all are '{name}'": {round(100 * at): e for at, _, e in rows if e > _LOWEST},
        "nobody": {round(100 * at): 0.0 for at, *_ in rows},
    }
    best = [f"{at:g}" for at, model, everybody in rows if model > max(0.0, everybody)]
    said = f"Thresholds at which the model is above both: {', '.join(best) or 'none'}."
    svg = curves("decision", lines, line_styles(list(lines)), "net benefit", "threshold in percent")
    yield Pictures([Picture(svg, f"Net benefit by threshold. {said}", said)])
    table = [[f"{at:g}", f"{model:.3f}", f"{everybody:.3f}"] for at, model, everybody in rows]
    note = (
        f"Vickers and Elkin 2006; {len(found.labels)} test patients of {', '.join(found.sites)}. "
        f"At least {found.floor} patients lie between two thresholds."
    )
    yield Table("Net benefit", ("threshold", "the model", "acting on all"), table, note)
