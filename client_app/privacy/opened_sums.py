"""Which sums a site has helped to open: of a round begun again it opens the same sum or none.

The difference of two sums would be that of a site's own updates. So the record holds of each of the
newest rounds whose sum it was, and a digest of what this site weighted and masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import RefusedError

SUMS = "secure-sums.json"
_KEPT = 3  # rounds: a server may go back by two

Sums = dict[int, tuple[list[str], str]]  # by round: whose sum it was, and the digest


@dataclass(frozen=True)
class OpenedSums:
    """The record of one site in one run, and what it says of one round."""

    folder: Path  # of the site's private state in the run
    round: int  # the round

    def refuse_without(self, partners: Sequence[str]) -> None:
        """Refuse to mask with ``partners`` where one is missing of the sum that is open already.

        Raises:
            RefusedError: names the sites of the open sum.
        """
        sites, _ = self._of_round()
        if not set(sites) <= set(partners):
            raise self._other(sites)

    def refuse_other(self, weighed: str, answered: Sequence[str] = ()) -> None:
        """Refuse another sum than the one that is open already, if one is.

        Args:
            weighed: digest of what this site weighs and masks.
            answered: the sites of the sum, or none where only ``weighed`` is known yet.

        Raises:
            RefusedError: says what differs.
        """
        sites, before = self._of_round()
        if sites and answered and list(answered) != sites:
            raise self._other(sites)
        if sites and before != weighed:
            raise RefusedError(
                "this round's sum was opened before with a different part of this site: both "
                "sums together would reveal that part; set 'deterministic' to 'true', and begin a "
                "run with another 'run-name' and 'seed'"
            )

    def note(self, answered: Sequence[str], weighed: str) -> None:
        """Write down that the sum of ``answered`` is opened."""
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
            f"the sum of {', '.join(sites)} was opened in this round before: that of others "
            "next to it would reveal single sites' weights; let the same sites answer, or continue "
            "without this one"
        )
