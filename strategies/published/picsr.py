"""Table 1 of the PICSR paper: accuracy on Fed-Heart-Disease, mean and sd of five runs."""

from __future__ import annotations

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.reporting import Published
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.published.conditions import WHOLE, Conditions

_SITES = ("cleveland", "hungary", "switzerland", "va")
_TABLE_1: dict[str, tuple[tuple[float, float], ...]] = {
    "Local": ((0.7731, 0.0077), (0.7775, 0.0218), (0.9000, 0.0500), (0.7689, 0.0227)),
    "Ensemble": ((0.7981, 0.0192), (0.7888, 0.0229), (0.8125, 0.0395), (0.7778, 0.0314)),
    "FedAvg": ((0.7577, 0.0196), (0.7978, 0.0100), (0.9000, 0.0500), (0.8044, 0.0166)),
    "FedAvg+FT": ((0.7712, 0.0038), (0.7865, 0.0000), (0.9375, 0.0000), (0.8178, 0.0089)),
    "FedProx": ((0.7692, 0.0061), (0.7888, 0.0045), (0.8875, 0.0468), (0.8133, 0.0109)),
    "PICSR": ((0.7788, 0.0211), (0.8067, 0.0131), (0.9000, 0.0306), (0.8267, 0.0166)),
}
_CONDITIONS = Conditions({"dataset": ["heart"], **WHOLE}, sites=_SITES)


def heart_disease(column: str, common: CommonSettings, participants: Participants) -> Published:
    """Return a column of the table, if the run is on the same sites and the same split.

    The paper names neither its network nor its training. The mean over sites is not in the paper;
    it is that of its four numbers.
    """
    column_ = dict(zip(_SITES, _TABLE_1[column], strict=True))
    table = {site: {"accuracy": mean, "accuracy-sd": sd} for site, (mean, sd) in column_.items()}
    mean = sum(mean for mean, _ in column_.values()) / len(column_)
    figures = Published({**table, "all": {"accuracy": mean}})
    return _CONDITIONS.beside(figures, common, None, participants.sites())
