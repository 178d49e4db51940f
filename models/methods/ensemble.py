"""Ensemble: the mean of the probabilities that the sites' models give."""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.tasks import CLASSIFICATION


@dataclass(frozen=True)
class EnsembleSettings(OwnSettings):
    """Ensemble has no settings of its own."""

    title = "Ensemble"
    tasks = (CLASSIFICATION,)
    why_tasks = "averages class probabilities"
    server = "fedsilo.strategies.methods.local:Ensemble"
    site = "fedsilo.client_app.methods.ensemble:EnsembleSite"
