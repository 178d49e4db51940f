"""The sums that a site has helped to unmask: in a repeated round it unmasks the same sum or none.

The difference of two sums of one round would be the difference of one site's updates. So for each
of the newest rounds the record holds the sites of the sum, and digests of the request and of the
numbers that this site masked.
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
    """The sum of one round, once it is unmasked.

    Attributes:
        sites: the sites of the sum, sorted; empty if no sum of the round is unmasked.
        weighed: a digest of the numbers that this site masked.
        question: a digest of the server's request; empty in a simulation, or if an older version
            has not stored it.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    sites: list[str]
    weighed: str
    question: str = ""


# Older versions stored only the sites and the digest of the masked numbers
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
        # More sites may mask than before, because some may drop out; fewer cannot give the same sum
        before = self._of_round()
        if not set(before.sites) <= set(partners):
            raise self._other(before.sites)

    def refuse_other_question(self, question: str) -> None:
        """Refuse any question but the same one once a sum of the round is unmasked.

        The check comes before the data are opened. A server could choose a second question whose
        answer equals the first one's unless one particular patient is there; whether
        ``refuse_other`` refuses it would then reveal that patient. A new question for this round is
        also refused once a later round's sum is unmasked, because that sum was made from the state
        that this round has left here.

        Args:
            question: a digest of the request; empty at a site that does not declare its data.

        Raises:
            RefusedError: another question was answered; this depends on no patient.
        """
        if not question:
            return
        before = self._of_round()
        asked_another = before.question not in ("", question)
        has_later_sum = any(round_ > self.round for round_ in self._file().read({}))
        if asked_another or (has_later_sum and not before.sites):
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
        """Record that the sum over the sites ``answered`` is unmasked."""
        opened = RoundSum(list(answered), weighed, question)
        known = {**self._file().read({}), self.round: opened}
        newest = sorted(known)[-_KEPT:]
        self._file().write({round_: known[round_] for round_ in newest})

    def _of_round(self) -> RoundSum:
        kept = self._file().read({}).get(self.round, RoundSum([], ""))
        if isinstance(kept, RoundSum):
            return kept
        return RoundSum(*kept)

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
