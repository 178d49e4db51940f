"""Table III of the Fed-Align-CL paper: AUC and PR-AUC of malignancy, medians of five runs.

The paper's PR-AUC is held against average precision here.
"""

from __future__ import annotations

from typing import Any

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.cross import metric_from
from fedsilo.strategies.loop.reporting import Published
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.published.conditions import WHOLE, Conditions

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
# Section IV: 50 epochs of 120 steps from Wu's weights; tau is 40 here, the paper saw no difference
_CONDITIONS = Conditions(
    {
        "dataset": ["mammography"],
        **WHOLE,
        "image-size": [2048],
        "network": ["resnet22"],
        "dropout": [0.5],
        "classifier": ["seed"],
        "optimiser": ["adam"],
        "learning-rate": [1e-5],
        "epoch-steps": [120],
        "pace": [40],
        "rounds": [150],
        "fedaligncl.pretraining-epochs": [0],
        "fedaligncl.warmup-epochs": [5],
        "fedaligncl.forgotten-weight": [2.0],
        "fedaligncl.noise-variance": [0.001],
        "fedaligncl.noise-scale": ["absolute"],
    },
    given=["backbone-weights"],
    sites=_SITES,
)


def mammography(
    row: str, common: CommonSettings, participants: Participants, own: Any = None
) -> Published:
    """Return a row of the table, if the run is on the same sites, split, network and schedule.

    The mean over sites is given where the paper prints one: not for "Single".

    Args:
        row: in the paper's words.
        common: the run's settings.
        participants: the run's sites.
        own: Fed-Align-CL's settings, of its variants.
    """
    figures = _figures(row) if row in _TABLE_3 else {}
    return _CONDITIONS.beside(Published(figures), common, own, participants.sites())


def mammography_cross(common: CommonSettings, participants: Participants) -> Published:
    """Return "Single" and, beside it, what the models of the other sites reach at each site."""
    figures = {
        tested: {
            **single,
            **{
                metric_from(metric, trained): value
                for trained, elsewhere in _CROSS.items()
                if tested in elsewhere
                for metric, value in zip(_METRICS, elsewhere[tested], strict=True)
            },
        }
        for tested, single in _figures("Single").items()
    }
    return _CONDITIONS.beside(Published(figures), common, None, participants.sites())


def _figures(row: str) -> dict[str, dict[str, float]]:
    printed = dict(zip((*_SITES, "all"), _TABLE_3[row], strict=False))  # "Single" has no average
    return {
        group: dict(zip(_METRICS, printed[group], strict=True))
        for group in (*sorted(_SITES), "all")
        if group in printed
    }
