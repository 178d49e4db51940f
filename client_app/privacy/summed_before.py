"""The arrays that a hospital has helped to sum in any run; it sums them again only in the same way.

Two sums over the same received arrays differ only by a change of sites or of settings. If the sites
changed, the difference of the sums is the update of the missing sites. If a setting changed that
scales updates ('secure.clip-norm', 'train.learning-rate'), each site's part changes differently,
and a few such sums reveal every part. So the hospital stores a digest of the arrays of each sum, in
a file outside the folders of runs, and sums the same arrays again only with the same sites and
settings.

This stops repeated requests. It does not stop an operator who changes the arrays slightly and asks
again (docs/threat-model.md, what 'sums' does not promise).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError

FILE = "summed-arrays.json"
_KEPT = 10_000  # sums; with the default quotas a month of runs, in two megabytes


@dataclass(frozen=True)
class OpenSum:
    """One sum that this hospital has helped to unmask, or for which it has masked 0.

    Attributes:
        sites: the sites of the sum, sorted; empty until the sum is unmasked.
        terms: a digest of the settings that affect the numbers of a site.
        failed: whether this site could not answer and added 0.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    sites: list[str]
    terms: str
    failed: bool


@dataclass(frozen=True)
class SummedBefore:
    """The sums of one hospital over all runs, by the digest of the received arrays.

    Attributes:
        folder: the folder that the hospital keeps over all runs.
        terms: the digest of the settings of the sum that is asked for now.
    """

    folder: Path
    terms: str

    def refuse_another(self, arrays: str, partners: Sequence[str]) -> None:
        """Refuse to mask if the same arrays were summed with other sites or other settings before.

        Args:
            arrays: the digest of all received arrays.
            partners: the sites to mask with; some of them may still drop out.

        Raises:
            RefusedError: names the difference, which depends on no patient.
        """
        before = self._sums().get(arrays)
        if before is None:
            return
        if before.terms != self.terms:
            raise RefusedError(
                "the same weights were summed here before under other settings: both sums "
                "together would reveal single sites' parts; choose another 'seed', or the same "
                "settings"
            )
        # Sites may be added, because some may drop out before the sum is agreed
        if not set(before.sites) <= set(partners):
            raise self._other_company(before)

    def refuse_other_company(self, arrays: str, answered: Sequence[str]) -> None:
        """Refuse to agree to a sum of the same arrays as before over different sites."""
        before = self._sums().get(arrays)
        if before is not None and before.sites not in ([], list(answered)):
            raise self._other_company(before)

    def has_failed(self, arrays: str) -> bool:
        """Tell whether this site added 0 to a sum of these arrays.

        Then it must do so again, because the difference of both sums would be its own part.
        """
        before = self._sums().get(arrays)
        return before is not None and before.failed

    def note_failure(self, arrays: str) -> None:
        """Record that this site masks 0, before the zeros leave.

        A server can unmask a sum with the shares of other sites and never ask this one, so the
        record cannot wait for the end of the round.
        """
        if not self.has_failed(arrays):
            self.note(arrays, [], failed=True)

    def note(self, arrays: str, answered: Sequence[str], failed: bool) -> None:
        """Record that a sum is unmasked; drop the oldest entry if there are too many."""
        with self._file().lock():
            sums = dict(self._sums())
            sums.pop(arrays, None)  # reinserted, so that the newest is last
            sums[arrays] = OpenSum(list(answered), self.terms, failed)
            newest = list(sums)[-_KEPT:]
            self._file().write({digest: sums[digest] for digest in newest})

    def _sums(self) -> Mapping[str, OpenSum]:
        return self._file().read({})

    def _file(self) -> OwnFile[dict[str, OpenSum]]:
        return OwnFile(
            self.folder / FILE,
            dict[str, OpenSum],
            f"the hospital's own {FILE}",
            "bring it back; which arrays were summed in which company is known by nothing else",
        )

    @staticmethod
    def _other_company(before: OpenSum) -> RefusedError:
        return RefusedError(
            f"the same weights were summed here before by {', '.join(before.sites)}: their "
            "sum over other sites would reveal single sites' parts; let the same sites answer, or "
            "choose another 'seed'"
        )
