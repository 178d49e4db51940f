"""Cross (Jimenez-Sanchez et al. 2023): each site's own model is tested at every other site.

Equations (arXiv:2107.02504):
  (cross) each site's model at every other -> client_app.methods.cross.CrossSite
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.tasks.task import task_class

CROSSED = ("accuracy", "balanced-accuracy", "auc", "average-precision")


def crossed_metrics(task: str) -> tuple[str, ...]:
    """Return the names of the metrics that are measured when sites test each other's models.

    For classification they are ``accuracy``, ``balanced-accuracy``, ``auc`` and
    ``average-precision``. For any other task they are the metrics that the task shows in result
    tables, in the same order, without ``loss``.
    """
    if task == CLASSIFICATION:
        return CROSSED
    return tuple(metric for metric in task_class(task).shown if metric != "loss")


def metric_from(metric: str, site: str) -> str:
    """Return the name of ``metric`` for the model trained at ``site``: ``<metric>-from-<site>``.

    ``fedsilo.core.metric_names.read_metric`` parses it again.
    """
    return f"{metric}-from-{site}"


@dataclass(frozen=True)
class CrossSettings(OwnSettings):
    """Cross has no settings of its own."""

    title = "Cross"
    server = "fedsilo.strategies.methods.local:Cross"
    site = "fedsilo.client_app.methods.cross:CrossSite"
