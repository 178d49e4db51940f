"""A star: silos around a server, each of which continues from the mean of all (FedEFM's STAR)."""

from fedsilo.models.methods.decentralised import LinkSettings as StarSettings

__all__ = ["StarSettings"]
