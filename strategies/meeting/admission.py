"""The operator's terms for a node: its registered name, and its agreed number of samples.

Both are files at the server, read before any site is asked:
``server_app/config/operator_files.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedsilo.models.contract.site_facts import SiteFacts


@dataclass(frozen=True)
class Registry:
    """Binds site names to registered node ids; a node id belongs to one registered key."""

    path: str  # the file of registrations, named in errors
    nodes: Mapping[str, int]  # the node id of each site, by site name

    def fault(self, node: int, site: str) -> str | None:
        """Explain why ``node`` may not take part as ``site``, or return None."""
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
    """The number of training samples that each site may count for, as agreed beforehand."""

    path: str  # the file of agreed weights, named in errors
    samples: Mapping[str, int]  # the agreed number for each site, by name

    def fault(self, facts: SiteFacts) -> str | None:
        """Explain why a site may not count for the samples that it reports, or return None."""
        site, said = facts.site, facts.sizes()["train"]
        if site not in self.samples:
            return f"site {site} has no entry in 'run.site-weights' {self.path}: add one"
        if said > self.samples[site]:
            return (
                f"site {site} says that it has {said} training samples, but {self.path} agrees on "
                f"{self.samples[site]}: ask the hospital, or change the number ('run.site-weights')"
            )
        return None


@dataclass(frozen=True)
class Terms:
    """Conditions that a node must meet in addition to a readable hello."""

    registry: Registry | None = None  # None: any node may take any name
    # None: sites weigh as many samples as they report
    weights: AgreedWeights | None = None
    # Returns why the run's method cannot use a site, or None
    unfit: Callable[[SiteFacts], str | None] | None = field(default=None, compare=False)

    def fault(self, node: int, facts: SiteFacts, simulated: bool = False) -> str | None:
        """Explain in one line why the node cannot take part, or return None.

        Args:
            node: the node's id.
            facts: the site's hello.
            simulated: whether all sites of the run are simulated. These have no keys to check.
        """
        fault = self.registry.fault(node, facts.site) if self.registry and not simulated else None
        if self.weights:
            fault = fault or self.weights.fault(facts)
        return fault or (self.unfit(facts) if self.unfit else None)
