"""The sums that a site has helped to unmask: in a repeated round it unmasks the same sum or none.

The difference of two sums would be the difference of single sites' updates. So for each of the
newest rounds the record keeps the sites in the sum, and a digest of the numbers that this site
masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import RefusedError

SUMS = "secure-sums.json"
_KEPT = 3  # rounds; a server may go back by two

# Round -> the sites in the sum, and the digest of this site's numbers
Sums = dict[int, tuple[list[str], str]]


@dataclass(frozen=True)
class OpenedSums:
    """The record of one site in one run, used for one round."""

    folder: Path  # the folder of the site's private state in the run
    round: int

    def refuse_without(self, partners: Sequence[str]) -> None:
        """Refuse to mask with ``partners`` if a site of this round's unmasked sum is missing.

        Raises:
            RefusedError: names the sites of the unmasked sum.
        """
        sites, _ = self._of_round()
        if not set(sites) <= set(partners):
            raise self._other(sites)

    def refuse_other(self, weighed: str, answered: Sequence[str] = ()) -> None:
        """Refuse a sum that differs from the one already unmasked in this round.

        Args:
            weighed: the digest of the numbers that this site masks.
            answered: the sites of the sum; empty if only ``weighed`` is known yet.

        Raises:
            RefusedError: names the difference.
        """
        sites, before = self._of_round()
        if sites and answered and list(answered) != sites:
            raise self._other(sites)
        if sites and before != weighed:
            raise RefusedError(
                "this round's sum was already unmasked with a different part from this site: both "
                "sums together would reveal that part; set 'deterministic' to 'true', and begin a "
                "run with another 'run-name' and 'seed'"
            )

    def note(self, answered: Sequence[str], weighed: str) -> None:
        """Record that the sum of ``answered`` is unmasked."""
        known = {**self._file().read({}), self.round: (list(answered), weighed)}
        self._file().write({round_: known[round_] for round_ in sorted(known)[-_KEPT:]})

    def _of_round(self) -> tuple[list[str], str]:
        return self._file().read({}).get(self.round, ([], ""))

    def _file(self) -> OwnFile[Sums]:
        lost = (
            "bring it back, or choose another 'run-name'; whose sums were opened is known by "
            "nothing else"
        )
        return OwnFile(self.folder / SUMS, Sums, SUMS, lost)

    @staticmethod
    def _other(sites: Sequence[str]) -> RefusedError:
        return RefusedError(
            f"the sum of {', '.join(sites)} was already unmasked in this round: a sum of others "
            "next to it would reveal single sites' weights; let the same sites answer, or continue "
            "without this one"
        )
