"""Mix, an upper bound: one model trained on the pooled data of all sites."""

from dataclasses import dataclass

from fedsilo.models.contract.messages import Notes
from fedsilo.models.contract.own_settings import NoSettings as MixSettings

__all__ = ["MixSettings", "PoolNotes"]


@dataclass(frozen=True)
class PoolNotes(Notes):
    """The sites whose training data are pooled."""

    sites: tuple[str, ...]
