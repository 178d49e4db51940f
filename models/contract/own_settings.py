"""What all methods say about themselves, and what their settings have in common."""

from dataclasses import dataclass
from typing import ClassVar

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts


class OwnSettings:
    """A method's own settings, and what the method says about itself to server and sites alike.

    Its class is a frozen dataclass whose fields are the settings. The class attributes are facts
    that a server and a hospital must read the same way, so they stand here, where both import them.

    Attributes:
        title: the method's name as people write it.
        server: ``module:Class`` of the server's side.
        site: ``module:Class`` of what a site does.
        why_not_private: why differential privacy per patient does not hold for what the method
            sends or trains on, or None if it does.
        sums_suffice: whether the server needs only the sum of the sites' arrays, weighted by
            samples, so that secure aggregation can hide each site's own.
    """

    title: ClassVar[str] = ""
    server: ClassVar[str] = ""
    site: ClassVar[str] = ""
    why_not_private: ClassVar[str | None] = None
    sums_suffice: ClassVar[bool] = False

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that the settings do not contradict each other.

        Args:
            common: the run's common settings.
            is_table: whether the data set is a table.

        Raises:
            SettingError: they do.
        """

    def why_unfit(self, facts: SiteFacts) -> str | None:
        """Return in one line why the method cannot use a site with these facts, or None if it can.

        An unfit site is left out before anything is trained; 'min-sites' decides whether the run
        goes on without it.
        """
        return None


@dataclass(frozen=True)
class NoSettings(OwnSettings):
    """The settings of a plugin that has none of its own."""
