"""Local: each site trains alone, and no part of its model reaches another site."""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings


@dataclass(frozen=True)
class LocalSettings(OwnSettings):
    """Local has no settings of its own."""

    title = "Local"
    server = "fedsilo.strategies.methods.local:Local"
    site = "fedsilo.client_app.methods.local:LocalSite"
