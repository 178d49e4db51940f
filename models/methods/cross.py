"""Train here, test there: what both sides call a figure of a model that was trained elsewhere.

It is the comparison "Cross" of the Fed-Align-CL paper (Jimenez-Sanchez et al. 2023).

Equations (arXiv:2107.02504):
  (cross) each site's model at every other -> client_app.methods.cross.CrossSite
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.settings import NoSettings

CROSSED = ("accuracy", "balanced-accuracy", "auc", "average-precision")


@dataclass(frozen=True)
class CrossSettings(NoSettings):
    """None of its own."""


def metric_from(metric: str, site: str) -> str:
    """Return the name of ``metric`` of the model that was trained at ``site``.

    It is looked up and never taken apart: a site's name may hold any character.
    """
    return f"{metric}-from-{site}"
