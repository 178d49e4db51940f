"""One secure sum as the server sees it: keys, sealed shares, masked sums, and the unmasked mean.

``strategies.loop.secure_ask`` asks the sites, phase by phase.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import (
    EVALUATE,
    SECURE_AGREE,
    SECURE_SHARES,
    SECURE_UNMASK,
    TRAIN,
)
from fedsilo.core.methods import proves_sums
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import (
    KEY,
    SAMPLES,
    Quantisation,
    Words,
    mask_arrays,
    needed_sites,
    quantisation,
    why_too_coarse,
)
from fedsilo.models.privacy.summed_metrics import bounds
from fedsilo.models.tasks.task import task_of
from fedsilo.strategies.loop.ask import ExactSum
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs
from fedsilo.strategies.wire.secure_keys import (
    COUNTS,
    MEASURED,
    METRICS,
    join_shares,
    mask_check,
    mask_key,
    public_half,
    read_whole,
)
from fedsilo.strategies.wire.signatures import common_splits, context_of
from fedsilo.strategies.wire.sum_proofs import SumProof, part_seal

_VARIANCE = "running_var"
_MARGIN = 1.001


class SecureSum:
    """The server's part in one secure sum: it collects keys, shares and masked arrays by phase.

    Args:
        round_: the round, from 1.
        common: the run's settings.
        specs: the shapes of the summed arrays, by name.
        asked: the number of sites that the round asks.
        outputs: the number of outputs of the network.
    """

    def __init__(
        self, round_: int, common: CommonSettings, specs: Specs, asked: int, outputs: int
    ) -> None:
        self.round = round_
        self.asked = asked
        self.common = common
        self.limits = task_of(common).limits(outputs)
        self.specs = specs
        self.numbers = 0  # how many numbers the arrays have together
        for spec in specs.values():
            self.numbers += math.prod(length or 1 for length in spec.shape)
        # The number of sites that must stay to the end; 0 until all keys have arrived
        self.threshold = 0
        # Masks cancel only if all sites have the same value: a
        # hash of context, arrays sent and names asked for
        self.bound = b""
        # A digest of run, round, names, keys and threshold; masks are bound to it
        self.context = b""
        # Each site's public keys of the round, by site
        self.keys: dict[str, tuple[bytes, bytes]] = {}
        # The sealed shares, by sender, then by receiver
        self.sealed: dict[str, dict[str, bytes]] = {}
        # The replies to training, by site, without arrays
        self.replies: dict[str, Reply] = {}
        # Each site's signature of the list of sites in ``replies``, by site
        self.signatures: dict[str, bytes] = {}
        # Each site's public signing key and the signature of its keys, by site
        self.signers: dict[str, tuple[bytes, bytes]] = {}
        # The splits that all sites measure; only their metrics may be summed
        self.splits: list[str] = []
        self.metrics: list[str] = []  # the measurements that are summed, sorted
        # B, the scale of all sites' parts; all sites must state the same number
        self.samples = SAMPLES
        # The unmasked sum in float64; None before
        self.exact: ExactSum | None = None
        self.failed = 0  # the number of sites in the sum that could not answer; nobody knows which
        # Whether the sum is proven to the sites; then all of them must stay to the end
        self.proves = proves_sums(common)
        # If so: each site's masked arrays and the seal of these, by site, and once the sum is
        # unmasked its proof (``SumProof.to_values``)
        self.parts: dict[str, dict[str, Words]] = {}
        self.seals: dict[str, str] = {}
        self.proof: dict[str, list[str]] = {}
        self._site_splits: list[str] = []
        self._checks: dict[str, bytes] = {}
        self._sums: dict[str, Words] = {}

    def masked_specs(self) -> dict[str, ArraySpec]:
        """Return the type and shape of each array in a masked reply, by name.

        All types are uint32. The summed arrays keep their shapes. The array ``COUNTS`` has the
        number of training samples, and the number of sites that could not answer. If m metrics are
        summed, ``METRICS`` has m values, and ``MEASURED`` has m numbers of samples.
        """
        specs = {name: ArraySpec(spec.shape, "uint32") for name, spec in self.specs.items()}
        specs[COUNTS] = ArraySpec((2,), "uint32")
        if self.metrics:
            specs[METRICS] = ArraySpec((len(self.metrics),), "uint32")
            specs[MEASURED] = ArraySpec((len(self.metrics),), "uint32")
        return specs

    def record(self, phase: str, site: str) -> ConfigRecord:
        """Build the record of secure aggregation that ``site`` receives in a phase.

        It holds the number of the round. The phase decides about the rest:

        - ``secure-shares``: each site's public keys, signature and splits with measurements, and
          the number of sites that must stay to the end.
        - training or evaluation: the names of the sites, metrics and arrays in the sum.
        - ``secure-agree``: the names of the sites whose masked arrays arrived. If the server must
          prove the sum, hashes of these arrays are added.
        - ``secure-unmask``: the sites' signatures of that list of names, and the encrypted shares
          from other sites to ``site``.
        """
        values: dict[str, Any] = {"round": self.round}
        if phase == SECURE_SHARES:
            # Lists in one order of sites, because a record holds no mappings
            mask_keys, seal_keys = zip(*self.keys.values(), strict=True)
            publics, signatures = zip(*self.signers.values(), strict=True)
            values |= {
                "sites": list(self.keys),
                "mask-keys": list(mask_keys),
                "seal-keys": list(seal_keys),
                "publics": list(publics),
                "signatures": list(signatures),
                "splits": self._site_splits,
                "threshold": self.threshold,
            }
        elif phase in (TRAIN, EVALUATE):
            values |= {
                "sites": list(self.sealed),
                "metrics": self.metrics,
                "arrays": sorted(self.specs),
            }
        elif phase == SECURE_AGREE:
            values |= {"answered": list(self.replies)}
            if self.proves:
                values |= {"seals": list(self.seals.values())}
        elif phase == SECURE_UNMASK:
            sealed = {}  # the shares that the other sites made for this one, by their names
            for sender, shares in self.sealed.items():
                if sender != site:
                    sealed[sender] = shares[site]
            values |= {
                "signers": list(self.signatures),
                "signatures": list(self.signatures.values()),
                "from": list(sealed),
                "sealed": list(sealed.values()),
            }
        return ConfigRecord(values)

    def take_keys(self, replies: Mapping[str, Reply]) -> None:
        """Store the sites' public keys and signatures, and compute the values that depend on them.

        These values are:

        - ``threshold``: the number of sites that must stay to the end.
        - ``samples``: the number 'secure-samples', which all sites must share.
        - ``splits``: the splits that all these sites measure.
        - ``context``: a hash of the run, the round, the keys and the threshold.

        The caller has already checked the signatures.

        Raises:
            SettingError: rounding to integers is too coarse for this number of sites.
            SiteError: fewer than three sites replied, 'secure.threshold' does not fit their number,
                'secure-samples' differs or is below 1, or the server must prove the sum but an
                asked site did not reply.
        """
        if self.proves:
            self._refuse_missing(len(replies), self.asked, "sent keys for secure aggregation")
        try:
            self.threshold = needed_sites(self.common, len(replies))
        except SettingError as error:
            raise SiteError(
                f"round {self.round}: {len(replies)} of {self.asked} sites have sent keys for "
                f"secure aggregation, and {error.args[0].partition(':')[0]}: repair the sites and "
                "resume"
            ) from None
        self.samples = self._agreed_samples(replies)
        quantiser = quantisation(self.common, len(replies), self.samples)
        reason = why_too_coarse(self.numbers, quantiser)
        if reason:
            raise SettingError(reason)
        for site, reply in sorted(replies.items()):
            record = reply.secure
            self.keys[site] = bytes(record["mask-key"]), bytes(record["seal-key"])
            self.signers[site] = bytes(record["public"]), bytes(record["signature"])
            self._site_splits.append(str(record["splits"]))
        self.splits = common_splits(self._site_splits)
        self.context = context_of(self.common.run_name, self.round, self.keys, self.threshold)

    def _agreed_samples(self, replies: Mapping[str, Reply]) -> int:
        """Return the number 'secure-samples', which must be the same at all sites.

        Before summing, sites multiply their updates by their number of samples and divide them by
        this number.

        Raises:
            SiteError: a site did not send an integer, the sites' numbers differ, or the number is
                below 1. In the last two cases the error lists the sites with each number.
        """
        said: dict[int, list[str]] = {}
        for site, reply in sorted(replies.items()):
            said.setdefault(read_whole(reply.secure, "samples"), []).append(site)
        if len(said) > 1 or min(said) < 1:
            parts = [f"{', '.join(sites)}: {samples}" for samples, sites in sorted(said.items())]
            raise SiteError(
                f"round {self.round}: 'secure-samples' must be the same number in all site files, "
                f"1 or more, because all parts of a sum have one scale, but is {'; '.join(parts)}: "
                "agree on a number, then resume"
            )
        return next(iter(said))

    def take_shares(self, replies: Mapping[str, Reply]) -> None:
        """Store the encrypted shares of each site's secrets, which remove masks later.

        Only the receiving site can open a share, not the server. Each site's hash of its mask is
        stored too.

        Raises:
            SiteError: fewer sites replied than ``threshold``. If the server must prove the sum, all
                sites in ``keys`` must reply.
        """
        self._refuse_few(replies, "shared their keys")
        for site, reply in sorted(replies.items()):
            record = reply.secure
            self.sealed[site] = dict(zip(record["to"], record["sealed"], strict=True))
            self._checks[site] = bytes(record["check"])

    def take_masked(self, replies: Mapping[str, Reply]) -> None:
        """Add up the sites' masked arrays modulo 2^32, and store the replies without their arrays.

        The sums stay masked until ``mean``. If the server must prove the sum, it also keeps each
        site's masked arrays and a hash of them in memory.

        Raises:
            SiteError: fewer sites replied than ``threshold``. If the server must prove the sum, all
                sites in ``keys`` must reply.
        """
        self._refuse_few(replies, "sent masked weights")
        for name in sorted(self.masked_specs()):
            total: Any = np.uint32(0)
            for reply in replies.values():
                # uint32 wraps around, so this is the sum modulo 2^32, in whatever order
                total = total + reply.arrays[name]
            self._sums[name] = total
        for site, reply in sorted(replies.items()):
            if self.proves:
                self.parts[site] = {name: np.array(part) for name, part in reply.arrays.items()}
                self.seals[site] = part_seal(self.parts[site], self._checks[site])
            self.replies[site] = replace(reply, arrays={})

    def take_signatures(self, replies: Mapping[str, Reply]) -> None:
        """Store each site's signature of the list of sites whose masked arrays arrived.

        The caller has already checked the signatures.

        Raises:
            SiteError: fewer sites replied than ``threshold``. If the server must prove the sum, all
                sites in ``keys`` must reply.
        """
        self._refuse_few(replies, "signed the list of sites whose weights arrived")
        for site, reply in sorted(replies.items()):
            self.signatures[site] = bytes(reply.secure["signature"])

    def mean(
        self, replies: Mapping[str, Reply], before: Arrays
    ) -> tuple[dict[str, NDArray], dict[str, float]]:
        """Remove the masks from the sums, and return the mean arrays and the mean metrics.

        The sites sent updates, so the mean update is added to ``before``. A variance of batch norm
        below 0 becomes 0. Two attributes are set: ``failed``, the number of sites that could not
        answer, and ``exact``, the mean update in float64.

        Args:
            replies: the replies of phase ``secure-unmask``, which have the shares.
            before: the arrays that the sites started from, by name.

        Returns:
            The arrays by name, float32, and the metrics by name. Both are means weighted by
            samples. A metric is left out if no site has a finite value.

        Raises:
            SettingError: rounding to integers is too coarse for this number of samples.
            SiteError: fewer sites than ``threshold`` replied, or their shares do not restore a
                site's secret. The unmasked counts or updates may also be impossible
                (``_refuse_counts`` and ``_refuse_unlikely``).
        """
        self._refuse_few(replies, "helped to remove the masks")
        plus, minus = self._remaining_mask_keys(replies)
        sums = mask_arrays(self._sums, plus, minus)
        if self.proves:
            # No site is missing, so these are the own masks, in the order of the replies
            own_masks = dict(zip(self.replies, minus, strict=True))
            self.proof = SumProof(self.parts, own_masks).to_values()
        samples, self.failed = map(int, sums.pop(COUNTS))
        none = np.zeros(0, np.uint32)
        metric_sums, metric_samples = sums.pop(METRICS, none), sums.pop(MEASURED, none)
        sites = len(self.replies)
        quantiser = quantisation(self.common, len(self.keys), self.samples)
        self._refuse_counts(samples, metric_samples)
        reason = why_too_coarse(self.numbers, quantiser, sites, samples)
        if reason:
            raise SettingError(reason)
        # Sites scaled their updates by samples / B, so that none exceeds the clipping norm
        share = self.samples / samples
        updates = {name: quantiser.total(words, sites) * share for name, words in sums.items()}
        self._refuse_unlikely(updates, quantiser, share)
        self.exact = ExactSum(samples, updates)
        mean = {}
        for name, update in updates.items():
            array = before[name].astype(np.float64) + update
            if name.endswith(_VARIANCE):
                array = np.maximum(array, 0.0)  # rounding may move a variance of 0 just below 0
            mean[name] = np.asarray(array, np.float32)
        return mean, self._metric_means(
            replace(quantiser, limit=1.0).total(metric_sums, sites), metric_samples
        )

    def _metric_means(self, metric_sums: NDArray, metric_samples: Words) -> dict[str, float]:
        """Return the mean of each summed metric, by name, rounded to 6 decimal places.

        Sites scale a metric from the range of its ``bounds`` to 0..1 before they send it, and this
        function scales the mean back. The mean is weighted by samples. A metric without samples is
        left out, because no site has a finite value of it.

        Args:
            metric_sums: for each metric, the sum of the scaled values, each times the site's
                samples and divided by 'secure-samples'.
            metric_samples: for each metric, the number of samples in the sum.
        """
        means = {}
        for name, metric_sum, samples in zip(
            self.metrics, metric_sums, metric_samples, strict=True
        ):
            if not samples:
                continue
            low, high = bounds(name, self.limits) or (0.0, 0.0)
            # Quantisation makes digits beyond the sixth meaningless
            means[name] = round(low + (high - low) * float(metric_sum) * self.samples / samples, 6)
        return means

    def _remaining_mask_keys(self, replies: Mapping[str, Reply]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of masks to add to the sum, and the keys of masks to subtract from it.

        Each site that sent weights has added a mask of its own, which is subtracted. A site that
        shared its keys but sent no weights has left a mask in each other site's part of the sum.
        The server restores that site's private key to compute these masks. It subtracts those that
        sites added, and adds those that sites subtracted.

        Raises:
            SiteError: the shares do not restore a key.
        """
        plus: list[bytes] = []
        # Per giver, the shares that it returned, by the site whose secret they belong to
        shares: dict[str, dict[str, bytes]] = {}
        for giver, reply in replies.items():
            record = reply.secure
            shares[giver] = dict(zip(record["of"], record["shares"], strict=True))
        minus = [self._reconstruct_secret(site, shares) for site in self.replies]
        for gone in sorted(self.sealed.keys() - self.replies.keys()):
            private = self._reconstruct_secret(gone, shares)
            for site in self.replies:
                key = mask_key(private, self.keys[site][0], self.bound)
                # The site of a pair with the first name adds the mask, and the other site subtracts
                # it; the server undoes what ``site`` did
                if site < gone:
                    minus.append(key)
                else:
                    plus.append(key)
        return plus, minus

    def _reconstruct_secret(self, site: str, shares: Mapping[str, Mapping[str, bytes]]) -> bytes:
        """Reconstruct the secret of ``site`` from the shares that other sites have returned.

        The secret is the seed of the site's own mask if the site sent weights. Otherwise it is the
        site's private mask key. A result is right if it matches the site's commitment. If all
        shares together fail, each share is left out in turn. One wrong share is therefore harmless
        if there are more shares than ``threshold``.

        Args:
            site: the site whose secret is reconstructed.
            shares: the shares by the site that returned them, and then by the site of the secret.

        Raises:
            SiteError: no choice of shares gives the secret. The error names the likely cause.
        """
        given: dict[str, bytes] = {}
        for giver, gives in shares.items():
            if site in gives:
                given[giver] = gives[site]
        for left_out in (None, *given):
            some = [share for giver, share in given.items() if giver != left_out]
            if len(some) < self.threshold:
                continue
            with suppress(SiteError):
                secret = join_shares(some[: self.threshold])
                if self._matches_commitment(site, secret):
                    return secret
        raise SiteError(
            f"round {self.round}: cannot remove the masks of site {site}: {len(given)} of "
            f"{len(shares)} sites could open its shares, but the shares do not restore its "
            f"secret; site {site} is at fault or, if only {self.threshold} sites answered, one of "
            f"{', '.join(shares)}: repair it or leave it out, and resume the run, which "
            "begins the round again"
        )

    def _matches_commitment(self, site: str, secret: bytes) -> bool:
        """Tell whether ``secret`` matches the commitment or public key that ``site`` sent."""
        if site in self.replies:
            return len(secret) == KEY and mask_check(secret) == self._checks[site]
        return public_half(secret) == self.keys[site][0]

    def _refuse_counts(self, samples: int, metric_samples: Words) -> None:
        """Check that the unmasked counts are possible, because a wrong mask makes them random.

        ``failed``, the number of sites that could not answer, may be at most the number of sites in
        the sum. No other count may exceed the number of sites times 'secure-samples'. ``samples``
        must be above 0, but the count of a metric may be 0.

        Args:
            samples: the training samples of all sites in the sum together.
            metric_samples: for each metric, the samples of these sites together.

        Raises:
            SiteError: a count is impossible. If all sites failed and there are no samples, the
                error says so.
        """
        sites = len(self.replies)
        if self.failed == sites and samples == 0:
            raise SiteError(
                f"round {self.round}: none of {sites} sites could answer, and each site's own log "
                "says why: if training has diverged lower 'train.learning-rate', else repair the "
                "sites; then begin a run with another 'seed'"
            )
        if self.failed > sites:
            raise self._spoilt(f"counts {self.failed} sites that could not answer")
        for count in (samples, *metric_samples.tolist()):
            if count > sites * self.samples:
                raise self._spoilt(f"counts {count} samples")
        if samples == 0:
            raise self._spoilt("counts no training samples")

    def _spoilt(self, what: str) -> SiteError:
        return SiteError(
            f"round {self.round}: the masks do not cancel in the sum, which {what}: one of "
            f"{', '.join(self.replies)} masked other numbers than requested, or with other keys, "
            "and the sum does not show which site; start again with fewer of these sites"
        )

    def _refuse_unlikely(
        self, updates: Mapping[str, NDArray], quantiser: Quantisation, share: float
    ) -> None:
        """Check that the mean update is not too long, as wrong masks would make it.

        Its L2 norm over all arrays may be at most 1.001 * ('secure.clip-norm' + rounding error).
        The rounding error is at most ``share`` * sites * quantisation step * sqrt(numbers in an
        update).

        Args:
            updates: the mean update of each array.
            quantiser: the quantisation of this sum.
            share: 'secure-samples' divided by the number of samples in the sum. The sums were
                multiplied by it.

        Raises:
            SiteError: the norm is above this limit.
        """
        # Each number may be wrong by one step of the quantisation at each site
        rounding = len(self.replies) * quantiser.step * math.sqrt(self.numbers)
        longest = self.common.clip_norm + share * rounding
        squared = 0.0
        for update in updates.values():
            squared += float(np.square(update).sum())
        length = math.sqrt(squared)
        if length > _MARGIN * longest:
            raise self._spoilt(
                f"has a mean of length {length:.3g}, but {longest:.3g} is the largest possible"
            )

    def _refuse_missing(self, count: int, expected: int, what: str) -> None:
        """Check that all expected sites replied, because each site checks the sum over all of them.

        Args:
            count: the number of sites that replied.
            expected: the number of sites that must reply.
            what: what the sites did, for the error, such as "masked their weights".

        Raises:
            SiteError: fewer sites than expected replied.
        """
        if count < expected:
            raise SiteError(
                f"round {self.round}: {count} of {expected} sites {what}, but method "
                f"'{self.common.method}' needs all of them, because each checks the sum over all: "
                "repair the sites and resume"
            )

    def _refuse_few(self, replies: Mapping[str, Reply], what: str) -> None:
        if self.proves:
            self._refuse_missing(len(replies), len(self.keys), what)
        if len(replies) < self.threshold:
            raise SiteError(
                f"round {self.round}: {len(replies)} sites {what}, but {self.threshold} of "
                f"{len(self.keys)} are needed ('secure.threshold'): repair the sites and resume"
            )
