"""What all settings of a method have in common, in addition to their fields."""

from dataclasses import dataclass

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts


class OwnSettings:
    """A method's own settings; its class is a frozen dataclass and overrides what it refuses."""

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Refuse settings that contradict each other, by a ``SettingError``.

        ``is_table``: the data set is one.
        """

    def why_unfit(self, facts: SiteFacts) -> str | None:
        """Say in one line why a site of these facts is unusable for the method, if it is.

        It is left out before anything is trained; 'min-sites' says whether the run goes on.
        """
        return None


@dataclass(frozen=True)
class NoSettings(OwnSettings):
    """The settings of a method that has none of its own."""
