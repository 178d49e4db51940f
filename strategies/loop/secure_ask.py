"""Asking for weights of which the server learns a sum alone: secure aggregation, as another ask.

Around the phase in which sites train there are four others (``models.contract.messages``): signed
keys are collected and passed on, then shares that only their receivers can open; afterwards
signatures under the list of whose weights came, and the shares that take the masks off the sum. All
of it is in memory alone: a round that a dead server began is begun again with new keys. Bonawitz et
al. 2017, figure 4, all sites as neighbours of each other.
"""

from collections.abc import Iterable
from dataclasses import replace

from flwr.app import ArrayRecord

from fedsilo.models.contract.messages import (
    ARRAYS,
    EVALUATE,
    FIGURES,
    SECURE_AGREE,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    TRAIN,
)
from fedsilo.models.contract.settings import SUMS, CommonSettings
from fedsilo.models.privacy.summed_metrics import summed_metrics
from fedsilo.strategies.loop.ask import Ask, Question, Replies
from fedsilo.strategies.loop.asking import GridAsk
from fedsilo.strategies.loop.secure_replies import secure_fault
from fedsilo.strategies.loop.secure_round import SecureSum
from fedsilo.strategies.wire.records import NDArray, unpack
from fedsilo.strategies.wire.reply import Arrays


class SecureAsk(Ask):
    """An ``Ask`` whose replies to ``train`` have no arrays, only their sum.

    Args:
        ask: puts the questions of each phase.
        common: the run's settings.
    """

    def __init__(self, ask: GridAsk, common: CommonSettings) -> None:
        self.ask = ask
        self.common = common
        self.sites = ask.sites
        self.stateful_sites = ask.stateful_sites

    def put(self, question: Question) -> Replies:
        """Ask as ``GridAsk`` does; of what is trained learn the mean by samples alone.

        Where sites trust the server with sums alone the same goes for what is measured.

        Raises:
            SettingError: so many sites do not fit 'secure-threshold' or 'secure-bits'.
            SiteError: too few sites answered, or their shares do not fit together.
        """
        send, phase, ask = question.send, question.phase, self.ask
        only_sums = self.common.trust == SUMS
        if not send or not (phase == TRAIN or (phase == EVALUATE and only_sums)):
            return ask.put(question)
        # Masks cancel only where all sites are sent the same
        everything = {name: array for arrays in send.values() for name, array in arrays.items()}
        specs = next(iter(question.expect.values()), {})  # fewer, where some of it is not a model
        classes = ask.session.participants.task().classes
        sum_ = SecureSum(ask.asked_round(phase), self.common, specs, len(send), classes)
        sum_.take_keys(self._put(sum_, SECURE_KEYS, send))
        if only_sums:
            summed = summed_metrics(phase == TRAIN, ask.evaluates(phase), sum_.splits)
            sum_.metrics = sorted([*summed, *question.metrics])
        sum_.bind(self._sent(everything))
        sum_.take_shares(self._put(sum_, SECURE_SHARES, sum_.keys))
        masked = replace(
            question,
            send=dict.fromkeys(sum_.sealed, everything),
            expect=dict.fromkeys(sum_.sealed, sum_.masked_specs()),
            reference={},
            metrics=() if only_sums else question.metrics,
            fault=None,
            records={site: sum_.record(phase, site) for site in sum_.sealed},
        )
        sum_.take_masked(ask.put(masked))
        sum_.take_signatures(self._put(sum_, SECURE_AGREE, sum_.replies))
        unmasking = self._put(sum_, SECURE_UNMASK, sum_.signatures)
        sums, means = sum_.mean(unmasking, everything)
        if means:
            ask.session.hooks.call("sums_measured", ask.round, phase, means)
        return Replies(sum_.replies, sums=sums, means=means)

    def _sent(self, arrays: Arrays) -> dict[str, NDArray]:
        """Return all arrays that a site is sent, by record and name."""
        figures = self.ask.session.figures or ArrayRecord()
        sent = {f"{ARRAYS}/{name}": array for name, array in arrays.items()}
        return sent | {f"{FIGURES}/{name}": unpack(array) for name, array in figures.items()}

    def _put(self, sum_: SecureSum, phase: str, sites: Iterable[str]) -> Replies:
        nothing: dict[str, Arrays] = {site: {} for site in sites}
        records = {site: sum_.record(phase, site) for site in nothing}
        return self.ask.put(
            Question(
                phase,
                nothing,
                {},
                fault=lambda reply: secure_fault(sum_, phase, reply),
                records=records,
            )
        )
