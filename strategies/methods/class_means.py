"""Methods whose sites keep their networks and send a mean for each class of enough samples."""

from abc import abstractmethod
from typing import ClassVar

from fedsilo.models.maths.class_means import large_classes
from fedsilo.strategies.loop.method import ArraySpec, Capabilities, Disclosures
from fedsilo.strategies.methods.local import Local


class ClassMeans(Local):
    """What FedProto and FedDistill have in common; a mean's name is ``<kind><class>``."""

    kind: ClassVar[str]  # of the means, ``prototype/`` for one
    capabilities = Capabilities(initial_weights=True)

    @property
    @abstractmethod
    def size(self) -> int:
        """The length of a mean."""

    def held(self, site: str) -> dict[int, int]:
        """Return the classes whose means ``site`` sends, with their counts of training samples.

        The run's 'class-min-count' and the site's own floor decide.
        """
        counts = self.participants.facts[site].label_counts["train"]
        return large_classes(counts, self._floor(site))

    def specs(self, site: str) -> dict[str, ArraySpec]:
        """Return the means that ``site`` sends."""
        return {f"{self.kind}{label}": ArraySpec((self.size,)) for label in self.held(site)}

    def disclosures(self) -> Disclosures:
        """Name the means, of how few samples they are, and who gets them."""
        if any(self.held(site) for site in self.participants.sites()):
            return Disclosures(*self.means_that_leave())
        reason = f"there is no class that {self.enough()}"
        return Disclosures(f"each round: no class mean, since {reason}")

    @abstractmethod
    def means_that_leave(self) -> list[str]:
        """Say what leaves where a site sends a mean."""

    def enough(self) -> str:
        """Say how many training samples of a class a site must have to send its mean."""
        floors = {site: self._floor(site) for site in self.participants.sites()}
        lowest = min(floors.values())
        higher = [f"site {site} {floor}" for site, floor in floors.items() if floor > lowest]
        return f"the site has at least {lowest} training samples of" + (
            f" ({', '.join(higher)})" if higher else ""
        )

    def fewest(self) -> str:
        """Say of how few training samples a class's mean is at some site; one must send some."""
        count, site, label = min(
            (count, site, label)
            for site in self.participants.sites()
            for label, count in self.held(site).items()
        )
        if count == 1:
            return f"which at site {site}, class {label}, is that of one single sample"
        return f"of as few as {count} (site {site}, class {label})"

    def _floor(self, site: str) -> int:
        return max(int(self.settings.class_min_count), self.participants.facts[site].floor)
