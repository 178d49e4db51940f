"""Which arrays a hospital has helped to sum, over all runs: again only in the same sum, or not.

Two sums over the same received arrays differ by what differs between them. If that is the company
of sites, the difference is the update of the sites that are missing. If it is a setting that
scales updates ('clip-norm', 'learning-rate'), each site's part moves differently, and a few such
sums give every part. So the hospital keeps a digest of the arrays of each sum, in a file of its own
that no run's name reaches, and adds to a second sum of them only with the same sites under the same
settings.

This stops whoever asks twice. It does not stop an operator who changes the arrays by a hair and
asks again (docs/threat-model.md, what 'sums' does not promise).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import RefusedError

FILE = "summed-arrays.json"
_KEPT = 10_000  # sums; under the default quotas a month of runs, in two megabytes


@dataclass(frozen=True)
class OpenSum:
    """One sum that this hospital has helped to open, or has masked 0 for.

    Attributes:
        sites: the sites whose sum it was, sorted; empty until it is opened.
        terms: a digest of the settings that decide what a site adds.
        failed: whether this site could not answer and added 0.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    sites: list[str]
    terms: str
    failed: bool


@dataclass(frozen=True)
class SummedBefore:
    """The sums of one hospital over all runs, by the digest of the arrays received.

    Attributes:
        folder: where the hospital keeps what outlives a run.
        terms: those of the sum that is asked for now.
    """

    folder: Path
    terms: str

    def refuse_another(self, arrays: str, partners: Sequence[str]) -> None:
        """Refuse to mask if the same arrays were summed in a company or a scale that differs.

        Args:
            arrays: digest of all arrays received.
            partners: the sites that are masked with; some of them may still drop out.

        Raises:
            RefusedError: says what differs, which depends on no patient.
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
        if not set(before.sites) <= set(partners):
            raise self._other_company(before)

    def refuse_other_company(self, arrays: str, answered: Sequence[str]) -> None:
        """Refuse to agree to a sum of other sites than those that summed the same arrays before."""
        before = self._sums().get(arrays)
        if before is not None and before.sites not in ([], list(answered)):
            raise self._other_company(before)

    def has_failed(self, arrays: str) -> bool:
        """Tell whether this site added 0 to a sum of these arrays.

        It must do so again: the difference of both sums would be its own part.
        """
        before = self._sums().get(arrays)
        return before is not None and before.failed

    def note_failure(self, arrays: str) -> None:
        """Write down that this site masks 0, before that leaves.

        A server can open a sum by the shares of other sites and never ask this one, so it must not
        wait for the end of the round.
        """
        if not self.has_failed(arrays):
            self.note(arrays, [], failed=True)

    def note(self, arrays: str, answered: Sequence[str], failed: bool) -> None:
        """Write down that a sum is opened; the oldest entry goes if there are too many."""
        with self._file().locked():
            sums = dict(self._sums())
            sums.pop(arrays, None)  # the newest is last
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
