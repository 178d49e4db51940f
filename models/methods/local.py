"""Local: each site trains alone, and nothing of one site's model reaches another."""

from fedsilo.models.contract.own_settings import NoSettings as LocalSettings

__all__ = ["LocalSettings"]
