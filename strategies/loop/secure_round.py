"""The server's side of secure aggregation: one phase of training, of which it learns a sum.

Around the phase in which sites train stand three others (``models.contract.messages``): keys are
collected and handed on, then shares that only their receivers can open, and at the end the shares
that take the masks off the sum. What a round leaves is in memory alone: one that a dead server
began is begun anew, with new keys. Bonawitz et al. 2017, all sites as neighbours of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    METRICS,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    SECURING,
    TRAIN,
)
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.secure_sum import (
    KEY,
    Quantisation,
    Words,
    masked,
    needed_sites,
    noise_of,
    quantisation,
    why_too_coarse,
)
from fedsilo.strategies.loop.averaging import SummedReplies
from fedsilo.strategies.loop.state import ArraySpec, SiteReply
from fedsilo.strategies.wire.records import NDArray
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
_DEVIATIONS = 6.0  # of the length of noise
_MARGIN = 1.001


def secured_phases(names: Sequence[str]) -> list[str]:
    """Return a round's phases with those of secure aggregation around each that trains."""
    around = {TRAIN: (SECURE_KEYS, SECURE_SHARES, TRAIN, SECURE_UNMASK)}
    return [phase for name in names for phase in around.get(name, (name,))]


class SecureRound:
    """What the server knows of one round.

    Attributes:
        round: the round.
        common: the run's settings.
        numbers: of the arrays of a reply.
        asked: sites that the round asks.
        threshold: sites that must stay to the end; 0 before all keys have come.
        replies: those of the phase that trained, without arrays, by site.
    """

    def __init__(self, round_: int, common: CommonSettings, numbers: int, asked: int) -> None:
        self.round = round_
        self.asked = asked
        self.common = common
        self.numbers = numbers
        self.threshold = 0
        self.replies: dict[str, SiteReply] = {}
        self._keys: dict[str, tuple[bytes, bytes]] = {}
        self._sealed: dict[str, dict[str, bytes]] = {}  # by sender, then by receiver
        self._sums: dict[str, Words] = {}
        self._examples: dict[str, int] = {}

    def asks(self, phase: str, site: str) -> bool:
        """Tell whether a site is asked: one that has answered the phases before."""
        before: Mapping[str, Mapping[str, Any]] = {
            SECURE_SHARES: self._keys,
            TRAIN: self._sealed,
            SECURE_UNMASK: self.replies,
        }
        return site in before.get(phase, {site: None})

    def record(self, phase: str, site: str) -> ConfigRecord:
        """Return what ``site`` is told in a phase."""
        values: dict[str, Any] = {"round": self.round}
        if phase == SECURE_SHARES:
            values |= {
                "sites": list(self._keys),
                "mask-keys": [mask for mask, _ in self._keys.values()],
                "seal-keys": [seal for _, seal in self._keys.values()],
                "threshold": self.threshold,
            }
        elif phase == TRAIN:
            values |= {"sites": list(self._sealed), "weight": self._examples[site] / self._most}
        elif phase == SECURE_UNMASK:
            senders = [sender for sender in self._sealed if sender != site]
            values |= {
                "answered": list(self.replies),
                "from": senders,
                "sealed": [self._sealed[sender][site] for sender in senders],
            }
        return ConfigRecord(values)

    def expected(self, phase: str, arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
        """Return the arrays of a reply: where sites train whole numbers in place of floats."""
        if phase in SECURING:
            return {}
        return {name: ArraySpec(spec.shape, "uint32") for name, spec in arrays.items()}

    def fault(self, phase: str, reply: SiteReply) -> str:
        """Say why the record of a reply cannot be used; empty: it can."""
        if phase not in SECURING:
            return ""
        record = reply.content.config_records.get(SECURE, ConfigRecord())
        try:
            if whole(record, "round") != self.round:
                return f"record '{SECURE}' is of round {record['round']!r}, not {self.round}"
            if phase == SECURE_KEYS:
                keys = [record.get(key) for key in _KEYS]
                for public in tokens({"keys": keys}, "keys", LONGEST_KEY):
                    refuse_no_key(public)
            elif phase == SECURE_SHARES:
                self._check_names(texts(record, "to"), set(self._keys) - {reply.site})
                self._check_number(tokens(record, "sealed", LONGEST_SEALED), len(self._keys) - 1)
            else:
                self._check_names(texts(record, "of"), set(self._sealed))
                self._check_number(tokens(record, "shares", LONGEST_SHARE), len(self._sealed))
        except SiteError as error:
            return str(error)
        return ""

    def take(self, phase: str, replies: Mapping[str, SiteReply]) -> None:
        """Take the usable replies of a phase, sorted by site.

        Raises:
            SettingError: so many sites do not fit 'secure-threshold' or 'secure-bits'.
            SiteError: too few are left.
        """
        if phase == SECURE_KEYS:
            self._take_keys(replies)
        elif phase == SECURE_SHARES:
            self._take_shares(replies)
        elif phase == TRAIN:
            self._take_masked(replies)

    def _take_keys(self, replies: Mapping[str, SiteReply]) -> None:
        try:
            self.threshold = needed_sites(self.common, len(replies))
        except SettingError as error:
            raise SiteError(
                f"round {self.round}: {len(replies)} of {self.asked} sites have sent keys for "
                f"secure aggregation, and {error.args[0].partition(':')[0]}: mend the sites and "
                "resume"
            ) from None
        way = quantisation(self.common, len(replies), self.threshold)
        if reason := why_too_coarse(self.common, self.numbers, way):
            raise SettingError(reason)
        for site, reply in sorted(replies.items()):
            record = reply.content.config_records[SECURE]
            mask, seal = (bytes(record[key]) for key in _KEYS)  # type: ignore[arg-type]
            self._keys[site] = mask, seal
            self._examples[site] = reply.examples()

    def _take_shares(self, replies: Mapping[str, SiteReply]) -> None:
        self._refuse_few(replies, "shared their keys")
        for site, reply in sorted(replies.items()):
            record = reply.content.config_records[SECURE]
            listed = zip(texts(record, "to"), tokens(record, "sealed", LONGEST_SEALED), strict=True)
            self._sealed[site] = dict(listed)

    def _take_masked(self, replies: Mapping[str, SiteReply]) -> None:
        """Add up; an array of one site is in memory at a time."""
        self._refuse_few(replies, "sent masked weights")
        ordered = dict(sorted(replies.items()))
        names = sorted(next(iter(ordered.values())).content.array_records[ARRAYS])
        for name in names:
            total: Any = None
            for reply in ordered.values():
                array = reply.array(name)
                total = array if total is None else total + array  # modulo 2^32
            self._sums[name] = total
        self.replies = {
            site: replace(
                reply, content=RecordDict({METRICS: reply.content.metric_records[METRICS]})
            )
            for site, reply in ordered.items()
        }

    def summed(
        self, replies: Mapping[str, SiteReply], before: Mapping[str, NDArray]
    ) -> SummedReplies:
        """Return the replies of the phase that trained with their mean, by those that unmask it.

        Args:
            replies: of phase ``secure-unmask``.
            before: what the sites began with, by the names of their arrays.

        Raises:
            SiteError: too few have answered, or their shares do not fit together.
        """
        self._refuse_few(replies, "helped to take the masks off")
        sums = masked(self._sums, *self._masks_left(replies))
        way = quantisation(self.common, len(self._keys), self.threshold)
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
        return SummedReplies(self.replies, mean)

    def _masks_left(self, replies: Mapping[str, SiteReply]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of masks to add to the sum, and of those to take off."""
        plus: list[bytes] = []
        shares = [_shares(reply) for reply in replies.values()]
        minus = [self._secret(site, shares) for site in self.replies]
        for gone in sorted(self._sealed.keys() - self.replies.keys()):
            private = self._secret(gone, shares)
            for site in self.replies:
                with self._naming(gone):
                    key = mask_key(private, self._keys[site][0])
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
            SiteError: it is longer than 'clip-norm' and the noise allow.
        """
        sites, number = len(self.replies), math.sqrt(self.numbers)
        noise = noise_of(self.common, self.threshold) * self.common.clip_norm * math.sqrt(sites)
        rounding = sites * way.step * number
        longest = self.common.clip_norm + share * (rounding + (number + _DEVIATIONS) * noise)
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
                f"{len(self._keys)} are needed ('secure-threshold'): mend the sites and resume"
            )

    @staticmethod
    def _check_names(names: Sequence[str], wanted: set[str]) -> None:
        if set(names) != wanted or len(names) != len(wanted):
            raise SiteError(f"record '{SECURE}' is of other sites than those that take part")

    @staticmethod
    def _check_number(listed: Sequence[bytes], wanted: int) -> None:
        if len(listed) != wanted:
            raise SiteError(f"record '{SECURE}' has {len(listed)} entries, not {wanted}")


def _shares(reply: SiteReply) -> dict[str, bytes]:
    """Return the shares that a site has given, by the site whose secret they are of."""
    record = reply.content.config_records[SECURE]
    return dict(zip(texts(record, "of"), tokens(record, "shares", LONGEST_SHARE), strict=True))
