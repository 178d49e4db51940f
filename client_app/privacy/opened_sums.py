"""The sums that a site has helped to unmask: in a repeated round it unmasks the same sum or none.

The difference of two sums would be that of a site's own updates. So the record holds of each of the
newest rounds whose sum it was, and digests of what was asked and of what this site weighted and
masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError

SUMS = "secure-sums.json"
_KEPT = 3  # rounds; a server may go back by two


@dataclass(frozen=True)
class RoundSum:
    """The sum of one round, once it is open.

    Attributes:
        sites: the sites whose sum it was, sorted; empty where none is open.
        weighed: a digest of what this site weighted and masked.
        question: a digest of what the server had asked for and sent; empty where it decides
            nothing, as in a simulation, or was not noted by an older version.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    sites: list[str]
    weighed: str
    question: str = ""


# By round; older versions kept the sites and the digest of what was weighed
_Kept = dict[int, RoundSum | tuple[list[str], str]]


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
        before = self._of_round()
        if not set(before.sites) <= set(partners):
            raise self._other(before.sites)

    def refuse_other_question(self, question: str) -> None:
        """Refuse to answer anything but the same question where a sum of the round is open.

        It is asked before the data are opened. Of two different questions a server could choose
        the second so that its answer is the same unless one certain patient is there, and whether
        ``refuse_other`` refuses it would tell. Nor is a new question of a round answered once the
        sum of a later one is open: that one was made of the state that this round has left here.

        Args:
            question: a digest of what is asked, or empty where it decides nothing.

        Raises:
            RefusedError: another question was answered; that depends on no patient.
        """
        before = self._of_round()
        asked_another = before.question not in ("", question)
        later = [one for round_, one in self._file().read({}).items() if round_ > self.round]
        if question and (asked_another or (later and not before.sites)):
            raise RefusedError(
                "this round's sum, or a later one's, was opened before for other weights, metrics "
                "or notes: whether this site's part is the same would be an answer of this site "
                "alone; ask for the same again, or begin a run with another 'run.name' and 'seed'"
            )

    def refuse_other(self, weighed: str, answered: Sequence[str] = ()) -> None:
        """Refuse a sum that differs from the one already unmasked in this round.

        Args:
            weighed: the digest of the numbers that this site masks.
            answered: the sites of the sum; empty if only ``weighed`` is known yet.

        Raises:
            RefusedError: names the difference.
        """
        before = self._of_round()
        if before.sites and answered and list(answered) != before.sites:
            raise self._other(before.sites)
        if before.sites and before.weighed != weighed:
            raise RefusedError(
                "this round's sum was already unmasked with a different part from this site: both "
                "sums together would reveal that part; set 'machine.deterministic' to 'true', and "
                "begin a run with another 'run.name' and 'seed'"
            )

    def note(self, answered: Sequence[str], weighed: str, question: str = "") -> None:
        """Write down that the sum of ``answered`` is opened."""
        opened = RoundSum(list(answered), weighed, question)
        known = {**self._file().read({}), self.round: opened}
        self._file().write({round_: known[round_] for round_ in sorted(known)[-_KEPT:]})

    def _of_round(self) -> RoundSum:
        kept = self._file().read({}).get(self.round, RoundSum([], ""))
        return kept if isinstance(kept, RoundSum) else RoundSum(*kept)

    def _file(self) -> OwnFile[_Kept]:
        lost = (
            "bring it back, or choose another 'run.name'; whose sums were opened is known by "
            "nothing else"
        )
        return OwnFile(self.folder / SUMS, _Kept, SUMS, lost)

    @staticmethod
    def _other(sites: Sequence[str]) -> RefusedError:
        return RefusedError(
            f"the sum of {', '.join(sites)} was already unmasked in this round: a sum of others "
            "next to it would reveal single sites' weights; let the same sites answer, or continue "
            "without this one"
        )
