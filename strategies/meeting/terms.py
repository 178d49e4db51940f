"""Conditions under which a node takes part: the run's sites, registered names, agreed weights.

The files are read by ``server_app/config/operator_files.py``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fedsilo.core.errors import SettingError
from fedsilo.core.files.site_names import site_name_fault
from fedsilo.core.site_facts import SiteFacts


@dataclass(frozen=True)
class Registry:
    """Binds site names to registered node ids; a node id belongs to one registered key."""

    path: str  # the file of registrations, named in errors
    nodes: Mapping[str, int]  # the node id of each site, by site name

    def fault(self, node: int, site: str) -> str | None:
        """Explain why ``node`` may not take part as ``site``, or return None if it may.

        The node must be registered under this name. If it has another registered name, the
        explanation says so. Otherwise it says how to register the node.
        """
        if self.nodes.get(site) == node:
            return None
        for name, known in self.nodes.items():
            if known == node:
                return (
                    f"node {node} is registered as '{name}', but says that it is '{site}': give it "
                    f"its own 'site' in its node config, or correct {self.path}"
                )
        return (
            f"node {node} says that it is '{site}': its key is registered at the SuperLink, but "
            f"its line in {self.path} is missing: 'fedsilo deploy renew {site}', or 'add', writes "
            "both registrations"
        )


@dataclass(frozen=True)
class AgreedWeights:
    """The number of training samples that each site may count for, as agreed beforehand."""

    path: str  # the file of agreed weights, named in errors
    samples: Mapping[str, int]  # the agreed number for each site, by name

    def fault(self, facts: SiteFacts) -> str | None:
        """Explain why a site's training samples do not fit 'run.site-weights', or return None.

        It is a fault if that file has no number for the site, or if the site reports more samples
        than that number. Reporting fewer samples is not a fault.
        """
        site, said = facts.site, facts.sizes["train"]
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
    sites: tuple[str, ...] = ()  # the only sites of the run ('server.sites'); empty: all sites

    def fault(self, node: int, facts: SiteFacts, simulated: bool = False) -> str | None:
        """Explain in one line why the node cannot take part, or return None if it can.

        ``registry``, ``weights`` and ``unfit`` are checked in this order. ``unfit`` is the
        condition of the run's federated-learning method. A field that is None is skipped.

        Args:
            node: the node's id.
            facts: the site's description of itself and its data.
            simulated: whether all sites of the run are simulated. The registry is then skipped,
                because simulated sites have no keys to register.
        """
        fault = None
        if self.registry and not simulated:
            fault = self.registry.fault(node, facts.site)
        if self.weights and not fault:
            fault = self.weights.fault(facts)
        if self.unfit and not fault:
            fault = self.unfit(facts)
        return fault

    def refuse_unregistered(self) -> None:
        """Check that all sites in 'server.sites' are in the registry.

        Without a registry, or if 'server.sites' is empty, nothing is checked.

        Raises:
            SettingError: the registry lacks a site, for example because its name is misspelt.
        """
        if not self.registry:
            return
        unknown = sorted(set(self.sites) - self.registry.nodes.keys())
        if unknown:
            raise SettingError(
                f"setting 'server.sites' names {', '.join(unknown)}, but {self.registry.path} has "
                f"only {', '.join(sorted(self.registry.nodes)) or 'no site'}: correct the name, or "
                "admit the hospital by 'fedsilo deploy add'"
            )

    def choose_nodes(self, nodes: Iterable[int]) -> list[int]:
        """Return those of ``nodes`` that may be a site of the run, sorted.

        If 'server.sites' names sites and there is a registry, these are the nodes registered for
        the named sites. Otherwise these are all ``nodes``, because the site of a node is not known
        until it answers.
        """
        if not self.sites or not self.registry:
            return sorted(nodes)
        own = {node for site, node in self.registry.nodes.items() if site in self.sites}
        return sorted(own.intersection(nodes))

    def of_sites(self) -> str:
        """Return " of " and the names in 'server.sites', joined by commas, for an error message.

        If the run takes all sites, the string is empty.
        """
        if not self.sites:
            return ""
        return f" of {', '.join(self.sites)}"

    def is_outside(self, site: str) -> bool:
        """Return whether the run names its sites, and ``site`` is not one of them."""
        return bool(self.sites) and site not in self.sites


def split_sites(text: str) -> tuple[str, ...]:
    """Split the value of 'server.sites' into names of sites, in their given order.

    The names are separated by commas, and spaces around a name are ignored. An empty string gives
    an empty tuple.

    Raises:
        SettingError: a name is empty, occurs twice, or cannot name a site (``site_name_fault``).
    """
    if not text.strip():
        return ()
    sites = tuple(part.strip() for part in text.split(","))
    for number, site in enumerate(sites):
        fault = site_name_fault(site)
        if site in sites[:number]:
            fault = f"site '{site}' is named twice"
        if fault:
            raise SettingError(f"setting 'server.sites': {fault}")
    return sites
