"""Base of methods whose sites keep their networks and send one mean per large enough class."""

from abc import abstractmethod
from typing import ClassVar

from fedsilo.models.maths.class_means import large_classes
from fedsilo.strategies.loop.method import ArraySpec, Capabilities, Disclosures
from fedsilo.strategies.methods.local import Local


class ClassMeans(Local):
    """The common part of FedProto and FedDistill; a mean's array is named ``<kind><class>``."""

    kind: ClassVar[str]  # the prefix of the means' array names, such as ``prototype/``
    capabilities = Capabilities(initial_weights=True)

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of values in a mean."""

    def held(self, site: str) -> dict[int, int]:
        """Return the classes whose means ``site`` sends, with their numbers of training samples.

        A class needs at least 'class-min-count' samples, and at least the site's own floor.
        """
        counts = self.participants.facts[site].label_counts["train"]
        return large_classes(counts, self._floor(site))

    def specs(self, site: str) -> dict[str, ArraySpec]:
        """Return the specs of the means that ``site`` sends."""
        return {f"{self.kind}{label}": ArraySpec((self.size,)) for label in self.held(site)}

    def disclosures(self) -> Disclosures:
        """Describe the means, their smallest number of samples, and their recipients."""
        if any(map(self.held, self.participants.sites())):
            return Disclosures(*self.means_that_leave())
        reason = f"there is no class that {self.enough()}"
        return Disclosures(f"each round: no class mean, since {reason}")

    @abstractmethod
    def means_that_leave(self) -> list[str]:
        """Return sentences on the data that leave a site that sends means."""

    def enough(self) -> str:
        """Put into words from how many training samples of a class a site sends its mean.

        The words give the lowest number, and name the sites that need more.
        """
        sites = self.participants.sites()
        lowest = min(map(self._floor, sites))
        higher = []
        for site in sites:
            if self._floor(site) > lowest:
                higher.append(f"site {site} {self._floor(site)}")
        words = f"the site has at least {lowest} training samples of"
        if higher:
            words += f" ({', '.join(higher)})"
        return words

    def fewest(self) -> str:
        """Describe the mean over the fewest training samples; some site must send a mean."""
        means = []
        for site in self.participants.sites():
            for label, count in self.held(site).items():
                means.append((count, site, label))
        count, site, label = min(means)
        if count == 1:
            return f"which at site {site}, class {label}, is that of one single sample"
        return f"of as few as {count} (site {site}, class {label})"

    def _floor(self, site: str) -> int:
        return max(int(self.settings.class_min_count), self.participants.facts[site].floor)
