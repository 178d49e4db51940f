"""On what terms the server's operator lets a node take part: by its name, and by what it counts.

Both are files at the server, read before anybody is asked: ``server_app/config/operator_files.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedsilo.models.contract.site_facts import SiteFacts


@dataclass(frozen=True)
class Registry:
    """Which node may say which name; a node's number belongs to one registered key."""

    path: str  # the file, for errors
    nodes: Mapping[str, int]  # node by site

    def fault(self, node: int, site: str) -> str | None:
        """Say why ``node`` may not be ``site``, if it may not."""
        if self.nodes.get(site) == node:
            return None
        name = next((name for name, known in self.nodes.items() if known == node), None)
        if name is None:
            return (
                f"node {node} says that it is '{site}': its key is registered at the SuperLink, "
                f"and the other registration, its line in {self.path}, is missing: 'fedsilo deploy "
                f"renew {site}', or 'add', writes both"
            )
        return (
            f"node {node} is registered as '{name}' and says that it is '{site}': give it its own "
            f"'site' in its node config, or correct {self.path}"
        )


@dataclass(frozen=True)
class AgreedWeights:
    """How many training samples each site was agreed to count for."""

    path: str  # the file, for errors
    samples: Mapping[str, int]  # by site

    def fault(self, facts: SiteFacts) -> str | None:
        """Say why a site may not count as many samples as it says, if it may not."""
        site, said = facts.site, facts.sizes()["train"]
        if site not in self.samples:
            return f"site {site} has no entry in 'site-weights' {self.path}: add one"
        if said > self.samples[site]:
            return (
                f"site {site} says that it has {said} training samples, and {self.path} agrees on "
                f"{self.samples[site]}: ask the hospital, or agree on another ('site-weights')"
            )
        return None


@dataclass(frozen=True)
class Terms:
    """What a node must fulfil in addition to being readable."""

    registry: Registry | None = None  # names bound to keys, or None if any node may say any name
    # Agreed counts of training samples, or None if sites weigh what they say
    weights: AgreedWeights | None = None
    # Says why the run's method cannot use a site, if it cannot
    unfit: Callable[[SiteFacts], str | None] | None = field(default=None, compare=False)

    def fault(self, node: int, facts: SiteFacts, simulated: bool = False) -> str | None:
        """Say in one line why the node cannot take part, if it cannot.

        ``simulated``: all of the run's sites are, and have no keys to be known by.
        """
        fault = self.registry.fault(node, facts.site) if self.registry and not simulated else None
        if self.weights:
            fault = fault or self.weights.fault(facts)
        return fault or (self.unfit(facts) if self.unfit else None)
