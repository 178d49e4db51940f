"""The base class of every method's settings, with the facts that a method states about itself."""

from dataclasses import dataclass
from typing import ClassVar

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts


class OwnSettings:
    """A method's own settings, and facts about the method.

    A subclass is a frozen dataclass whose fields are the settings. The class attributes are facts
    that server and hospitals must read in the same way, so they stand where both import them.

    Attributes:
        title: the method's name as people write it.
        server: ``module:Class`` of the server side.
        site: ``module:Class`` of the site side.
        why_not_private: the reason why the method cannot be differentially private per patient,
            as a predicate, or None if it can.
        tasks: the names of the tasks that suit the method; empty if every task does, as for methods
            that average weights or keep a part of them.
        why_tasks: why only these tasks suit it, as a predicate such as "sends the mean embedding of
            each class"; empty if every task does.
        sums_suffice: whether the server needs only the sum of the sites' arrays, weighted by
            samples, so secure aggregation can hide each site's arrays.
        proves_sums: whether each question follows from the totals of the rounds before. At trust
            'sums' the server then proves these totals to the sites, and a site computes the
            question itself and answers no other.
    """

    title: ClassVar[str] = ""
    server: ClassVar[str] = ""
    site: ClassVar[str] = ""
    why_not_private: ClassVar[str | None] = None
    tasks: ClassVar[tuple[str, ...]] = ()
    why_tasks: ClassVar[str] = ""
    sums_suffice: ClassVar[bool] = False
    proves_sums: ClassVar[bool] = False

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that the settings do not contradict each other or the common settings.

        This base class checks nothing.

        Args:
            common: the run's common settings.
            is_table: whether the data set is a table.

        Raises:
            SettingError: two settings contradict each other.
        """

    def why_unfit(self, facts: SiteFacts) -> str | None:
        """Return the reason why the method cannot use a site, on one line; None if it can.

        This base class always returns None. A site that the method cannot use is left out before
        training begins. The setting 'run.min-sites' then decides whether the run continues.

        Args:
            facts: the site's statements about itself before training, such as its sizes and
                classes.
        """
        return None


@dataclass(frozen=True)
class NoSettings(OwnSettings):
    """The settings of a plugin that does not have any of its own."""
