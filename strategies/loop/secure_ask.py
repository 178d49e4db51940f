"""Asking for weights of which the server learns a sum alone: secure aggregation, as another ask.

Around the phase in which sites train there are three others (``models.contract.messages``): keys
are collected and passed on, then shares that only their receivers can open, and at the end the
shares that take the masks off the sum. All of it is in memory alone: a round that a dead server
began is begun again with new keys. Bonawitz et al. 2017, all sites as neighbours of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.messages import SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.secure_sum import (
    KEY,
    Quantisation,
    Words,
    masked,
    needed_sites,
    quantisation,
    why_too_coarse,
)
from fedsilo.strategies.loop.ask import Ask, Question, Replies
from fedsilo.strategies.loop.asking import GridAsk
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs
from fedsilo.strategies.wire.secure_keys import (
    LONGEST_KEY,
    LONGEST_SEALED,
    LONGEST_SHARE,
    SECURE,
    joined,
    mask_key,
    refuse_no_key,
    texts,
    tokens,
    whole,
)

_KEYS = ("mask-key", "seal-key")
_VARIANCE = "running_var"
_MARGIN = 1.001


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
        """Ask as ``GridAsk`` does; for what is trained, learn the mean by samples alone.

        Raises:
            SettingError: so many sites do not fit 'secure-threshold' or 'secure-bits'.
            SiteError: too few sites answered, or their shares do not fit together.
        """
        send = question.send
        if question.phase != TRAIN or not send:
            return self.ask.put(question)
        before = next(iter(send.values()))
        specs = next(iter(question.expect.values()))  # fewer, where some of it is no model
        sum_ = SecureSum(self.ask.round, self.common, specs, len(send))
        sum_.take_keys(self._put(sum_, SECURE_KEYS, send))
        sum_.take_shares(self._put(sum_, SECURE_SHARES, sum_.keys))
        masked = replace(
            question,
            send={site: send[site] for site in sum_.sealed},
            expect=dict.fromkeys(sum_.sealed, sum_.masked_specs()),
            reference={},
            fault=None,
            records={site: sum_.record(TRAIN, site) for site in sum_.sealed},
        )
        sum_.take_masked(self.ask.put(masked))
        unmasking = self._put(sum_, SECURE_UNMASK, sum_.replies)
        return Replies(sum_.replies, sums=sum_.mean(unmasking, before))

    def _put(self, sum_: SecureSum, phase: str, sites: Iterable[str]) -> Replies:
        nothing: dict[str, Arrays] = {site: {} for site in sites}
        records = {site: sum_.record(phase, site) for site in nothing}
        return self.ask.put(
            Question(
                phase,
                nothing,
                {},
                fault=lambda reply: sum_.fault(phase, reply),
                records=records,
            )
        )


class SecureSum:
    """What the server knows of one sum.

    Attributes:
        round: the round.
        common: the run's settings.
        specs: of the arrays that are summed.
        asked: sites that the round asks.
        threshold: sites that must stay to the end; 0 before all keys have come.
        keys: by site, its public keys.
        sealed: by sender, then by receiver, the sealed shares.
        replies: those of the phase that trained, without arrays, by site.
    """

    def __init__(self, round_: int, common: CommonSettings, specs: Specs, asked: int) -> None:
        self.round = round_
        self.asked = asked
        self.common = common
        self.specs = specs
        self.numbers = sum(math.prod(n or 1 for n in spec.shape) for spec in specs.values())
        self.threshold = 0
        self.keys: dict[str, tuple[bytes, bytes]] = {}
        self.sealed: dict[str, dict[str, bytes]] = {}
        self.replies: dict[str, Reply] = {}
        self._sums: dict[str, Words] = {}
        self._examples: dict[str, int] = {}

    def masked_specs(self) -> dict[str, ArraySpec]:
        """Return the arrays of a reply: whole numbers in place of floats."""
        return {name: ArraySpec(spec.shape, "uint32") for name, spec in self.specs.items()}

    def record(self, phase: str, site: str) -> ConfigRecord:
        """Return what ``site`` is told in a phase."""
        values: dict[str, Any] = {"round": self.round}
        if phase == SECURE_SHARES:
            values |= {
                "sites": list(self.keys),
                "mask-keys": [mask for mask, _ in self.keys.values()],
                "seal-keys": [seal for _, seal in self.keys.values()],
                "threshold": self.threshold,
            }
        elif phase == TRAIN:
            values |= {"sites": list(self.sealed), "weight": self._examples[site] / self._most}
        elif phase == SECURE_UNMASK:
            senders = [sender for sender in self.sealed if sender != site]
            values |= {
                "answered": list(self.replies),
                "from": senders,
                "sealed": [self.sealed[sender][site] for sender in senders],
            }
        return ConfigRecord(values)

    def fault(self, phase: str, reply: Reply) -> str | None:
        """Say why what came for secure aggregation cannot be used, if it cannot."""
        record = reply.secure
        try:
            if whole(record, "round") != self.round:
                return f"record '{SECURE}' is of round {record['round']!r}, not {self.round}"
            if phase == SECURE_KEYS:
                keys = [record.get(key) for key in _KEYS]
                for public in tokens({"keys": keys}, "keys", LONGEST_KEY):
                    refuse_no_key(public)
            elif phase == SECURE_SHARES:
                self._check_names(texts(record, "to"), set(self.keys) - {reply.site})
                self._check_number(tokens(record, "sealed", LONGEST_SEALED), len(self.keys) - 1)
            else:
                self._check_names(texts(record, "of"), set(self.sealed))
                self._check_number(tokens(record, "shares", LONGEST_SHARE), len(self.sealed))
        except SiteError as error:
            return str(error)
        return None

    def take_keys(self, replies: Mapping[str, Reply]) -> None:
        """Take the sites' public keys.

        Raises:
            SettingError: so many sites do not fit 'secure-threshold' or 'secure-bits'.
            SiteError: too few sites are left.
        """
        try:
            self.threshold = needed_sites(self.common, len(replies))
        except SettingError as error:
            raise SiteError(
                f"round {self.round}: {len(replies)} of {self.asked} sites have sent keys for "
                f"secure aggregation, and {error.args[0].partition(':')[0]}: repair the sites and "
                "resume"
            ) from None
        way = quantisation(self.common, len(replies))
        if reason := why_too_coarse(self.common, self.numbers, way):
            raise SettingError(reason)
        for site, reply in sorted(replies.items()):
            record = reply.secure
            mask, seal = (bytes(record[key]) for key in _KEYS)
            self.keys[site] = mask, seal
            self._examples[site] = reply.examples

    def take_shares(self, replies: Mapping[str, Reply]) -> None:
        """Take the sealed shares, each for one other site."""
        self._refuse_few(replies, "shared their keys")
        for site, reply in sorted(replies.items()):
            record = reply.secure
            listed = zip(texts(record, "to"), tokens(record, "sealed", LONGEST_SEALED), strict=True)
            self.sealed[site] = dict(listed)

    def take_masked(self, replies: Mapping[str, Reply]) -> None:
        """Add up masked arrays; an array of one site is in memory at a time."""
        self._refuse_few(replies, "sent masked weights")
        for name in sorted(self.specs):
            total: Any = None
            for _, reply in sorted(replies.items()):
                array = reply.arrays[name]
                total = array if total is None else total + array  # modulo 2^32
            self._sums[name] = total
        self.replies = {s: replace(reply, arrays={}) for s, reply in sorted(replies.items())}

    def mean(self, replies: Mapping[str, Reply], before: Arrays) -> dict[str, NDArray]:
        """Return the mean by samples of what was trained, float32, once the masks are off.

        Args:
            replies: of phase ``secure-unmask``.
            before: what the sites began with, by the names of their arrays.

        Raises:
            SiteError: too few have answered, or their shares do not fit together.
        """
        self._refuse_few(replies, "helped to take the masks off")
        sums = masked(self._sums, *self._masks_left(replies))
        way = quantisation(self.common, len(self.keys))
        share = self._most / sum(self._examples[site] for site in self.replies)
        updates = {
            name: way.total(words, len(self.replies)) * share for name, words in sums.items()
        }
        self._refuse_unlikely(updates, way, share)
        mean = {}
        for name, update in updates.items():
            became = before[name].astype(np.float64) + update
            # Rounding may leave a variance of zero just below it
            at_least = 0.0 if name.endswith(_VARIANCE) else -np.inf
            mean[name] = np.asarray(np.maximum(became, at_least), np.float32)
        return mean

    def _masks_left(self, replies: Mapping[str, Reply]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of masks to add to the sum, and of those to take off."""
        plus: list[bytes] = []
        shares = [_shares(reply) for reply in replies.values()]
        minus = [self._secret(site, shares) for site in self.replies]
        for gone in sorted(self.sealed.keys() - self.replies.keys()):
            private = self._secret(gone, shares)
            for site in self.replies:
                with self._naming(gone):
                    key = mask_key(private, self.keys[site][0])
                # What the site has added because of the one that is gone comes off, and back
                (minus if site < gone else plus).append(key)
        if any(len(key) != KEY for key in minus):
            raise SiteError(f"round {self.round}: a site's mask has no key: resume the run")
        return plus, minus

    def _refuse_unlikely(
        self, updates: Mapping[str, NDArray], way: Quantisation, share: float
    ) -> None:
        """Refuse a mean that no clipped updates have: masks that do not fit leave random numbers.

        Raises:
            SiteError: it is longer than 'clip-norm' allows.
        """
        rounding = len(self.replies) * way.step * math.sqrt(self.numbers)
        longest = self.common.clip_norm + share * rounding
        length = math.sqrt(sum(float(np.square(update).sum()) for update in updates.values()))
        if length > _MARGIN * longest:
            raise SiteError(
                f"round {self.round}: the masks did not go out of the sum, whose mean is "
                f"{length:.3g} long and can be {longest:.3g}: a site's keys or weights are at "
                "fault; resume the run, which begins the round anew, or leave a site out"
            )

    @property
    def _most(self) -> int:
        return max(self._examples.values())

    def _secret(self, site: str, shares: Sequence[Mapping[str, bytes]]) -> bytes:
        """Return the secret of ``site``, of which each site has given a share."""
        with self._naming(site):
            return joined([given[site] for given in shares[: self.threshold]])

    @contextmanager
    def _naming(self, site: str) -> Iterator[None]:
        try:
            yield
        except SiteError as error:
            raise SiteError(
                f"round {self.round}: the masks of site {site} cannot be taken off ({error}): "
                "resume the run, which begins the round anew"
            ) from None

    def _refuse_few(self, sites: Iterable[str], what: str) -> None:
        if (number := len(list(sites))) < self.threshold:
            raise SiteError(
                f"round {self.round}: {number} sites {what}, and {self.threshold} of "
                f"{len(self.keys)} are needed ('secure-threshold'): repair the sites and resume"
            )

    @staticmethod
    def _check_names(names: Sequence[str], wanted: set[str]) -> None:
        if set(names) != wanted or len(names) != len(wanted):
            raise SiteError(f"record '{SECURE}' is of other sites than those that take part")

    @staticmethod
    def _check_number(listed: Sequence[bytes], wanted: int) -> None:
        if len(listed) != wanted:
            raise SiteError(f"record '{SECURE}' has {len(listed)} entries, not {wanted}")


def _shares(reply: Reply) -> dict[str, bytes]:
    """Return the shares that a site has given, by the site whose secret they are of."""
    record = reply.secure
    return dict(zip(texts(record, "of"), tokens(record, "shares", LONGEST_SHARE), strict=True))
