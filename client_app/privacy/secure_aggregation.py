"""A site's side of secure aggregation: its weights leave masked, and only sums can be unmasked.

The protocol is figure 4 of Bonawitz et al. 2017, with every site a neighbour of every other. A site
signs new keys (``secure-keys``). It checks the others' keys and gives each other site a sealed
share of its secrets (``secure-shares``). It trains and masks (``train``), and signs the list of
sites whose weights arrived (``secure-agree``). Once at least the threshold of sites have signed the
same list, it returns one share for each site (``secure-unmask``): for a site whose weights arrived,
the share of that site's own mask; for a site that dropped out, the share of its masking key. It
never returns both, and never masks twice with one key.

The masks are bound to run, round, the names and keys of all sites, and the received model. So if a
server sends two sites different models or lists, their masks do not cancel. The secrets of a round
are erased once its sum is unmasked; ``fedsilo.client_app.privacy.unmasked_sums`` stores its sites.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from torch import Tensor

from fedsilo.client_app.privacy.proven_sums import (
    ProvenSum,
    prove_sum,
    refuse_missing,
    refuse_other_seal,
)
from fedsilo.client_app.privacy.round_secrets import (
    RoundSecrets,
    drop_secrets,
    lock_secrets,
    read_secrets,
    refuse_list,
)
from fedsilo.client_app.privacy.signing import SignedKeys, Signer
from fedsilo.client_app.privacy.summand import Summand
from fedsilo.client_app.privacy.unmasked_sums import (
    RoundSum,
    SummedBefore,
    UnmaskedSums,
    failed_before,
)
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.messages import SECURE_AGREE, SECURE_KEYS, SECURE_SHARES
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.privacy.secure_sum import (
    KEY,
    SAMPLES,
    Words,
    mask_arrays,
    needed_sites,
    quantisation,
    tolerated_colluders,
)
from fedsilo.models.privacy.summed_metrics import split_of
from fedsilo.strategies.wire.secure_keys import (
    LONGEST_KEY,
    LONGEST_SEALED,
    mask_check,
    new_key_pair,
    read_texts,
    read_tokens,
    read_whole,
)
from fedsilo.strategies.wire.signatures import (
    LONGEST_SIGNATURE,
    arrays_digest,
    bound_to,
    common_splits,
    context_of,
    digest,
    is_signed,
    key_words,
    public_text,
    sign_text,
)
from fedsilo.strategies.wire.sum_proofs import part_seal


@dataclass(frozen=True)
class SecureSite:
    """One site in one round of secure aggregation."""

    site: str  # the site's name
    run: str  # the run's name
    round: int
    common: CommonSettings  # the run's settings
    folder: Path  # the folder of the site's secrets
    asked: Mapping[str, Any]  # the server's record
    signer: Signer  # the site's signing key, and its rule for accepting others' keys
    summand: Summand  # the numbers that the site adds
    terms: bytes = b""  # the digest of the run's settings, which all sites must share
    # The site's part stays hidden from a server that works with this many other sites
    colluding: int = 0
    measures: Sequence[str] = ()  # the splits whose metrics may be summed
    samples: int = SAMPLES  # B, which scales parts; the same in the site files of all hospitals
    book: SummedBefore | None = None  # the sums of all runs; None in a simulation
    # The message's instruction, at a hospital that declares its data; None elsewhere. Once a sum is
    # unmasked, no other question about it is answered
    instruction: Mapping[str, Any] | None = None
    # Whether the method proves its sums, so that no site may be missing in any phase
    proves: bool = False

    def answer(self, phase: str) -> ConfigRecord:
        """Answer a phase of secure aggregation that trains nothing.

        The phases make keys, share secrets, sign the list of sites, and return the shares that
        unmask the sum.

        Raises:
            SiteError: the message is malformed, or keys are missing.
            RefusedError: the answer would reveal more than a sum.
            SettingError: no threshold is possible.
            CheckpointError: a file is unusable.
        """
        with lock_secrets(self.folder):
            if phase == SECURE_KEYS:
                return self._make_keys()
            if phase == SECURE_SHARES:
                return self._share_secrets()
            if phase == SECURE_AGREE:
                return self._sign_list()
            return self._unmask()

    def mask(
        self,
        updates: Mapping[str, Tensor],
        received: Mapping[str, Any],
        scaled_metrics: Mapping[str, float | None],
    ) -> dict[str, Words]:
        """Quantise, weight and mask this site's updates and metrics, as uint32 arrays by name.

        The weight follows from the number of samples. A site that failed masks zeros.
        ``scaled_metrics`` are 0 to 1, or None without a value. Keys never mask two different sums.

        Raises:
            SiteError: keys are missing, or the message is malformed.
            RefusedError: the sum reveals too much.
        """
        with lock_secrets(self.folder):
            # Checked again under the lock, because another message may have used the keys since
            secrets, partners = self.prepare_masking(received, list(scaled_metrics))
            quantiser = quantisation(self.common, len(secrets.keys), self.samples)
            numbers = self.summand.numbers(quantiser, updates, scaled_metrics)
            secrets.partners, secrets.weighed = partners, arrays_digest(numbers).hex()
            secrets.received = arrays_digest(received).hex()
            secrets.question = self._request_digest(received, secrets)
            secrets.failed = self.summand.failed
            self._sums().refuse_other(secrets.weighed)
            if self.book:
                self.book.note_part(secrets.received, secrets.failed)
            # Written before anything leaves, so that a restart cannot mask twice with one key
            secrets.write(self.folder)
            # Sites that received different models derive different masks, which do not cancel
            bound = bound_to(secrets.context, received, [*numbers, *scaled_metrics])
            masked = mask_arrays(numbers, *secrets.masks(self.site, bound))
            if self.proves:
                secrets.seal = part_seal(masked, mask_check(secrets.own_mask))
                secrets.write(self.folder)
        return masked

    def prepare_masking(
        self, received: Mapping[str, Any], metrics: Sequence[str]
    ) -> tuple[RoundSecrets, list[str]]:
        """Check that this site may mask its numbers, and return its secrets and the sum's sites.

        Nothing here depends on the site's data. The settings, the request and the sites must fit
        earlier sums. All sites must measure a metric's split.

        Raises:
            SiteError: keys are missing, or the list of sites is malformed.
            RefusedError: the sum would reveal too much.
        """
        secrets = read_secrets(self.folder, self.round)
        # A site with its own 'secure-samples' would get a larger weight
        if secrets.terms != self.terms:
            raise RefusedError(
                "the run's settings changed after the keys of this round were signed, but sums "
                "of sites with different settings reveal single sites' weights: begin the "
                "round again"
            )
        if secrets.partners:
            raise RefusedError(
                "weights masked with the keys of this round have already left, but two releases "
                "under the same masks reveal their difference: begin the round again"
            )
        partners = read_texts(self.asked, "sites")
        secrets.refuse_few(self.site, partners, "share their keys")
        if self.proves:
            refuse_missing(partners, secrets.keys)
        self._sums().refuse_missing_sites(partners)
        self._sums().refuse_other_question(self._request_digest(received, secrets))
        if self.book:
            self.book.refuse_changed_sum(arrays_digest(received).hex(), partners)
        for name in metrics:
            if split_of(name) not in ("", *secrets.splits):
                raise RefusedError(
                    f"'{name[:80]}' belongs to a split that not all sites measure: its sum would "
                    "cover few sites"
                )
        return secrets, partners

    def refuse_after_failure(self, received: Mapping[str, Any]) -> None:
        """Check that this site did not fail in an earlier answer to the same received arrays.

        A failed site added 0. A second answer would reveal its part as a difference of sums.
        Without a record of earlier sums, as in a simulation, the check passes.

        Raises:
            SiteError: the site failed on these arrays before.
            CheckpointError: the record is damaged.
        """
        if self.book and self.book.has_failed(arrays_digest(received).hex()):
            raise failed_before()

    def proven_sum(self) -> ProvenSum:
        """Check the proof of the last round's sum in the message, and return this sum.

        Raises:
            SiteError: the proof is missing or malformed.
            RefusedError: the proof does not fit the parts that all sites signed, or none are
                stored.
            CheckpointError: the record of the sums is damaged.
        """
        seals = UnmaskedSums(self.folder, self.round - 1).seals()
        return prove_sum(self.asked, seals, self.common, self.samples)

    def _request_digest(self, received: Mapping[str, Any], secrets: RoundSecrets) -> str:
        """Return a digest of everything in a request that decides which numbers this site masks.

        It covers the instruction, the received arrays, the names to sum and the number of sites. It
        is empty except at a hospital that declares its data.
        """
        if self.instruction is None:
            return ""
        asked = [sorted(read_texts(self.asked, kind)) for kind in ("metrics", "arrays")]
        said = [(key, self.instruction[key]) for key in sorted(self.instruction)]
        # A server's folder changes nothing at a site
        said = [(key, value) for key, value in said if key != "run-dir"]
        arrays = arrays_digest(received).hex()
        return digest("question", said, asked, arrays, len(secrets.keys)).hex()

    def _make_keys(self) -> ConfigRecord:
        """Make and store this site's keys of the round, and return the public keys, signed.

        One key pair is for masks, and one encrypts shares. New keys replace those of an earlier
        attempt. The record also has the splits that this site measures.
        """
        masking, sealing = new_key_pair(), new_key_pair()
        public = masking.public, sealing.public
        private, own_mask = (masking.private, sealing.private), os.urandom(KEY)
        RoundSecrets(self.round, *private, public, own_mask, self.terms).write(self.folder)
        splits = ",".join(self.measures)
        said = self._key_words(self.site, public, splits)
        return self._record(
            {
                "mask-key": masking.public,
                "seal-key": sealing.public,
                "public": public_text(self.signer.private),
                "terms": self.terms,
                "splits": splits,
                "samples": self.samples,
                "signature": sign_text(self.signer.private, said),
            }
        )

    def _key_words(self, site: str, keys: tuple[bytes, bytes], splits: str) -> bytes:
        return key_words(self.run, self.round, site, keys, self.terms, splits)

    def _share_secrets(self) -> ConfigRecord:
        """Check all sites' keys, and return this site's secrets as encrypted shares for the others.

        Enough shares reconstruct a secret. A hash of the own mask's seed lets the server verify it
        later. A key that is not accepted raises a RefusedError.
        """
        secrets = read_secrets(self.folder, self.round)
        # A second list of keys would bind the same secrets to other sites
        if secrets.keys:
            raise RefusedError("keys of this round are already shared: begin the round again")
        self._store_keys(secrets)
        secrets.threshold = threshold = read_whole(self.asked, "threshold")
        self._refuse_threshold(threshold, len(secrets.keys))
        secrets.context = context_of(self.run, self.round, secrets.keys, threshold)
        sealed_shares = secrets.seal_shares(self.site)
        secrets.write(self.folder)
        return self._record(
            {
                "to": list(sealed_shares),
                "sealed": list(sealed_shares.values()),
                "check": mask_check(secrets.own_mask),
            }
        )

    def _store_keys(self, secrets: RoundSecrets) -> None:
        """Check all sites' signed public keys, and put the keys into ``secrets``.

        A repeated key or a wrong key of this site raises a RefusedError. So does a signing key that
        the hospital has not confirmed. ``secrets`` also gets the splits that every site measures.
        """
        sites, splits = read_texts(self.asked, "sites"), read_texts(self.asked, "splits")
        refuse_list(self.site, sites, sites, "make keys")
        masks = read_tokens(self.asked, "mask-keys", LONGEST_KEY)
        seals = read_tokens(self.asked, "seal-keys", LONGEST_KEY)
        publics = read_tokens(self.asked, "publics", LONGEST_KEY)
        signatures = read_tokens(self.asked, "signatures", LONGEST_KEY)
        lengths = {len(one) for one in (splits, masks, seals, publics, signatures)}
        if lengths != {len(sites)}:
            raise SiteError("record 'secure' must have one key of each kind for each site")
        # A repeated key would let the server play two sites and count them as two towards the
        # threshold
        if len({*masks, *seals}) != 2 * len(sites):
            raise RefusedError("two sites have the same key: only one of them can be real")
        keys = dict(zip(sites, zip(masks, seals, strict=True), strict=True))
        if keys[self.site] != secrets.public:
            raise RefusedError("the keys under this site's name are not its own")
        received = []
        for site, public, signature, measured in zip(
            sites, publics, signatures, splits, strict=True
        ):
            said = self._key_words(site, keys[site], measured)
            received.append(SignedKeys(site, public, said, signature))
        self.signer.refuse_unsigned(received)
        secrets.keys, secrets.publics = keys, dict(zip(sites, publics, strict=True))
        secrets.splits = common_splits(splits)

    def _refuse_threshold(self, threshold: int, sites: int) -> None:
        """Check the server's threshold against the run's settings and the hospital's limit.

        The threshold is the number of sites whose shares together reveal a secret. It must hide
        this site even if 'colluding-sites' others help the server. Otherwise a RefusedError is
        raised.
        """
        if threshold != needed_sites(self.common, sites):
            raise RefusedError(f"threshold {threshold} differs from the one of the run's settings")
        most = tolerated_colluders(threshold, sites)
        if most < self.colluding:
            raise RefusedError(
                f"with {sites} sites and threshold {threshold} a sum hides this site from a server "
                f"that colludes with {most} of the others, but this hospital requires "
                f"{self.colluding} ('colluding-sites'): raise 'secure.threshold', or let more "
                "sites take part"
            )

    def _sign_list(self) -> ConfigRecord:
        """Sign and store the server's list of sites whose weights arrived. Return the signature.

        Only one list is signed, because two sums under the same keys would reveal single sites. A
        second, different list or too few sites raise a RefusedError.
        """
        secrets = read_secrets(self.folder, self.round)
        answered = read_texts(self.asked, "answered")
        secrets.refuse_few(self.site, answered, "have sent their weights")
        if not set(answered) <= set(secrets.partners):
            raise RefusedError("the list names a site that did not take part in masking")
        seals = list[str]()
        if self.proves:
            refuse_missing(answered, secrets.partners)
            seals = read_texts(self.asked, "seals")
            refuse_other_seal(dict(zip(answered, seals, strict=False)), self.site, secrets.seal)
        if (secrets.answered, secrets.seals) not in (([], []), (answered, seals)):
            raise RefusedError("another list of sites is already signed: begin the round again")
        self._sums().refuse_other(secrets.weighed, answered)
        if self.book:
            self.book.refuse_other_sites(secrets.received, answered)
        secrets.answered, secrets.seals = answered, seals
        # Before anything leaves, so that a restart cannot sign another list
        secrets.write(self.folder)
        return self._record({"signature": sign_text(self.signer.private, secrets.list_words())})

    def _unmask(self) -> ConfigRecord:
        """Return one share for each site, so that the server can unmask the sum.

        If the site's weights arrived, it is the share of its own mask's seed. Otherwise it is the
        share of its masking key. Both shares together would unmask the site's weights.
        """
        secrets = read_secrets(self.folder, self.round)
        if not secrets.answered:
            raise RefusedError("this site has signed no list of sites yet: begin the round again")
        self._refuse_disagreement(secrets)
        senders = read_texts(self.asked, "from")
        sealed_shares = read_tokens(self.asked, "sealed", LONGEST_SEALED)
        opened_shares = secrets.open_shares(
            self.site, dict(zip(senders, sealed_shares, strict=False))
        )
        of, shares = list[str](), list[bytes]()
        for site, both in opened_shares.items():
            of.append(site)
            # Never both: together they would unmask this site's weights
            if site in secrets.answered:
                shares.append(both.own_mask)
            else:
                shares.append(both.mask_key)
        # Before anything leaves
        self._sums().note(
            RoundSum(secrets.answered, secrets.weighed, secrets.question, secrets.seals)
        )
        if self.book:
            self.book.note(secrets.received, secrets.answered, secrets.failed)
        drop_secrets(self.folder)
        return self._record({"of": of, "shares": shares})

    def _refuse_disagreement(self, secrets: RoundSecrets) -> None:
        """Check that enough sites have signed the list of sites that this site has signed.

        Otherwise a server could unmask a sum for each list. Valid signatures must reach the
        threshold. With proven sums all sites must sign. Fewer raise a RefusedError.
        """
        signers = read_texts(self.asked, "signers")
        signatures = read_tokens(self.asked, "signatures", LONGEST_SIGNATURE)
        refuse_list(self.site, signers, secrets.answered, "have signed", with_own=False)
        said = secrets.list_words()
        agreeing = 0
        for site, signature in zip(signers, signatures, strict=False):
            if is_signed(secrets.publics[site], said, signature):
                agreeing += 1
        if agreeing < secrets.threshold:
            raise RefusedError(
                f"{agreeing} sites have signed the same list of sites as this one, but "
                f"{secrets.threshold} are needed ('secure.threshold'): sites with different lists "
                "would reveal single sites' weights"
            )
        if self.proves and agreeing < len(secrets.answered):
            raise RefusedError(
                f"{agreeing} sites have signed the list of sites and parts, but all "
                f"{len(secrets.answered)} must, so that each can check the sum: begin the round "
                "again"
            )

    def _record(self, values: Mapping[str, Any]) -> ConfigRecord:
        return ConfigRecord({"round": self.round, **values})

    def _sums(self) -> UnmaskedSums:
        return UnmaskedSums(self.folder, self.round)
