"""Mix, an upper bound: one model trained on the pooled data of all sites."""

from dataclasses import dataclass

from fedsilo.core.messages import Notes
from fedsilo.core.settings.own_settings import OwnSettings


@dataclass(frozen=True)
class PoolNotes(Notes):
    """The sites whose training data are pooled."""

    sites: tuple[str, ...]


@dataclass(frozen=True)
class MixSettings(OwnSettings):
    """Mix has no settings of its own."""

    title = "Mix (oracle)"
    server = "fedsilo.strategies.methods.fedavg:Mix"
    site = "fedsilo.client_app.methods.mix:MixSite"
    why_not_private = "pools the data of all sites, whose parts nothing bounds"
