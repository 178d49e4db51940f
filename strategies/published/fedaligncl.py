"""Table III of the Fed-Align-CL paper: AUC and PR-AUC of malignancy, medians of five runs.

The paper's PR-AUC is held against average precision here.
"""

from __future__ import annotations

from models.contract.settings import CommonSettings
from models.methods.cross import metric_from
from strategies.loop.participants import Participants
from strategies.loop.reporting import Published

_METRICS = ("auc", "average-precision")
_SITES = ("hologic", "siemens", "ge")
# Per site of the paper's order AUC and PR-AUC, then their averages as printed
_TABLE_3: dict[str, tuple[tuple[float, float], ...]] = {
    "Single": ((0.83, 0.84), (0.83, 0.84), (0.85, 0.83)),
    "Fed": ((0.78, 0.78), (0.65, 0.74), (0.83, 0.83), (0.75, 0.77)),
    "Fed-CL": ((0.80, 0.80), (0.63, 0.72), (0.81, 0.81), (0.75, 0.78)),
    "Fed-Align": ((0.79, 0.78), (0.69, 0.79), (0.85, 0.83), (0.78, 0.80)),
    "Fed-Align-CL": ((0.84, 0.84), (0.70, 0.79), (0.83, 0.82), (0.79, 0.82)),
    "Mix": ((0.83, 0.84), (0.86, 0.83), (0.82, 0.88), (0.84, 0.85)),
}
_CROSS: dict[str, dict[str, tuple[float, float]]] = {
    "hologic": {"siemens": (0.67, 0.74), "ge": (0.73, 0.74)},
    "siemens": {"hologic": (0.59, 0.63), "ge": (0.65, 0.67)},
    "ge": {"hologic": (0.64, 0.66), "siemens": (0.72, 0.79)},
}


def mammography(row: str, common: CommonSettings, participants: Participants) -> Published:
    """Return a row of the table, if the run is on the same sites and the same split.

    The mean over sites is given where the paper prints one: not for "Single".
    """
    whole = common.sample_share == 1 and not common.public_share
    cut = common.test_folds or not common.use_test
    as_there = common.dataset == "mammography" and whole and not cut
    if not as_there or row not in _TABLE_3 or participants.sites() != sorted(_SITES):
        return {}
    figures = dict(zip((*_SITES, "all"), _TABLE_3[row], strict=False))  # "Single" has no average
    return {
        group: dict(zip(_METRICS, figures[group], strict=True))
        for group in (*sorted(_SITES), "all")
        if group in figures
    }


def mammography_cross(common: CommonSettings, participants: Participants) -> Published:
    """Return "Single" and, beside it, what the models of the other sites reach at each site."""
    single = mammography("Single", common, participants)
    return {
        tested: {
            **figures,
            **{
                metric_from(metric, trained): value
                for trained, elsewhere in _CROSS.items()
                if tested in elsewhere
                for metric, value in zip(_METRICS, elsewhere[tested], strict=True)
            },
        }
        for tested, figures in single.items()
    }
