"""Ensemble: the mean of the probabilities that the sites' models give."""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings


@dataclass(frozen=True)
class EnsembleSettings(OwnSettings):
    """Ensemble has no settings of its own."""

    title = "Ensemble"
    server = "fedsilo.strategies.methods.local:Ensemble"
    site = "fedsilo.client_app.methods.ensemble:EnsembleSite"
