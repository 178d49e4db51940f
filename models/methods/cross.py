"""Train here, test there: what both sides call a figure of a model that was trained elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from models.contract.settings import NoSettings

CROSSED = ("accuracy", "balanced-accuracy", "auc", "average-precision")


@dataclass(frozen=True)
class CrossSettings(NoSettings):
    """None of its own."""


def metric_from(metric: str, site: str) -> str:
    """Return the name of ``metric`` of the model that was trained at ``site``.

    It is looked up and never taken apart: a site's name may hold any character.
    """
    return f"{metric}-from-{site}"
