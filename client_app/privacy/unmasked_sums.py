"""The sums that a site has helped to unmask: the same sum is unmasked again only in the same way.

``UnmaskedSums`` is the record of one run. The difference of two sums of one round would be the
difference of one site's updates. So for each of the newest rounds the record holds the sites of the
sum, and digests of the request and of the numbers that this site masked.

``SummedBefore`` is the hospital's record of all runs, in a file outside the folders of runs. Two
sums over the same received arrays differ only if the sites or the settings differ. If the sites
differ, the difference of the sums is the update of the missing sites. If a setting differs that
scales updates ('secure.clip-norm', 'train.learning-rate'), each site's part changes differently,
and a few such sums reveal every part. So the record holds a digest of the arrays of each sum.

This stops repeated requests. It does not stop an operator who changes the arrays slightly and asks
again (docs/threat-model.md, on what 'sums' does not promise).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError, SiteError

SUMS = "secure-sums.json"  # the record of one run
ALL_SUMS = "summed-arrays.json"  # the record of all runs
_KEPT_ROUNDS = 3  # a server may go back by two
_KEPT_SUMS = 10_000  # a month of runs under the default quotas, in two megabytes


@dataclass(frozen=True)
class RoundSum:
    """The sum of one round, once it is unmasked.

    Attributes:
        sites: the sites of the sum, sorted; empty if no sum of the round is unmasked.
        weighed: a digest of the numbers that this site masked.
        question: a digest of the server's request; empty at a site that does not declare its data,
            or if an older version has not stored it.
        seals: the seals of all sites' parts, in the order of ``sites``, if the method proves its
            sums (``strategies.wire.sum_proofs``).
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    sites: list[str]
    weighed: str
    question: str = ""
    seals: list[str] = field(default_factory=list)


# Older versions stored only the sites and the digest of the masked numbers
_Kept = dict[int, RoundSum | tuple[list[str], str]]


@dataclass(frozen=True)
class UnmaskedSums:
    """The record of one site's unmasked sums in one run, checked for one round."""

    folder: Path  # the folder of the site's private state in the run
    round: int

    def refuse_missing_sites(self, partners: Sequence[str]) -> None:
        """Check that no site of this round's earlier sum is missing when the server repeats it.

        In secure aggregation, sites hide their numbers with masks, and the server unmasks only the
        sum. A second sum over fewer sites would reveal the missing sites' numbers by subtraction.
        Further sites may take part, because some may still drop out. Without an earlier sum the
        check passes.

        Args:
            partners: the sites that take part in the new sum.

        Raises:
            RefusedError: a site is missing. The error names the sites of the earlier sum.
            CheckpointError: the record of the sums is damaged.
        """
        # More sites may mask than before, because some may drop out; fewer cannot give the same sum
        before = self._of_round()
        if not set(before.sites) <= set(partners):
            raise self._other(before.sites)

    def refuse_other_question(self, question: str) -> None:
        """Check that a repeated request is unchanged if this round's sum is already unmasked.

        The check comes before the data are opened. Otherwise a server could choose a second request
        that is refused only if one particular patient's data are there. The refusal would reveal
        the patient.

        If the sum of a later round is unmasked but not this round's, every request is refused.

        Args:
            question: the digest of the request. It is empty at a site that opens its data without
                declaring their counts first. Then nothing is checked.

        Raises:
            RefusedError: the site answered another request of this round, or only a later round's
                sum is unmasked. Neither depends on a patient.
            CheckpointError: the record of the sums is damaged.
        """
        if not question:
            return
        before = self._of_round()
        # Empty: no sum is unmasked yet, or an older version unmasked it and stored no question
        asked_another = before.question not in ("", question)
        # A later sum was made from the state that this round left here, so this round is over
        has_later_sum = any(round_ > self.round for round_ in self._file().read({}))
        if asked_another or (has_later_sum and not before.sites):
            raise RefusedError(
                "this round's sum, or a later one's, was unmasked before for other weights, "
                "metrics or notes: a second answer would reveal whether this site's own part "
                "changed; ask for the same again, or begin a run with another 'run.name' and 'seed'"
            )

    def refuse_other(self, weighed: str, answered: Sequence[str] = ()) -> None:
        """Check that this site does not contribute to a second, different sum of the same round.

        The server may repeat a round. An unmasked sum may be unmasked again only over the same
        sites and with the same numbers from this site. Otherwise the difference between the two
        sums would reveal one site's numbers. If no sum of this round was unmasked before, the check
        passes.

        Args:
            weighed: the digest of this site's weighted numbers, before they are hidden by masks.
            answered: the sites of the sum, sorted; empty while they are not known. An empty list is
                not compared.

        Raises:
            RefusedError: the sites, or this site's numbers, differ from those of the earlier sum.
            CheckpointError: the record of the run's sums is damaged.
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

    def seals(self) -> dict[str, str]:
        """Return site -> seal of its part in this round's unmasked sum; empty without seals."""
        opened = self._of_round()
        return dict(zip(opened.sites, opened.seals, strict=False))

    def note(self, opened: RoundSum) -> None:
        """Record that this round's sum may now be unmasked; replace the round's earlier record.

        Only the 3 highest rounds are kept. A server that resumes a run may go back by two rounds.

        Args:
            opened: the sum's sites, and digests of the request and of the numbers that this site
                masked.

        Raises:
            CheckpointError: the record of the sums is damaged, or cannot be written.
        """
        known = {**self._file().read({}), self.round: opened}
        newest = sorted(known)[-_KEPT_ROUNDS:]
        self._file().write({round_: known[round_] for round_ in newest})

    def _of_round(self) -> RoundSum:
        kept = self._file().read({}).get(self.round, RoundSum([], ""))
        if isinstance(kept, RoundSum):
            return kept
        return RoundSum(*kept)

    def _file(self) -> OwnFile[_Kept]:
        lost = (
            "bring it back, or choose another 'run.name'; nothing else records which sums were "
            "opened"
        )
        return OwnFile(self.folder / SUMS, _Kept, SUMS, lost)

    @staticmethod
    def _other(sites: Sequence[str]) -> RefusedError:
        return RefusedError(
            f"the sum of {', '.join(sites)} was already unmasked in this round: a sum over other "
            "sites would reveal single sites' weights; let the same sites answer, or continue "
            "without this one"
        )


@dataclass(frozen=True)
class UnmaskedSum:
    """A sum to which this hospital has added its masked part, or a masked 0.

    Attributes:
        sites: the sites of the sum, sorted; empty until the sum is unmasked.
        terms: a digest of the settings that scale a site's part of the sum; empty until the sum is
            unmasked, unless this site failed.
        failed: whether this site could not answer and added 0.
        answered: whether this site has masked its own part. Files of older versions lack it.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    sites: list[str]
    terms: str
    failed: bool
    answered: bool = False


def failed_before() -> SiteError:
    """Build the error of a site that must not answer, because it failed on the same arrays before.

    The site added 0 to a secret sum for these received arrays. If it answered now, the difference
    between the new sum and the old sum would reveal its answer.
    """
    return SiteError(
        "this site could not answer for the same weights before, and adds nothing to "
        "them now: the difference of both sums would be its own part; after the repair "
        "begin a run with another 'seed'"
    )


@dataclass(frozen=True)
class SummedBefore:
    """The record of one hospital's secret sums over all runs, by the digest of the received arrays.

    Attributes:
        folder: the folder that the hospital keeps over all runs.
        terms: the digest of the settings of the sum that is requested now.
        about: a digest of the settings that are part of the question, because the method asks the
            same arrays about other columns; empty if the arrays alone are the question.
    """

    folder: Path
    terms: str
    about: str = ""

    def refuse_changed_sum(self, arrays: str, partners: Sequence[str]) -> None:
        """Check that a second sum over the same received arrays reveals no single site's part.

        The run's settings must be those of the earlier sum. All sites of that sum must take part
        again, and further sites may join. Otherwise the difference between the two sums would
        reveal single sites' parts. Arrays that were never summed pass.

        Args:
            arrays: the digest of all received arrays.
            partners: the sites that take part in the new sum.

        Raises:
            RefusedError: the settings differ, or a site of the earlier sum is missing. Neither
                depends on a patient.
            CheckpointError: the record of the sums is damaged.
        """
        before = self._sums().get(self._key(arrays))
        if before is None:
            return
        if before.terms not in ("", self.terms):
            raise RefusedError(
                "the same weights were summed here before under other settings: both sums "
                "together would reveal single sites' parts; choose another 'seed', or the same "
                "settings"
            )
        # Sites may be added, because some may drop out before the sum is agreed
        if not set(before.sites) <= set(partners):
            raise self._other_sites(before)

    def refuse_other_sites(self, arrays: str, answered: Sequence[str]) -> None:
        """Check that an earlier sum over the same received arrays was over exactly the same sites.

        If there was no earlier sum, the check passes.

        Args:
            arrays: the digest of all received arrays.
            answered: the sites of the sum that is requested now, in sorted order.

        Raises:
            RefusedError: a site of the earlier sum is missing, or a site was added.
            CheckpointError: the record of the sums is damaged.
        """
        before = self._sums().get(self._key(arrays))
        if before is not None and before.sites not in ([], list(answered)):
            raise self._other_sites(before)

    def has_failed(self, arrays: str) -> bool:
        """Tell whether this site failed on these received arrays before and added 0 to the sum.

        A site that failed must add 0 again. Otherwise the difference between the two sums would
        reveal its numbers. ``arrays`` is the digest of the received arrays.

        Raises:
            CheckpointError: the record of the sums is damaged.
        """
        before = self._sums().get(self._key(arrays))
        return before is not None and before.failed

    def note_part(self, arrays: str, failed: bool) -> None:
        """Record, before this site sends its part of a sum, whether the part is an answer or 0.

        A site sends 0 if it cannot answer. A server could subtract a sum with that 0 from a sum
        with the answer, and so learn the answer. So a site never sends both for the same received
        arrays, not even in two runs at the same time. The record cannot wait, because a server can
        finish a sum without this site.

        Args:
            arrays: the digest of all received arrays.
            failed: whether this site cannot answer and sends 0.

        Raises:
            SiteError: the site has sent 0 for these arrays before, but now wants to answer.
            RefusedError: the site has answered for these arrays before, but cannot answer now. The
                server sees this refusal, which reveals less than the answer.
            CheckpointError: the file is damaged, or cannot be written.
        """
        with self._file().lock():
            before = self._sums().get(self._key(arrays), UnmaskedSum([], "", False))
            if before.failed:
                if not failed:
                    raise failed_before()
                return
            # Older versions did not record answers, but the sites of each sum that was unmasked
            if failed and (before.answered or before.sites):
                raise RefusedError(
                    "this site has answered for the same weights before, and cannot answer now: "
                    "adding nothing would reveal its earlier part by subtraction; look into its "
                    "log, and after the repair begin a run with another 'seed'"
                )
            if failed:
                self._write(arrays, UnmaskedSum([], self.terms, failed=True))
            elif not before.answered:
                self._write(arrays, replace(before, answered=True))

    def note(self, arrays: str, answered: Sequence[str], failed: bool) -> None:
        """Record that this site took part in a sum, so that a repetition can be checked.

        The record has the sites, a digest of the run's settings, and whether this site failed. An
        earlier record for the same received arrays is replaced. Only the newest 10,000 records are
        kept.

        Args:
            arrays: the digest of all received arrays.
            answered: the sites whose parts are in the sum.
            failed: whether this site could not answer and added 0.

        Raises:
            CheckpointError: the file is damaged, or cannot be written.
        """
        with self._file().lock():
            self._write(arrays, UnmaskedSum(list(answered), self.terms, failed, not failed))

    def _write(self, arrays: str, entry: UnmaskedSum) -> None:
        """Store a record for the arrays with the digest ``arrays``, in place of an earlier record.

        The record becomes the newest, and only the newest 10,000 are kept. The caller has locked
        the file.
        """
        sums = dict(self._sums())
        key = self._key(arrays)
        sums.pop(key, None)  # reinserted, so that the newest is last
        sums[key] = entry
        newest = list(sums)[-_KEPT_SUMS:]
        self._file().write({digest: sums[digest] for digest in newest})

    def _key(self, arrays: str) -> str:
        return f"{arrays}{self.about}"

    def _sums(self) -> Mapping[str, UnmaskedSum]:
        return self._file().read({})

    def _file(self) -> OwnFile[dict[str, UnmaskedSum]]:
        return OwnFile(
            self.folder / ALL_SUMS,
            dict[str, UnmaskedSum],
            f"the hospital's own {ALL_SUMS}",
            "bring it back; nothing else records which sites summed which arrays",
        )

    @staticmethod
    def _other_sites(before: UnmaskedSum) -> RefusedError:
        return RefusedError(
            f"the same weights were summed here before by {', '.join(before.sites)}: their "
            "sum over other sites would reveal single sites' parts; let the same sites answer, or "
            "choose another 'seed'"
        )
